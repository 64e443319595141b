"""Replicas that train on their own: their numbers are those of a simulation by hand, and what they save is whole."""

import dataclasses
import os
import signal

import pytest
import torch
from torch.nn.functional import cross_entropy

import shardwise as sw
from jobs import FP64, SENTENCES, Tokens, sentences_job, train_split
from refusals import refuses
from shardwise.checkpoint import read_manifest
from shardwise.engines.engine import require_supported
from shardwise.parity.spec import changed_numbers, settle_plan
from shardwise.planner.settle import LocalDevice, settle
from shardwise.runs import EventLog
from shardwise.runs.drift import ReplicaSpec
from shardwise.runs.recorder import Timeline
from shardwise.testing import run_ranks
from shardwise.training.build import build_step
from shardwise.training.loading import Length
from shardwise.training.loop import run_loop
from shardwise.training.saving import StoppedError
from shardwise.training.spec import SaveSpec

ROUND, STEPS, SYNCS = 3, 7, (3, 5, 7)
"""An epoch has five steps, so its second round is short, and so is the last of the training."""


def make_model():
    return torch.nn.Sequential(torch.nn.Embedding(50, 6), torch.nn.Linear(6, 50))


def make_job(**changes):
    # 38 rows in batches of 8: the fifth step of an epoch is short.
    data = {"data": train_split(Tokens(38, 8, 50, SENTENCES.ignored)), "steps": STEPS, "clip_norm": None}
    return sentences_job(**{**data, "model": make_model, "optimizer": sw.sgd(lr=0.3), **changes})


def plan_for(world, name, **options):
    overrides = {f"communication.{key}": str(value) for key, value in options.items()}
    plan = settle(name, batch_size=8, world_size=world.size, device=LocalDevice(), overrides=overrides)
    return dataclasses.replace(plan, precision=FP64)


def watched(world, name, **options):
    """Train; return what this rank read, and the whole weights of its replica at the start and after every step."""
    step = build_step(make_job(), plan_for(world, name, **options), world)
    rows, states = [], [weights(step)]
    for batch in step.feed:
        [micro_batch] = batch.micro_batches
        rows.append([part[: micro_batch.rows] for part in micro_batch.batch])
        step(batch)
        states.append(weights(step))
    return rows, states


def weights(step):
    found = [parameter.detach() for _, parameter in step.named_parameters()]
    return [(each.full_tensor() if hasattr(each, "full_tensor") else each).clone() for each in found]


def simulate(start, samples, *, outer_lr, outer_momentum):
    """Train replicas by hand in one process; `samples` has for each what it reads in each step."""
    models = [make_model().double() for _ in samples]
    anchor, velocity = start, [torch.zeros_like(value) for value in start]
    for model in models:
        fill(model, start)
    for number in range(1, STEPS + 1):
        for model, rows in zip(models, samples, strict=True):
            tokens, targets = rows[number - 1]
            loss = cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="sum")
            (loss / int((targets != -100).sum())).backward()
            fill(model, [each - 0.3 * each.grad for each in model.parameters()])
            model.zero_grad()
        if number in SYNCS:
            ends = zip(*(model.parameters() for model in models), strict=True)
            moves = [sum(old - end for end in each) / len(models) for old, each in zip(anchor, ends, strict=True)]
            velocity = [outer_momentum * fast + move for fast, move in zip(velocity, moves, strict=True)]
            pairs = zip(moves, velocity, strict=True)
            steps = [outer_lr * (move + outer_momentum * fast) for move, fast in pairs]
            anchor = [(old - step).detach() for old, step in zip(anchor, steps, strict=True)]
            for model in models:
                fill(model, anchor)
        yield [[each.detach().clone() for each in model.parameters()] for model in models]


@torch.no_grad()
def fill(model, values):
    for parameter, value in zip(model.parameters(), values, strict=True):
        parameter.copy_(value)


