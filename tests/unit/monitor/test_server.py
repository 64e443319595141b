"""The page's server: whom it answers, and what."""

import http.client
import json
import stat
import threading
import time
from urllib.parse import quote

import pytest
from runs.synthetic import empty_run, start_event, steps_event, write

from refusals import refuses
from shardwise.monitor.server import page_server
from shardwise.runs.state import RunState


@pytest.fixture
def run(tmp_path):
    run = empty_run(tmp_path / "run")
    write(run.events(0), start_event(time.time(), 2, 10), steps_event(time.time(), 0, [3.0, 2.0]))
    run.stdout(1).write_text("hello <b>\n")
    return run


@pytest.fixture
def server(run):
    server = page_server(RunState(run), None)
    serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    serving.start()
    yield server
    server.shutdown()
    serving.join()
    server.server_close()


def get(server, path, host=None):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    connection.request("GET", path, headers={"Host": host or f"127.0.0.1:{server.server_port}"})
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer, content


def state(server, cursor=""):
    return json.loads(get(server, f"/{server.token}/state?since={quote(cursor)}")[1])


def test_page_and_its_parts_are_served_with_a_strict_policy(server):
    answer, page = get(server, f"/{server.token}/")
    assert answer.status == 200
    assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
    assert answer.headers["Referrer-Policy"] == "no-referrer"
    for name, kind in (("page.js", "text/javascript"), ("page.css", "text/css"), ("icon.svg", "image/svg+xml")):
        assert name.encode() in page
        answer, _ = get(server, f"/{server.token}/{name}")
        assert (answer.status, answer.headers.get_content_type()) == (200, kind)
    assert b"http:" not in page
    assert b"https:" not in page


@pytest.mark.parametrize("path", ["/", "/state", "//", "/{token}x/", "/{short}/", "/%00/", "/../{token}/", "/%C3%A9/"])
def test_wrong_or_missing_token_gets_nothing(server, path):
    path = path.format(token=server.token, short=server.token[:-1])
    answer, content = get(server, path)
    assert answer.status == 403
    assert server.token.encode() not in content


def test_other_host_names_get_nothing_even_with_the_token(server):
    path, port = f"/{server.token}/state", server.server_port
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1", f"127.0.0.1:{port + 1}"):
        assert get(server, path, host)[0].status == 403
    assert get(server, path, f"localhost:{port}")[0].status == 200


@pytest.mark.parametrize(
    "name", ["nothing", "../view.py", "page/../page.js", "log", "log?rank=-1", "log?rank=a", "log?rank=%C2%B2"]
)
def test_a_path_that_does_not_exist_is_not_found(server, name):
    assert get(server, f"/{server.token}/{name}")[0].status == 404


def test_it_listens_on_loopback_only(server):
    assert server.server_address[0] == "127.0.0.1"


def test_increments_follow_the_run(server, run):
    deadline = time.monotonic() + 20
    first = state(server)
    while not first["curves"].get("loss", {}).get("rows") and time.monotonic() < deadline:
        first = state(server)
    assert [row[3] for row in first["curves"]["loss"]["rows"]] == [3.0, 2.0]
    write(run.events(0), steps_event(time.time(), 2, [1.0]))
    found = first
    while found["status"]["step"] < 3 and time.monotonic() < deadline:
        found = state(server, first["cursor"])
        time.sleep(0.02)
    assert not found["whole"]
    assert (found["curves"]["loss"]["start"], [row[0] for row in found["curves"]["loss"]["rows"]]) == (1, [2, 3])


def test_log_of_a_rank_is_its_end(server, run):
    run.stderr(1).write_text("".join(f"line {number}\n" for number in range(100_000)))
    logs = json.loads(get(server, f"/{server.token}/log?rank=1")[1])
    assert logs["out"] == "hello <b>\n"
    assert logs["err"].endswith("line 99999\n")
    assert len(logs["err"]) <= 1 << 16
    assert logs["error"] == ""


def test_address_is_kept_for_the_next_time_and_for_nobody_else(server, run):
    kept = run.path / "watch.json"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    again = page_server(RunState(run), None)  # its port is taken by the first, so it takes another
    assert again.token == server.token
    assert again.server_port != server.server_port
    again.server_close()


def test_server_comes_back_at_the_same_address(run):
    first = page_server(RunState(run), None)
    first.server_close()
    second = page_server(RunState(run), None)
    second.server_close()
    assert second.url == first.url


@pytest.mark.parametrize(
    "content", ["", "{", '{"port":1,"token":""}', '{"port":99999999,"token":"' + "a" * 32 + '"}', "[]"]
)
def test_kept_address_that_makes_no_sense_is_not_used(run, content):
    (run.path / "watch.json").write_text(content)
    server = page_server(RunState(run), None)
    server.server_close()
    assert len(server.token) >= 32


def test_port_that_is_taken_is_refused_in_one_sentence(server, run):
    with refuses("watch.listen-failed", server.server_port):
        page_server(RunState(run), server.server_port)
