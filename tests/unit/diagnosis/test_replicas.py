"""Scripts with DDP that know nothing of it: unequal replicas are named from outside, equal ones are left in peace."""

import json

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from shardwise.diagnosis.guard.replicas import ReplicaWatch
from shardwise.recorder.start import record_replicas
from shardwise.runs import RunDirectory
from shardwise.runs.drift import ReplicaSpec
from shardwise.testing import run_ranks

STEPS = 6


def script(world, run, every, spoil):
    """What a user would write; `spoil(rank, step, model, optimizer)` is called before each step."""
    record_replicas(run.replicas(world.rank), every)
    torch.manual_seed(world.rank)  # DDP makes the start equal
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(1, STEPS + 1):
        with spoil(world.rank, step, model, optimizer) or torch.enable_grad():
            model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def watched(folder, spoil, *, every=1, nproc=2, stop=False):
    """Run the script and return the notes of its watch, and whether it would stop the ranks."""
    run = RunDirectory(folder)
    run_ranks(script, nproc, run, every, spoil)
    notes = []
    watch = ReplicaWatch(run, ReplicaSpec(every=every, on_drift="stop" if stop else "report"), notes.append)
    watch.follow(range(nproc))
    return notes, watch.tick()


def nothing(_rank, _step, _model, _optimizer):
    pass


@pytest.mark.parametrize("every", [1, 4])
def test_equal_replicas_are_left_in_peace(tmp_path, every):
    assert watched(tmp_path, nothing, every=every) == ([], "")
    steps = [json.loads(line).get("step") for line in RunDirectory(tmp_path).replicas(0).read_text().splitlines()]
    assert steps == [None, *([1, 4] if every == 4 else range(1, STEPS + 1))]


@torch.no_grad()
def start_apart(rank, step, model, _optimizer):
    if rank == 2 and step == 1:
        model.module[1].bias += 1


def test_an_unequal_start_is_named(tmp_path):
    [text], _ = watched(tmp_path, start_apart, nproc=3)
    assert "before the first step: 1.bias of rank 2 differs from that of ranks 0-1; unequal start" in text


def keep_gradients(_rank, step, model, _optimizer):
    return model.no_sync() if step >= 3 else None


def test_gradients_that_are_not_summed_are_named(tmp_path):
    [text], _ = watched(tmp_path, keep_gradients)
    assert (
        "after step 3 (equal after step 2): 0.weight of rank 1 differs from that of rank 0, and 3 more tensors" in text
    )
    assert "unequal batches" in text


def change_rate(rank, step, _model, optimizer):
    if rank == 1 and step == 2:
        optimizer.param_groups[0]["lr"] = 0.2


def test_unequal_settings_are_named(tmp_path):
    [text], _ = watched(tmp_path, change_rate)
    assert "after step 2 (equal after step 1)" in text
    assert "unequal optimizers" in text


@torch.no_grad()
def shaky_update(rank, step, model, optimizer):
    if step == 1:
        shaken = model.module[1].weight.detach()
        optimizer.register_step_post_hook(lambda *_: shaken.mul_(1 + 1e-3 * rank))


def test_an_update_that_differs_from_equal_gradients_is_named(tmp_path):
    [text], _ = watched(tmp_path, shaky_update)
    assert "after step 1: 1.weight of rank 1 differs from that of rank 0; a non-deterministic operation in the" in text


@torch.no_grad()
def write_beside(rank, step, model, _optimizer):
    if rank == 0 and step == 2:
        model.module[0].bias += 1


def test_a_drift_between_two_checks_names_the_next_step_and_stops_if_configured(tmp_path):
    [text], stop = watched(tmp_path, write_beside, every=4, stop=True)
    assert "after step 4 (equal after step 1): 0.bias of rank 1 differs from that of rank 0" in text
    assert "--check-replicas 1" in text
    assert text == f"shardwise: {stop}"