@pytest.mark.parametrize(
    ("name", "nproc", "lr", "momentum"), [("ddp", 2, 1.0, 0.0), ("ddp", 2, 0.7, 0.9), ("hsdp", 4, 0.7, 0.9)]
)
def test_replicas_end_every_step_where_a_simulation_by_hand_does(name, nproc, lr, momentum):
    ranks = run_ranks(watched, nproc, name, sync_every=ROUND, outer_lr=lr, outer_momentum=momentum)
    per_replica = nproc // 2
    samples = [
        [
            [torch.cat(parts) for parts in zip(*rows, strict=True)]
            for rows in zip(*(read for read, _ in group), strict=True)
        ]
        for group in (ranks[:per_replica], ranks[per_replica:])
    ]
    start = ranks[0][1][0]
    for number, expected in enumerate(simulate(start, samples, outer_lr=lr, outer_momentum=momentum), 1):
        for rank, (_, states) in enumerate(ranks):
            for found, wanted in zip(states[number], expected[rank // per_replica], strict=True):
                torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14, msg=f"step {number}, rank {rank}")
        apart = any(not torch.equal(*pair) for pair in zip(ranks[0][1][number], ranks[-1][1][number], strict=True))
        assert apart == (number not in SYNCS)


def test_a_round_of_one_step_is_ddp_to_the_bit():
    plain = run_ranks(watched, 2, "ddp")
    rounds = run_ranks(watched, 2, "ddp", sync_every=1, outer_lr=0.3, outer_momentum=0.5)
    for (_, expected), (_, found) in zip(plain, rounds, strict=True):
        assert all(
            torch.equal(*pair) for states in zip(found, expected, strict=True) for pair in zip(*states, strict=True)
        )


RARELY = ReplicaSpec(every=1000)


def looped(
    world,
    *,
    name="ddp",
    job=None,
    folder=None,
    replicas=RARELY,
    save_every=0,
    resume="auto",
    **options,
):
    """Train in the loop; return losses by step, verdicts, and the final state on rank 0 (None when stopped)."""
    losses, verdicts = {}, []

    def listen(event):
        losses.update(enumerate(event.get("losses", []), event.get("first", 0)))
        if event["kind"] == "verdict":
            verdicts.append(event["text"])

    save = SaveSpec(every=save_every, keep="9", resume=resume)
    plan = plan_for(world, name, **options)
    job = job or make_job(optimizer=sw.adamw(lr=1e-2))
    try:
        _, step = run_loop(
            job, plan, world, EventLog(None, listen), Timeline(), checkpoints=folder, save=save, replicas=replicas
        )
    except StoppedError:
        return losses, verdicts, None
    return losses, verdicts, sw.full_state_dict(step.model)


def test_the_loss_is_the_mean_over_what_all_replicas_count():
    expected, _, _ = run_ranks(looped, 2)[0]
    losses, _, _ = run_ranks(looped, 2, sync_every=ROUND)[0]
    assert losses[0] == pytest.approx(expected[0], rel=1e-12)  # both begin with the same weights
    assert losses[1] == pytest.approx(expected[1], rel=0.1)
    assert losses[1] != expected[1]


def test_replicas_are_compared_after_they_have_synchronized():
    for _, verdicts, _ in run_ranks(looped, 2, sync_every=ROUND, replicas=ReplicaSpec(every=1, on_drift="stop")):
        assert verdicts == []


def stopped(world, folder, **options):
    """Ask the training to stop after its first step."""

    def stop(context):
        if context.step == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    return looped(world, job=make_job(optimizer=sw.adamw(lr=1e-2), on_step=stop), folder=folder, **options)


@pytest.mark.parametrize(("name", "nproc"), [("ddp", 2), pytest.param("hsdp", 4, marks=pytest.mark.prove)])
def test_a_stop_waits_for_the_sync_and_the_resumed_run_continues_bit_for_bit(name, nproc, tmp_path):
    whole, _, state = run_ranks(looped, nproc, name=name, sync_every=ROUND)[0]
    first, _, nothing = run_ranks(stopped, nproc, tmp_path, name=name, sync_every=ROUND)[0]
    assert nothing is None
    assert sorted(first) == [0, 1, 2]
    then, _, final = run_ranks(looped, nproc, name=name, folder=tmp_path, sync_every=ROUND)[0]
    assert {**first, **then} == whole
    assert all(torch.equal(final[name], value) for name, value in state.items())


def test_what_is_saved_at_a_sync_leads_to_the_same_end_and_has_every_replica_in_it(tmp_path):
    whole, _, state = run_ranks(looped, 2, folder=tmp_path, save_every=2, sync_every=ROUND)[0]
    saved = sorted(path.name for path in tmp_path.glob("step-*"))
    assert saved == ["step-00000003", "step-00000005", "step-00000007"]
    # As after a kill in the round that follows: nothing of it is kept.
    then, _, final = run_ranks(looped, 2, folder=tmp_path, resume=str(tmp_path / saved[0]), sync_every=ROUND)[0]
    assert then == {number: whole[number] for number in range(3, STEPS)}
    assert all(torch.equal(final[name], value) for name, value in state.items())
    names = read_manifest(tmp_path / saved[0]).tensors.keys()
    for name in ("model/0.weight", "optimizer/0.weight/exp_avg", "update/outer_momentum/0.weight"):
        assert name in names
    assert "update/replica1/0.weight/exp_avg" in names
    assert not any(name.startswith("update/replica0") for name in names)


@pytest.mark.parametrize(("before", "after"), [({"sync_every": ROUND}, {}), ({}, {"sync_every": ROUND})])
def test_a_training_changes_between_rounds_and_every_step(before, after, tmp_path):
    run_ranks(stopped, 2, tmp_path, **before)
    losses, _, _ = run_ranks(looped, 2, folder=tmp_path, **after)[0]
    assert max(losses) == STEPS - 1
    assert min(losses) == (ROUND if before else 1)


def test_what_is_due_between_two_syncs_comes_with_the_second():
    length = Length(num_steps=13, steps_per_epoch=5, source="test", sync_every=3)
    assert [number for number in range(1, 14) if length.syncs_after(number)] == [3, 5, 8, 10, 13]
    assert [number for number in range(1, 14) if length.is_due(number, 4)] == [5, 8, 13]
    assert not any(length.is_due(number, 0) for number in range(1, 14))
    always = Length(num_steps=13, steps_per_epoch=5, source="test")
    assert [number for number in range(1, 14) if always.is_due(number, 4)] == [4, 8, 12]


def poisoned(world):
    """Train with a loss that is NaN in the second step of one replica."""
    skipped = []

    def loss(output, batch):
        total = sw.losses.token_cross_entropy.sum(output, batch)
        return total * float("nan") if world.rank == 1 and len(skipped) == 1 else total

    job = make_job(
        loss=sw.Loss(sum=loss, count=sw.losses.token_cross_entropy.count),
        on_step=lambda report: skipped.append(float(report.skipped)),
    )
    step = build_step(job, plan_for(world, "ddp", sync_every=ROUND), world)
    for batch in step.feed:
        job.on_step(step(batch))
    return skipped, weights(step)


def test_a_replica_skips_its_own_gradient_that_is_nan_and_spoils_none():
    (here, mine), (there, others) = run_ranks(poisoned, 2)
    assert here == [0.0] * STEPS
    assert there == [0.0, 1.0, *[0.0] * (STEPS - 2)]
    assert all(torch.equal(*pair) and bool(pair[0].isfinite().all()) for pair in zip(mine, others, strict=True))


REFUSED = [
    ("fsdp", {}, ("plan.sync-every-without-replicas",)),
    ("pp", {}, ("plan.sync-every-without-replicas", "replicate = 1")),
    ("replicate2.tp2", {}, ("support.sync-every-option", "tp = 2")),
    ("replicate2.shard2", {"zero": "1"}, ("support.sync-every-option", "zero = 1")),
    ("ddp", {"precision": "fp16"}, ("support.sync-every-option", "loss scale")),
    ("ddp", {"offload.optimizer": "cpu"}, ("support.sync-every-option", 'offload.optimizer = "none"')),
    ("ddp", {"capture": "step"}, ("support.sync-every-option", 'capture = "none"')),
    ("ddp", {"communication.static_graph": "true"}, ("support.sync-every-option", "static_graph = false")),
    (
        "ddp",
        {"communication.find_unused_parameters": "true"},
        ("support.sync-every-option", "find_unused_parameters = false"),
    ),
    (
        "ddp",
        {"communication.broadcast_buffers": "true"},
        ("support.sync-every-option", "broadcast_buffers = false"),
    ),
    ("ddp", {"communication.compression": "bf16"}, ("support.compression-without-ddp",)),
    ("ddp", {"engine": "deepspeed"}, ("support.deepspeed-option",)),
]


@pytest.mark.parametrize(("name", "overrides", "refusal"), REFUSED)
def test_what_replicas_cannot_do_on_their_own_is_refused(name, overrides, refusal):
    overrides = {**overrides, "communication.sync_every": "3"}
    with refuses(*refusal):
        require_supported(settle(name, batch_size=16, world_size=4, device=LocalDevice(), overrides=overrides))


@pytest.mark.parametrize(
    ("setting", "code"),
    [
        ("sync_every=0", "plan.sync-every-invalid"),
        ("outer_lr=0.0", "plan.outer-lr-invalid"),
        ("outer_momentum=1.0", "plan.outer-momentum-invalid"),
    ],
)
def test_values_out_of_range_are_refused(setting, code):
    with refuses(code, setting.partition("=")[2]):
        settle_plan(f"ddp+communication.{setting}", batch_size=8, nproc=2)


def with_batch_norm(world, batch_norm):
    job = make_job(
        model=lambda: torch.nn.Sequential(torch.nn.Embedding(50, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 50))
    )
    plan = dataclasses.replace(plan_for(world, "ddp", sync_every=ROUND), batch_norm=batch_norm)
    step = build_step(job, plan, world)
    for batch in step.feed:
        step(batch)
    return sw.unwrap(step.model)[1].running_mean


def test_synced_batch_norms_are_refused_and_local_ones_synchronize_with_their_replicas():
    with refuses("support.batch-norm-sync-every"):
        run_ranks(with_batch_norm, 2, "sync")
    assert torch.equal(*run_ranks(with_batch_norm, 2, "local"))


def test_rounds_are_marked_as_changing_numbers():
    plan = settle_plan("ddp+communication.sync_every=4", batch_size=8, nproc=2)
    changes = list(changed_numbers(plan, has_batch_norm=False))
    assert changes == ["trains replicas independently between synchronizations"]


def test_a_plan_refitted_to_one_replica_has_no_rounds():
    plan = settle_plan("ddp+communication.sync_every=4", batch_size=8, nproc=4)
    assert plan.refit(2).communication.sync_every == 4
    assert plan.refit(1).communication.sync_every == 1
