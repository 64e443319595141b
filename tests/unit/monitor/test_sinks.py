"""Sinks: every step is sent once, whatever restarts; trackers are read back with their own libraries."""

import json
import math
import os
import struct
import subprocess
import sys
import threading
import time
from importlib.util import find_spec

import pytest
from runs.synthetic import attempt_event, empty_run, start_event, steps_event, write

from refusals import refuses
from shardwise.errors import ShardwiseError
from shardwise.monitor.sinks import SinkSpec, lock_mirror, mirror, parse_sink
from shardwise.monitor.trackers import TrackerFeed, describe_run
from shardwise.runs import RunDirectory

BEGAN = 1_700_000_000.0
LOSSES = [2.5, 2.25, 2.0, 1.75, 1.5, 1.25]
FINISH = {"at": BEGAN + 9, "kind": "finish", "state": "finished", "restarts": 1}

needs = {
    name: pytest.mark.skipif(find_spec(name) is None, reason=f"no {name}: pip install 'shardwise[{name}]'")
    for name in ("tensorboard", "wandb", "mlflow")
}


def restarted_run(path, *, finished=True):
    """Six steps of two ranks, killed after four, resumed from the second; a loss that is NaN in between."""
    run = empty_run(path)
    write(run.launcher_events(), attempt_event(BEGAN, 2))
    for rank in (0, 1):
        memory = {"memory_bytes": (rank + 1) << 30}
        write(
            run.events(rank),
            start_event(BEGAN + 1, 2, 6),
            steps_event(BEGAN + 2, 0, LOSSES[:2], lr=0.25, **memory),
            steps_event(BEGAN + 3, 2, [None, 1.75], lr=0.5, **memory),
            start_event(BEGAN + 5, 2, 6),
            steps_event(BEGAN + 6, 2, LOSSES[2:], lr=0.5, grad_norm=None, **memory),
            {"at": BEGAN + 7, "kind": "evaluation", "step": 6, "epoch": 0, "values": {"loss": 1.0, "accuracy": 0.75}},
            {"at": BEGAN + 7, "kind": "log", "step": 6, "values": {"tokens": 96.0}},
            {"at": BEGAN + 7.5, "kind": "note", "text": "the loss of step 2 is nan"},
        )
    cause = "rank 1 failed first: SIGKILL"
    write(
        run.launcher_events(),
        {"at": BEGAN + 4, "kind": "restart", "number": 1, "most": 3, "cause": cause},
        attempt_event(BEGAN + 4.5, 2, 1),
    )
    run.job.write_text(json.dumps({"path": "/jobs/digits.py", "attribute": "job", "overrides": {"epochs": "1"}}))
    run.plan.write_text('layout = "shard2"\nzero = 3\n[precision]\ncompute = "bf16"\n')
    if finished:
        finish(run)
    return run


def finish(run):
    result = {"steps": 6, "samples_per_s": 313.5, "evaluation": {"accuracy": 0.75}}
    run.report_json.write_text(json.dumps({"result": result, "start_up": []}))
    write(run.launcher_events(), FINISH)


def mirrored(run, known=None):
    feed = TrackerFeed(run, known or {})
    points = []
    while new := feed.read():
        points += new
    return points, feed


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("tensorbord:logs", ("watch.unknown-sink", "'tensorbord'", "'tensorboard'")),
        ("wandb", ("watch.sink-target-missing", "wandb:PROJECT")),
        ("mlflow:", ("watch.sink-target-missing", "EXPERIMENT")),
    ],
)
def test_a_sink_that_cannot_be_read_is_refused(text, refusal):
    with refuses(*refusal):
        parse_sink(text)


def test_a_missing_extra_is_one_sentence_with_the_pip_line(monkeypatch):
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr(sys, "path", [])
    with refuses("extra.wandb-missing", "pip install 'shardwise[wandb]'") as caught:
        parse_sink("wandb:digits")
    assert caught.value.exit_code == 2


def test_every_step_is_sent_once_after_a_restart(tmp_path):
    points, _ = mirrored(restarted_run(tmp_path / "run"))
    losses = [(point.step, point.value) for point in points if point.name == "train/loss"]
    assert [step for step, _ in losses] == [1, 2, 3, 4, 5, 6]
    assert math.isnan(losses[2][1])  # as it was sent before the restart
    assert [value for step, value in losses if step != 3] == [2.5, 2.25, 1.75, 1.5, 1.25]


def test_all_values_of_a_step_are_sent(tmp_path):
    points, _ = mirrored(restarted_run(tmp_path / "run"))
    curves = {name: [(p.step, p.value) for p in points if p.name == name] for name in {p.name for p in points}}
    del curves["train/loss"]
    assert curves == {
        "train/learning_rate": [(2, 0.25), (4, 0.5), (6, 0.5)],
        "train/gradient_norm": [(2, 1.0), (4, 1.0)],
        "train/samples_per_s": [(2, 128.0), (4, 128.0), (6, 256.0)],
        "train/epoch": [(2, 0.0), (4, 0.0), (6, 0.0)],
        "memory_gib/rank0": [(2, 1.0), (4, 1.0), (6, 1.0)],
        "memory_gib/rank1": [(2, 2.0), (4, 2.0), (6, 2.0)],
        "evaluation/loss": [(6, 1.0)],
        "evaluation/accuracy": [(6, 0.75)],
        "tokens": [(6, 96.0)],
    }


