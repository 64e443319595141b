"""Steps that wait for data: the run reports them while it trains, and `doctor run` and `bench step` name it."""

import dataclasses
import json
import time

import pytest
import torch
from torch.utils.data import Dataset

import shardwise as sw
from shardwise.diagnosis.run.explain import check_data, explain
from shardwise.diagnosis.run.facts import Event, read_run
from shardwise.measurement.step import rehearse
from shardwise.measurement.step_findings import StepBenchReport
from shardwise.plans import Plan
from shardwise.runs import RunDirectory
from shardwise.runs.data_wait import DataWait
from shardwise.testing import run_ranks


class Slow(Dataset):
    """Samples that take `seconds` each."""

    def __init__(self, seconds):
        self.seconds = seconds

    def __len__(self):
        return 400

    def __getitem__(self, index):
        time.sleep(self.seconds)
        return torch.full((4,), float(index)), torch.tensor(index % 3)


def make_job(seconds, steps=30):
    return sw.Job(
        model=lambda: torch.nn.Linear(4, 3),
        data=lambda split: Slow(seconds) if split == "train" else None,
        loss=sw.losses.cross_entropy,
        optimizer=sw.sgd(lr=0.1),
        batch_size=4,
        steps=steps,
    )


def train(folder, seconds):
    """Train and return the notes and the events of the steps."""
    plan = Plan.preset("ddp", 1, batch_size=4)
    folder.mkdir()
    run = RunDirectory(folder)
    run_ranks(lambda world: sw.train(make_job(seconds), plan, world, run=run, show_progress=False), 1)
    events = [json.loads(line) for line in run.events(0).read_text().splitlines()]
    return [event["text"] for event in events if event["kind"] == "note"], events


def test_run_with_slow_data_writes_one_note_and_doctor_names_it(tmp_path):
    notes, events = train(tmp_path / "slow", seconds=0.003)
    (note,) = [text for text in notes if "wait for data" in text]
    assert "num_workers" in note
    waited = sum(event["data_s"] for event in events if event["kind"] == "steps")
    assert waited > 29 * 4 * 0.003
    (verdict,) = [one for one in explain(read_run(tmp_path / "slow")).verdicts if one.name == "data"]
    assert "rank 0" in verdict.fact
    assert "num_workers" in verdict.fix


def test_bench_step_names_slow_data():
    plan = Plan.preset("ddp", 1, batch_size=4)
    for seconds, is_named in ((0.003, True), (0.0, False)):
        measured = rehearse(make_job(seconds), plan, steps=3)
        if not is_named:
            measured = dataclasses.replace(measured, phases={**measured.phases, "data": 0.0})
        report = StepBenchReport(measured=(measured,), predicted=None, utilisation=None)
        assert ("wait for data" in report.to_text()) == is_named
        assert ("wait for data" in report.findings().verdict) == is_named


def steps_event(rank, data_s, *, losses=30, seconds=1.0):
    fields = {"losses": [1.0] * losses, "seconds": seconds, "data_s": data_s}
    return Event(at=0.0, kind="steps", rank=rank, fields=fields)


def test_the_rank_that_waits_longest_is_named_without_the_first_steps():
    starts = [Event(at=0.0, kind="start", rank=rank, fields={}) for rank in range(2)]
    firsts = [steps_event(rank, 1.0, losses=1) for rank in range(2)]
    assert check_data([*starts, *firsts]) == []
    assert check_data([*starts, *firsts, steps_event(0, 0.01), steps_event(1, 0.02)]) == []
    (verdict,) = check_data([*starts, *firsts, steps_event(0, 0.01), steps_event(1, 0.4)])
    assert "rank 1" in verdict.fact
    assert "40%" in verdict.fact
    old = Event(at=0.0, kind="steps", rank=0, fields={"losses": [1.0] * 99, "seconds": 1.0})
    assert check_data([old]) == []


@pytest.mark.parametrize(("steps", "waited_s", "is_notable"), [(20, 0.2, True), (19, 0.2, False), (20, 0.04, False)])
def test_wait_is_notable_after_enough_steps_and_above_a_share(steps, waited_s, is_notable):
    assert DataWait(steps=steps, seconds=1.0, waited_s=waited_s).is_notable == is_notable
