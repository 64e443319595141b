"""The picture of a run in characters."""

import io
import json
import os
import sys
import threading
import time

import msgspec
import pytest
from rich.console import Console
from runs.synthetic import attempt_event, empty_run, large_run, start_event, steps_event, write

from refusals import refuses
from shardwise.job import refer
from shardwise.monitor.terminal import picture, report_of, show, show_live
from shardwise.monitor.watch import compare_runs, watch
from shardwise.plots.figures import bounds, draw_curve
from shardwise.runs.events import launch_log
from shardwise.runs.failure import describe_failure
from shardwise.runs.state import RunState
from shardwise.training.saving import StoppedError


def seen(run):
    state = RunState(run)
    state.refresh_all()
    return state


def drawn(run, width=110, height=50):
    console = Console(file=io.StringIO(), width=width, height=height, highlight=False)
    console.print(picture(report_of(seen(run)), console))
    return console.file.getvalue()


def test_64_ranks_fit_and_the_late_one_stands_first(tmp_path):
    text = drawn(large_run(tmp_path / "run", steps=2_000, per_event=20), width=100, height=40)
    lines = text.splitlines()
    assert len(lines) <= 40
    assert all(len(line) <= 100 for line in lines)
    assert "step 2,000 of 2,500" in text
    heading = next(number for number, line in enumerate(lines) if line.startswith("rank "))
    assert lines[heading + 1].split()[0] == "13"
    assert "0-12, 14-63" in lines[heading + 2]
    assert "1 restart" in text


def test_run_of_a_plain_script_shows_what_its_launcher_recorded(tmp_path):
    run = empty_run(tmp_path / "run")
    write(
        run.launcher_events(),
        attempt_event(1.0, 2),
        {"at": 2.0, "kind": "exit", "rank": 1, "code": 1, "stopped": False, "words": "ValueError: no"},
        {"at": 2.0, "kind": "verdict", "text": "rank 1 failed first: ValueError: no"},
        {"at": 2.0, "kind": "finish", "state": "failed", "restarts": 0},
    )
    text = drawn(run)
    assert "train.py" in text
    assert "failed: ValueError: no" in text
    assert "2 processes started on node0" in text


def test_rank_table_of_a_stopped_run_is_readable_in_80_and_120_columns(tmp_path):
    run = large_run(tmp_path / "run", ranks=2, steps=2_000, per_event=20)
    stopped = StoppedError("asked to stop, saved at step 17", code="train.stopped", fix="run it again to resume")
    with launch_log(run) as log:
        for rank in range(2):
            log.exit(rank, stopped.exit_code, stopped=True, failure=describe_failure(stopped, rank))
        log.finish("stopped", restarts=1)
    for width in (80, 120):
        lines = drawn(run, width=width).splitlines()
        heading = next(number for number, line in enumerate(lines) if line.startswith("rank "))
        # No column is truncated; "for" and "behind", without a value for ranks that are gone, are left out.
        assert lines[heading].split() == ["rank", "host", "device", "phase", "step", "memory", "state"]
        for rank in range(2):
            found = lines[heading + 1 + rank]
            assert "…" not in found.partition("stopped:")[0]
            assert "stopped: asked to stop" in found, (width, found)