def test_a_later_mirror_sends_only_what_the_earlier_did_not(tmp_path):
    run = restarted_run(tmp_path / "run")
    points, feed = mirrored(run)
    assert mirrored(run, feed.last_steps)[0] == []
    rest, _ = mirrored(run, {**feed.last_steps, "train/loss": 4})
    assert [(point.name, point.step) for point in rest] == [("train/loss", 5), ("train/loss", 6)]
    assert [point.at for point in points if point.name == "train/loss"][:2] == [BEGAN + 1.5, BEGAN + 2]


def test_restarts_and_notes_are_noted_once(tmp_path):
    _, feed = mirrored(restarted_run(tmp_path / "run"))
    texts = sorted(note.text for note in feed.notes())
    assert texts == ["restart 1 of 3: rank 1 failed first: SIGKILL", "the loss of step 2 is nan"]


def test_lines_that_are_no_events_are_passed_over(tmp_path):
    run = restarted_run(tmp_path / "run")
    with run.events(0).open("a") as file:
        file.write(
            'nonsense\n{"kind":"steps"}\n{"kind":"steps","first":6,"losses":[],"at":1,"seconds":0}\n{"kind":"ste'
        )
    assert max(point.step for point in mirrored(run)[0]) == 6


def test_a_run_is_described_by_job_plan_and_world(tmp_path):
    about = describe_run(mirrored(restarted_run(tmp_path / "run"))[1].state)
    assert about.name == "run"
    wanted = {
        "job.path": "/jobs/digits.py",
        "job.overrides.epochs": "1",
        "plan.layout": "shard2",
        "plan.zero": 3,
        "plan.precision.compute": "bf16",
        "world.size": 2,
        "training.steps": 6,
    }
    assert wanted.items() <= about.config.items()


def test_a_second_mirror_into_the_same_place_is_refused_and_the_next_is_not(tmp_path):
    run = restarted_run(tmp_path / "run")
    with lock_mirror(run, "wandb", "wandb:a") as state:
        state.record({"train/loss": 3})
        with (
            refuses("watch.already-mirrored", "wandb:a"),
            lock_mirror(run, "wandb", "wandb:a"),
        ):
            pass
        with lock_mirror(run, "wandb", "wandb:b") as other:
            assert other.last_steps == {}
    with lock_mirror(run, "wandb", "wandb:a") as state:
        assert state.last_steps == {"train/loss": 3}


def test_a_run_that_ended_before_its_first_step_opens_no_tracker(tmp_path):
    run = empty_run(tmp_path / "run")
    write(run.launcher_events(), attempt_event(BEGAN, 1), {**FINISH, "state": "failed"})
    notes = []
    mirror(run, SinkSpec("tensorboard", str(tmp_path / "logs")), notes.append)
    assert "ended before its first step" in notes[0]
    assert not (tmp_path / "logs").exists()


def test_a_path_that_is_not_a_run_directory_is_refused(tmp_path):
    with refuses("run.not-a-run"):
        mirror(RunDirectory(tmp_path), SinkSpec("tensorboard", "logs"), print)


def read_tensorboard(directory):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(directory))
    board.Reload()
    scalars = {tag: [(e.step, e.value) for e in board.Scalars(tag)] for tag in board.Tags()["scalars"]}
    texts = {tag: board.Tensors(tag)[-1].tensor_proto.string_val[0].decode() for tag in board.Tags()["tensors"]}
    return scalars, texts


@needs["tensorboard"]
def test_tensorboard_reads_what_was_mirrored_during_the_run(tmp_path):
    run = restarted_run(tmp_path / "run", finished=False)
    notes, spec = [], SinkSpec("tensorboard", str(tmp_path / "logs"))
    thread = threading.Thread(target=mirror, args=(run, spec, notes.append), kwargs={"interval_s": 0.01})
    thread.start()
    wait_until(lambda: "evaluation/accuracy" in (tmp_path / "run" / "sinks").glob("*.json").__next__().read_text())
    write(run.events(0), steps_event(BEGAN + 8, 6, [1.0]))
    finish(run)
    thread.join(60)
    assert not thread.is_alive()
    scalars, texts = read_tensorboard(tmp_path / "logs" / "run")
    assert [step for step, _ in scalars["train/loss"]] == [1, 2, 3, 4, 5, 6, 7]
    assert scalars["train/loss"][-1] == (7, 1.0)
    assert scalars["memory_gib/rank1"][0] == (2, 2.0)
    assert scalars["evaluation/accuracy"] == [(6, 0.75)]
    assert "restart 1 of 3" in texts["notes"]
    assert "| plan.layout | shard2 |" in texts["run"]
    assert "| samples_per_s | 313.5 |" in texts["result"]
    assert "up to step 7: finished" in notes[-1]


