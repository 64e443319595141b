"""The page of a large run in a real browser."""

import threading

import pytest
from runs.synthetic import attempt_event, empty_run, large_run, start_event, steps_event, write

from env.chromium import chromium, needs_chromium
from shardwise.monitor.server import page_server
from shardwise.runs.state import RunState

pytestmark = needs_chromium

READY = "document.body.dataset.ready === 'yes' && !document.querySelector('#eta').textContent.includes('reading')"


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


@pytest.fixture
def opened(browser):
    """A function from a run to its page, ready."""
    servers = []

    def open_page(run):
        server = page_server(RunState(run), None)
        serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        serving.start()
        servers.append((server, serving))
        page = browser.open(server.url)
        page.show(1200, 900)
        page.wait_for(READY)
        return page

    yield open_page
    for server, serving in servers:
        server.shutdown()
        serving.join()
        server.server_close()


def text(page, selector):
    return page.evaluate(f"document.querySelector({selector!r}).textContent")


def centre(page, selector):
    box = f"document.querySelector({selector!r}).getBoundingClientRect()"
    return page.evaluate(f"(box => [box.left + box.width / 2, box.top + box.height / 2])({box})")


def painted(page, selector):
    """Whether a canvas shows anything."""
    return page.evaluate(
        f"(canvas => canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data.some(Boolean))"
        f"(document.querySelector({selector!r}))"
    )


def test_page_of_64_ranks_and_100_000_steps(opened, tmp_path):
    run = large_run(tmp_path / "run")
    run.stdout(13).write_text("where is my data <script>alert(1)</script>\n")
    page = opened(run)
    page.wait_for("document.querySelectorAll('#ranks tbody tr').length === 64")

    # what a user sees first
    assert "step 100,000 of 125,000" in text(page, "#step")
    assert text(page, "#state") == "running"
    assert "rank 13 is last" in page.wait_for(
        "document.querySelector('#ranks-note').textContent.match(/rank 13 is last/)?.[0]"
    )
    assert page.evaluate("document.querySelectorAll('.chart:not([hidden]) canvas').length") == 5
    page.wait_for("document.querySelector('canvas').width > 300")
    assert painted(page, "canvas")
    assert page.evaluate("document.querySelector('canvas').getAttribute('aria-label')").endswith("restarted 1 times")

    # hover shows values on every chart
    page.move(*centre(page, "canvas"))
    page.wait_for("!document.querySelector('#tip').hidden")
    assert "Loss" in text(page, "#tip")
    assert "Gradient norm" in text(page, "#tip")

    # the switch changes the picture
    before = page.evaluate("document.querySelector('canvas').toDataURL()")
    page.evaluate("document.querySelector('#log-scale').click()")
    page.wait_for(f"document.querySelector('canvas').toDataURL() !== {before!r}")

    # any column sorts
    page.evaluate(
        "[...document.querySelectorAll('#ranks th button')].find(button => button.textContent === 'behind').click()"
    )
    assert page.evaluate("document.querySelector('#ranks tbody tr').dataset.rank") == "13"

    # a click on a rank shows its log, as text
    page.evaluate("document.querySelector('#ranks tbody tr').click()")
    page.wait_for("document.querySelector('#log').textContent.includes('where is my data <script>')")

    # a phone: one column, nothing hangs over
    page.show(390, 844)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert page.errors == []


def test_page_draws_the_learning_rate_metrics_and_logged_values(opened, tmp_path):
    run = empty_run(tmp_path / "run")
    events = [start_event(1.0, 1, 4)]
    for step in range(1, 5):
        values = {"loss": 2.0 / step, "accuracy": 0.2 * step}
        events += [
            {"at": 1.0 + step, "kind": "log", "step": step, "values": {"tokens <b>": 8.0}},
            steps_event(1.0 + step, step - 1, [3.0 / step], lr=0.1 * step, grad_norm=None),
            {"at": 1.0 + step, "kind": "evaluation", "step": step, "epoch": 0, "values": values},
        ]
    write(run.events(0), *events)
    page = opened(run)
    titles = page.evaluate(
        "[...document.querySelectorAll('.chart:not([hidden]) h2 > span:first-child')].map(e => e.textContent)"
    )
    assert titles == ["Loss", "Samples per second", "Learning rate", "tokens <b>", "Test accuracy"]
    page.move(*centre(page, "canvas"))
    page.wait_for("!document.querySelector('#tip').hidden")
    assert "Test accuracy" in text(page, "#tip")
    assert page.errors == []


def test_page_of_a_plain_script_shows_its_end_and_its_log(opened, tmp_path):
    run = empty_run(tmp_path / "run")
    write(
        run.launcher_events(),
        attempt_event(1.0, 2),
        {"at": 2.0, "kind": "exit", "rank": 1, "code": 1, "stopped": False, "words": "ValueError: <i>no</i>"},
        {"at": 2.0, "kind": "verdict", "text": "rank 1 failed first: ValueError: <i>no</i>"},
        {"at": 2.0, "kind": "finish", "state": "failed", "restarts": 0},
    )
    run.stdout(0).write_text("epoch 1\n")
    page = opened(run)
    page.wait_for("document.querySelector('#state').textContent === 'failed'")
    page.wait_for("document.querySelector('#log').textContent.includes('epoch 1')")
    assert text(page, "#verdict") == "rank 1 failed first: ValueError: <i>no</i>"
    assert page.evaluate("document.querySelector('#charts').hidden")
    assert page.evaluate("document.querySelector('#ranks tbody').rows.length") == 2
    assert page.errors == []
