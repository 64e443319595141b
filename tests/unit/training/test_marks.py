"""Phase marks: every kind of step and the loop mark what begins, in order, and listeners receive it."""

import dataclasses
import json
from itertools import groupby

import pytest
import torch
from torch.utils.data import TensorDataset

import shardwise as sw
import shardwise.training.step.pipeline_schedule  # 1 s, once, before ranks are forked
from shardwise.models import decoder
from shardwise.plans import Plan
from shardwise.plans.catalogue import DecoderConfig
from shardwise.plans.sections import Pipeline
from shardwise.runs import RunDirectory
from shardwise.runs.recorder import PHASES, read_recorder
from shardwise.testing import run_ranks
from shardwise.training.step.step import Ranges, combine_marks, ignore_mark, nvtx_ranges

CONFIG = DecoderConfig(family="llama", vocab_size=13, context=8, width=8, num_heads=2, mlp_width=12, num_layers=4)


def sequences(split):
    tokens = torch.randint(0, 13, (16, 7), generator=torch.Generator().manual_seed(3))
    return TensorDataset(tokens[:, :-1], tokens[:, 1:])


JOB = sw.Job(
    model=lambda: decoder(CONFIG),
    data=sequences,
    loss=sw.losses.token_cross_entropy,
    optimizer=sw.adamw(lr=1e-2),
    batch_size=8,
    steps=2,
)


def marked(world, plan):
    heard = []
    step = sw.build_step(JOB, plan, world, mark=lambda phase, number: heard.append((phase, number)))
    for batch in step.feed:
        step(batch)
    return heard


def test_a_plain_step_marks_every_micro_batch_and_then_the_next_steps_data():
    (heard,) = run_ranks(marked, 1, Plan.preset("ddp", 1, batch_size=8, accumulation=2))
    one = ["forward", "backward", "forward", "backward", "optimizer", "data"]
    assert heard == [(phase, n + (phase == "data")) for n in range(2) for phase in one]


@pytest.mark.parametrize(("schedule", "backwards"), [("1f1b", 4), ("interleaved_zero_bubble", 16)])
def test_every_stage_of_a_pipeline_marks_its_micro_batches(schedule, backwards):
    plan = dataclasses.replace(
        Plan.preset("pp2", 2, batch_size=8, accumulation=4), pipeline=Pipeline(schedule=schedule)
    )
    for heard in run_ranks(marked, 2, plan):
        for number in range(2):
            phases = [phase for phase, n in heard if n == number and phase != "data"]
            assert phases[0] == "forward"
            assert phases[-1] == "optimizer"
            assert phases.count("backward") == backwards  # of two stages apart for inputs and weights, or of one
        assert [n for phase, n in heard if phase == "data"] == [1, 2]


def recorded(world, folder):
    run = RunDirectory(folder)
    plan = Plan.preset("ddp", world.size, batch_size=8)
    sw.train(JOB, plan, world, run=run, show_progress=False, save_every=1)
    return read_recorder(run.recorder(world.rank)).marks


def test_a_training_with_a_run_directory_records_every_phase_and_its_memory(tmp_path):
    for marks in run_ranks(recorded, 2, tmp_path):
        phases = [phase for phase, _ in groupby(mark.phase for mark in marks)]
        assert phases[0] == "start"
        assert phases[-2:] == ["save", "end"]
        assert set(phases) == set(PHASES)
        one = ["data", "forward", "backward", "optimizer", "data", "publish"]
        assert phases[1:8] == [*one, "data"]
        assert [mark.step for mark in marks] == sorted(mark.step for mark in marks)
        assert marks[-1].step == 2
    for rank in range(2):
        events = [json.loads(line) for line in RunDirectory(tmp_path).events(rank).read_text().splitlines()]
        taken = [event["memory_bytes"] for event in events if event["kind"] == "steps"]
        assert taken == sorted(taken)
        assert taken[0] > 2**20


def test_a_disk_that_takes_no_record_does_not_stop_the_training(tmp_path):
    (tmp_path / "recorder").write_text("no folder")
    run = RunDirectory(tmp_path)
    plan = Plan.preset("ddp", 1, batch_size=8)
    report = run_ranks(lambda world: sw.train(JOB, plan, world, run=run, show_progress=False), 1)[0]
    assert report.result.steps == 2
    notes = [line for line in run.events(0).read_text().splitlines() if '"note"' in line]
    assert "phases are not recorded" in notes[0]


def test_all_listeners_hear_a_mark_in_order():
    heard = []
    mark = combine_marks(lambda *mark: heard.append((1, *mark)), None, lambda *mark: heard.append((2, *mark)))
    mark("forward", 4)
    assert heard == [(1, "forward", 4), (2, "forward", 4)]


def test_nobody_stands_between_a_step_and_its_only_listener():
    def listener(phase, step):
        pass

    assert combine_marks(None, listener) is listener
    assert combine_marks(None) is ignore_mark


def test_one_range_is_open_at_a_time_and_saving_is_called_checkpoint():
    calls = []
    ranges = Ranges(lambda name: calls.append(f"+{name}") or name, lambda name: calls.append(f"-{name}"))
    for phase in ("start", "data", "forward", "save", "end"):
        ranges(phase, 0)
    ranges.close()
    assert calls == ["+data", "-data", "+forward", "-forward", "+checkpoint", "-checkpoint"]


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has NVTX")
def test_a_torch_without_nvtx_trains_under_a_profiler_without_ranges(monkeypatch):
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "7")
    assert nvtx_ranges() is None


@pytest.mark.gpu
def test_phases_are_nvtx_ranges_where_a_profiler_is_attached(monkeypatch):
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "7")
    with sw.world(device="cuda") as world:
        step = sw.build_step(JOB, Plan.preset("ddp", 1, batch_size=8), world)
        assert isinstance(step.mark, Ranges)
        for batch in step.feed:
            step(batch)
        step.mark("end", step.number)
        assert step.mark._open is None