@needs["tensorboard"]
def test_tensorboard_gets_nothing_twice_and_another_run_of_that_name_gets_its_own_directory(tmp_path):
    spec = SinkSpec("tensorboard", str(tmp_path / "logs"))
    run = restarted_run(tmp_path / "run")
    for _ in range(2):
        mirror(run, spec, lambda _: None, interval_s=0.01)
    assert len(read_tensorboard(tmp_path / "logs" / "run")[0]["train/loss"]) == 6
    mirror(restarted_run(tmp_path / "elsewhere" / "run"), spec, lambda _: None, interval_s=0.01)
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["run", "run~2"]


@needs["tensorboard"]
def test_a_tracker_that_fails_is_one_sentence(tmp_path):
    (tmp_path / "logs").write_text("a file where a directory should be")
    with refuses("watch.sink-failed", "tensorboard:", kind=ShardwiseError) as caught:
        mirror(restarted_run(tmp_path / "run"), SinkSpec("tensorboard", str(tmp_path / "logs")), lambda _: None)
    assert caught.value.exit_code == 1


def wait_until(is_true):
    deadline = time.monotonic() + 60
    while True:
        try:
            if is_true():
                return
        except (OSError, StopIteration):
            pass
        assert time.monotonic() < deadline
        time.sleep(0.01)


MIRROR = """
import pathlib, sys
from shardwise.runs import RunDirectory
from shardwise.monitor.sinks import mirror, parse_sink
mirror(RunDirectory(pathlib.Path(sys.argv[1])), parse_sink(sys.argv[2]), print)
"""


def mirror_elsewhere(run, sink, **environment):
    """Mirror in a process of its own, since these trackers leave threads and processes behind in theirs."""
    command = [sys.executable, "-c", MIRROR, str(run.path), sink]
    around = {**os.environ, **environment}
    done = subprocess.run(command, env=around, capture_output=True, text=True, timeout=120, check=False, cwd=run.path)
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs["wandb"]
def test_wandb_offline_has_what_was_mirrored(tmp_path):
    from wandb.proto.wandb_internal_pb2 import Record

    run = restarted_run(tmp_path / "run")
    message = mirror_elsewhere(run, "wandb:digits", WANDB_MODE="offline", WANDB_DIR=str(tmp_path))
    assert "wandb sync uploads it" in message
    [log] = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    records = [Record.FromString(data) for data in read_wandb(log)]
    rows = [
        {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]
    assert [row["step"] for row in rows if "train/loss" in row] == [1, 2, 3, 4, 5, 6]
    assert [row["train/learning_rate"] for row in rows if "train/learning_rate" in row] == [0.25, 0.5, 0.5]
    assert next(row for row in rows if row["step"] == 6 and "evaluation/accuracy" in row)["evaluation/accuracy"] == 0.75
    assert {round(row["_timestamp"]) for row in rows} <= set(range(int(BEGAN), int(BEGAN) + 10))
    runs = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    assert {update.key for update in runs[0].config.update} >= {"plan.layout", "job.path", "world.size"}
    assert runs[-1].tags == ["restarted"]
    assert "restart 1 of 3" in runs[-1].notes


def read_wandb(path):
    """Yield the records of an offline file: LevelDB's log format, after a header of seven bytes."""
    content, place, whole = path.read_bytes(), 7, b""
    while place + 7 <= len(content):
        if (space := 32768 - place % 32768) < 7:
            place += space
            continue
        size, kind = struct.unpack_from("<HB", content, place + 4)
        whole += content[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in {1, 4}:
            yield whole
            whole = b""


@needs["mlflow"]
def test_mlflow_has_what_was_mirrored(tmp_path, monkeypatch):
    environment = {
        "MLFLOW_TRACKING_URI": (tmp_path / "store").as_uri(),
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    from mlflow.tracking import MlflowClient

    run = restarted_run(tmp_path / "run")
    for _ in range(2):
        mirror_elsewhere(run, "mlflow:digits", **environment)
    client = MlflowClient()
    [found] = client.search_runs([client.get_experiment_by_name("digits").experiment_id])
    losses = client.get_metric_history(found.info.run_id, "train/loss")
    assert [metric.step for metric in losses] == [1, 2, 3, 4, 5, 6]
    assert losses[0].timestamp == round(1000 * (BEGAN + 1.5))
    assert found.data.metrics["evaluation/accuracy"] == 0.75
    assert found.data.params["plan.layout"] == "shard2"
    assert found.data.tags["shardwise.restarts"] == "1"
    assert "restart 1 of 3" in found.data.tags["mlflow.note.content"]
    assert found.data.tags["result.samples_per_s"] == "313.5"
    assert (found.info.status, found.info.run_name) == ("FINISHED", "run")


def test_no_tracker_is_imported_before_it_is_asked_for():
    code = "import sys, shardwise.monitor.sinks; print({'torch', 'wandb', 'mlflow', 'tensorboard'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
