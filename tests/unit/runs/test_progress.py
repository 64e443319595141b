import io
import re

from shardwise.runs.progress import ProgressView

START = {
    "kind": "start",
    "ranks": [{"rank": 0, "host": "h", "device": "cpu", "pid": 1}],
    "parameters": 10,
    "num_steps": 4,
    "facts": [["plan", "replicate2", "preset ddp"]],
}


def steps(first, losses):
    return {
        "kind": "steps", "first": first, "epoch": 0, "losses": losses, "lr": 1e-3, "samples": 8, "skipped": 0,
        "seconds": 0.5,
    }  # fmt: skip


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_without_a_terminal_plain_lines_come_every_few_seconds_and_at_the_end():
    stream = io.StringIO()
    view = ProgressView(stream)
    for event in [START, steps(0, [2.0]), steps(1, [1.5]), steps(2, [1.0, None])]:
        view.show(event)
    lines = [line for line in stream.getvalue().splitlines() if line.startswith("step")]
    assert len(lines) == 2
    assert lines[0].startswith("step 1/4 · epoch 1 · loss 2.0000 · 16 samples/s")
    assert "loss nan" in lines[1]
    assert "\x1b" not in stream.getvalue()


def test_start_report_is_complete_without_a_terminal_and_wrapped_at_spaces_on_a_narrow_one(monkeypatch):
    long = "1 · 2 · 3 · 4 · 5 · 6 · 7 · 8 · 9 · 10 · 11 · 12 [13]"
    start = START | {"facts": [["learning rate", long, "Cosine(warmup=0, floor=0.0), as the job sets it"]]}
    whole = f"{long}  ({start['facts'][0][2]})"
    monkeypatch.setenv("COLUMNS", "60")
    for stream in (io.StringIO(), Terminal()):
        view = ProgressView(stream)
        view.show(start)
        view.close()
        report = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue()).partition("learning rate")[2]
        assert " ".join(report.split()).startswith(" ".join(whole.split()))
        assert (whole in report) == (not stream.isatty())


def test_terminal_gets_a_bar_that_moves_and_lines_above_it():
    stream = Terminal()
    view = ProgressView(stream)
    for event in [START, steps(0, [2.0, 1.0])]:
        view.show(event)
    assert "2/4" in stream.getvalue()
    view.line("a line of the job [with brackets]")
    view.close()
    assert "a line of the job [with brackets]" in stream.getvalue()


def test_unknown_events_are_passed_over():
    ProgressView(io.StringIO()).show({"kind": "from the future"})


def test_evaluation_that_takes_long_is_shown_with_its_number_of_batches():
    for stream in (io.StringIO(), Terminal()):
        view = ProgressView(stream)
        view.show(START)
        view.show({"kind": "evaluating", "step": 4, "batches": 37, "seconds": 5.2})
        view.close()
        assert "evaluating" in stream.getvalue()
        assert "37 batches" in stream.getvalue()