def test_terminal_that_knows_ascii_only_still_shows_the_run(tmp_path, monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    show(seen(large_run(tmp_path / "run", ranks=2, steps=2_000, per_event=20)))
    stream.flush()
    text = stream.buffer.getvalue().decode("ascii")
    assert "####" in text
    assert "step 2,000 of 2,500" in text


def test_spike_reaches_the_top_and_the_rest_stays_at_the_bottom():
    rows = [(step, 1.0, 1.0, 1.0) for step in range(100)]
    rows[50] = (50, 1.0, 9.0, 5.0)
    lines = draw_curve(rows, 40, 4, *bounds(rows), braille=False)
    assert lines[0].count("#") == 1
    assert lines[3].count("#") == 40


def test_few_points_are_joined_by_lines():
    rows = [(0, 1.0, 1.0, 1.0), (9, 4.0, 4.0, 4.0)]
    lines = draw_curve(rows, 20, 4, *bounds(rows), braille=False)
    assert all(any(line[x] == "#" for line in lines) for x in range(20))


def test_live_view_ends_with_the_run(tmp_path, monkeypatch):
    run = empty_run(tmp_path / "run")
    write(run.launcher_events(), attempt_event(time.time(), 2))
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    monkeypatch.setattr(sys, "stdout", stream)
    end = {"at": time.time(), "kind": "finish", "state": "finished", "restarts": 0}
    finishing = threading.Timer(0.2, write, (run.launcher_events(), end))
    finishing.start()
    show_live(RunState(run))
    finishing.join()
    stream.flush()
    assert "the run has finished" in stream.buffer.getvalue().decode()


def swept_run(path, *, width, losses, accuracy):
    """Write a run that has ended, with an override, metrics and a value that a callback logged."""
    run = empty_run(path)
    overrides = {"width": str(width), "optimizer.lr": "0.1"}
    run.job.write_text(json.dumps({"path": "/jobs/job.py", "attribute": "job", "overrides": overrides, "digest": ""}))
    events = [start_event(1.0, 2, len(losses))]
    for first, loss in enumerate(losses):
        at = 2.0 + first
        events += [
            {"at": at, "kind": "log", "step": first + 1, "values": {"tokens": 8.0}},
            steps_event(at, first, [loss], lr=0.1 * first),
            {"at": at, "kind": "evaluation", "step": first + 1, "epoch": 0, "values": {"loss": loss, "top1": accuracy}},
        ]
        accuracy -= 0.125
    write(run.events(0), *events, {"at": 9.0, "kind": "end", "steps": len(losses), "loss": losses[-1]})
    return run


@pytest.mark.parametrize("width", [80, 120])
def test_metrics_learning_rate_and_logged_values_are_drawn_within_the_terminal(tmp_path, width):
    run = swept_run(tmp_path / "run", width=8, losses=[3.0, 2.5, 2.0, 1.5], accuracy=0.5)
    lines = drawn(run, width=width).splitlines()
    assert all(len(line) <= width for line in lines)
    text = "\n".join(lines)
    titles = ["loss", "samples/s", "test top1", "learning rate"]
    assert [title for title in titles if title not in text] == []
    short = drawn(run, width=width, height=24).splitlines()
    assert len(short) <= 24


def test_two_runs_are_compared_by_settings_results_and_losses_at_the_same_step(tmp_path):
    left = swept_run(tmp_path / "narrow", width=8, losses=[3.0, 2.5, 2.0, 1.5], accuracy=0.5)
    right = swept_run(tmp_path / "wide", width=64, losses=[3.0, 2.25], accuracy=0.75)
    text = compare_runs(RunState(left), RunState(right))
    lines = text.splitlines()
    assert all(len(line) <= 80 for line in lines)
    rows = {line.split("  ")[0]: line.split() for line in lines}
    assert lines[0].split() == ["narrow", "wide"]
    assert rows["job.overrides.width"] == ["job.overrides.width", "8", "64"]
    assert "job.overrides.optimizer.lr" not in rows
    assert rows["loss at step 2"][-2:] == ["2.5", "2.25"]
    assert rows["test top1"][-2:] == ["0.125", "0.625"]
    assert rows["test top1, highest"][-2:] == ["0.5", "0.75"]
    assert rows["test loss, lowest"][-2:] == ["1.5", "2.25"]
    assert rows["steps"] == ["steps", "4", "of", "4", "2", "of", "2"]
    assert "loss of narrow" in text
    assert "losses at 2 common steps (1 to 2): largest difference 0.25, at step 2" in text
    third = swept_run(tmp_path / "third", width=8, losses=[3.0], accuracy=0.5)
    text = compare_runs(*map(RunState, (left, right, third)))
    assert ["job.overrides.width", "8", "64", "8"] in [line.split() for line in text.splitlines()]
    text = " ".join(text.split())
    assert "narrow and wide: losses at 2 common steps (1 to 2): largest difference 0.25, at step 2" in text
    assert "narrow and third: losses at 1 common step (1 to 1): equal to 6 digits" in text
    assert "loss of third" in text


def test_a_value_that_one_run_overrides_stands_beside_the_constant_of_the_job_file(tmp_path):
    job = tmp_path / "job.py"
    job.write_text("def job(width: int = 8, *, depth=2):\n    return sw.Job(optimizer=sw.adamw(lr=1e-3), seed=SEED)\n")
    values = {"width": "64", "depth": "2", "optimizer.lr": "0.1", "seed": "1"}
    runs = [swept_run(tmp_path / name, width=64, losses=[3.0, 2.0], accuracy=0.5) for name in ("set", "default")]
    for run, overrides in zip(runs, (values, {}), strict=True):
        run.job.write_bytes(msgspec.json.encode(refer(str(job), overrides)))
    rows = compare_runs(*map(RunState, runs)).splitlines()
    found = dict(row.removeprefix("job.overrides.").split(maxsplit=1) for row in rows if row.startswith("job."))
    assert {name: text.split() for name, text in found.items()} == {
        "width": ["64", "8"],
        "optimizer.lr": ["0.1", "0.001"],
        "seed": ["1", "-"],
    }
    assert "losses at 2 common steps (1 to 2): equal to 6 digits" in rows


def test_curves_of_compared_runs_share_their_steps():
    rows = [(step, 1.0, 1.0, 1.0) for step in range(60, 81)]
    (line,) = draw_curve(rows, 101, 1, 0.0, 1.0, braille=False, steps=(0, 100))
    assert (line.find("#"), line.rfind("#")) == (60, 80)


def test_without_a_path_the_newest_run_is_watched(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with refuses("run.not-found", "runs/"):
        watch()
    for number, name in enumerate(("second", "first")):
        run = swept_run(tmp_path / "runs" / name, width=8, losses=[2.0, 1.0], accuracy=0.5)
        os.utime(run.path / "events", (100.0 - number, 100.0 - number))
    assert watch(once=True).status.name == "second"
    capsys.readouterr()
    watch(compare=["runs/first", "runs/second"])
    assert capsys.readouterr().out.splitlines()[0].split() == ["second", "first", "second"]
