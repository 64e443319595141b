import io

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
