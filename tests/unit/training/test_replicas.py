"""Replicas on real ranks: unequal ones are named with rank, tensor and cause; equal ones never alarm."""

import os
from functools import partial

import pytest
import torch

import shardwise as sw
from jobs import points_job, sentences_job
from refusals import refuses
from shardwise.errors import TrainingError
from shardwise.parallel.gradsync import local
from shardwise.planner.settle import LocalDevice, settle
from shardwise.runs import EventLog
from shardwise.runs.drift import Cause, ReplicaSpec
from shardwise.runs.recorder import Timeline
from shardwise.testing import run_ranks
from shardwise.training.loop import run_loop


def verdicts(world, make_job, plan_name, *, every=1, stop=False, overrides=None):
    """Train and return the report on replicas, and the last step's loss."""
    job = make_job(world)
    plan = settle(
        plan_name, batch_size=job.batch_size, world_size=world.size, device=LocalDevice(), overrides=overrides or {}
    )
    found = []
    events = EventLog(None, lambda event: found.append(event) if event["kind"] == "verdict" else None)
    spec = ReplicaSpec(every=every, on_drift="stop" if stop else "report")
    report, _ = run_loop(job, plan, world, events, Timeline(), replicas=spec)
    return [event["text"] for event in found], report.loss


def reported(make_job, plan_name, nproc=2, **options):
    """Return the one verdict of rank 0."""
    results = run_ranks(verdicts, nproc, make_job, plan_name, **options)
    [[text], *others] = [texts for texts, _ in results]
    assert others == [[]] * (nproc - 1)
    return text


EQUAL = [
    (2, "ddp", {}),
    (2, "zero1", {}),
    pytest.param(2, "ddp", {"offload.optimizer": "cpu"}, marks=pytest.mark.prove),
    (4, "hsdp", {}),
    (2, "tp", {}),
    pytest.param(4, "shard2.tp2", {}, marks=pytest.mark.prove),
]


@pytest.mark.representative("4-hsdp-overrides3", "2-tp-overrides4")
@pytest.mark.parametrize(("nproc", "name", "overrides"), EQUAL)
def test_equal_replicas_are_left_in_peace(nproc, name, overrides):
    for texts, _ in run_ranks(verdicts, nproc, lambda _: sentences_job(), name, overrides=overrides):
        assert texts == []


@pytest.mark.prove
def test_stages_are_compared_with_their_own_replicas_only():
    job = sentences_job("llama-tiny")
    results = run_ranks(verdicts, 4, lambda _: job, "pp2.replicate2", overrides={"accumulation": "2"})
    assert [texts for texts, _ in results] == [[]] * 4


class Statistics(torch.nn.Module):
    """A model with batch norm, whose buffers every rank should hold alike, and one buffer of each rank's own."""

    def __init__(self, *, own=False):
        super().__init__()
        self.stem = torch.nn.Linear(6, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.head = torch.nn.Linear(8, 3)
        self.register_buffer("seen", torch.zeros(()))
        self.own = own

    def forward(self, x):
        if self.training and self.own:
            self.seen += x.sum()
        return self.head(self.norm(self.stem(x)))


@pytest.mark.parametrize("statistics", ["sync", "local"])
def test_batch_statistics_are_left_in_peace(statistics):
    for texts, _ in run_ranks(
        verdicts, 2, lambda _: points_job(Statistics), "ddp", overrides={"batch_norm": statistics}
    ):
        assert texts == []


def on_rank_1(world, job, spoil, *, at=1):
    """Have rank 1 do something to its own optimizer's parameters after so many steps."""
    tensors = {}

    def optimizer(named):
        tensors.update(named)
        return sw.adamw(lr=1e-2)(named)

    def on_step(context):
        if world.rank == 1 and context.step == at:
            spoil(tensors)

    return job(optimizer=optimizer, on_step=on_step)


def test_an_unequal_start_is_named_before_the_first_step():
    def make_job(world):
        def optimizer(named):
            named = list(named)
            if world.rank == 2:
                with torch.no_grad():
                    dict(named)["head.bias"].add_(1e-7)
            return sw.adamw(lr=1e-2)(named)

        return points_job(Statistics, optimizer=optimizer, batch_size=6)

    text = reported(make_job, "ddp", nproc=3)
    assert text.startswith(
        "replicas differ before the first step: head.bias of rank 2 differs from that of ranks 0-1; "
    )
    assert text.endswith(Cause.START.value)


def test_a_gradient_that_no_rank_reduced_is_distinguished_from_unequal_batches():
    class Hidden(torch.nn.Module):
        """DDP is configured to ignore one parameter, so each rank moves it by its own samples."""

        _ddp_params_and_buffers_to_ignore = ("stem.bias",)

        def __init__(self):
            super().__init__()
            self.stem = torch.nn.Linear(6, 3)

        def forward(self, x):
            return self.stem(x)

    # The first step's gradients are summed by us, whatever DDP ignores; the second's by DDP.
    text = reported(lambda _: points_job(Hidden, clip_norm=None), "ddp")
    assert text.startswith("replicas differ after step 2 (equal after step 1): stem.bias of rank 1 differs from")
    assert text.endswith(Cause.BATCHES.value)


def test_a_buffer_of_each_ranks_own_samples_is_reported():
    text = reported(lambda _: points_job(lambda: Statistics(own=True)), "ddp")
    assert f"seen of rank 1 differs from that of rank 0; {Cause.BUFFER.value}" in text


class Noise(torch.autograd.Function):
    """Adds to a gradient what no seed decides, as sums in the order of arrival do."""

    @staticmethod
    def forward(_ctx, x):
        return x.clone()

    @staticmethod
    def backward(_ctx, grad):
        return grad * (1 + 1e-6 * int.from_bytes(os.urandom(4), "little") / 2**32)


def test_a_non_deterministic_operation_is_reported_where_ranks_share_a_matrix():
    def model():
        net = sw.models.decoder("gpt2-tiny", vocab_size=50, context=16)
        net.norm.register_forward_hook(lambda _module, _args, output: Noise.apply(output))
        return net

    text = reported(lambda _: sentences_job(model=model), "tp")
    assert "of rank 1 differs from" in text
    assert Cause.OPERATION.value in text


def test_a_non_deterministic_update_is_recognised_by_equal_gradients():
    class Shaky(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            with torch.no_grad():
                self.param_groups[0]["params"][0].mul_(1 + 1e-3 * os.urandom(1)[0])

    def make_job(_):
        return points_job(Statistics, optimizer=lambda named: Shaky([value for _, value in named], lr=0.1))

    text = reported(make_job, "ddp")
    assert "stem.weight of rank 1 differs from that of rank 0" in text
    assert Cause.UPDATE.value in text


def test_unequal_learning_rates_are_reported():
    def make_job(world):
        return points_job(Statistics, optimizer=sw.sgd(lr=0.1 + 0.1 * world.rank))

    assert Cause.SETTINGS.value in reported(make_job, "ddp")


@torch.no_grad()
def spoil_first(tensors):
    local(next(iter(tensors.values()))).add_(1.0)


def test_a_write_outside_of_the_step_is_reported_at_the_next_check():
    text = reported(lambda world: on_rank_1(world, partial(points_job, Statistics), spoil_first, at=2), "ddp", every=3)
    assert text.startswith("replicas differ after step 3 (equal after step 1): stem.weight of rank 1 differs from")
    assert Cause.OUTSIDE.value in text


class Dropping(Statistics):
    def forward(self, x):
        return super().forward(torch.nn.functional.dropout(x, 0.1, self.training))


@pytest.mark.parametrize(
    ("nproc", "name", "job"),
    [
        (2, "ddp", partial(points_job, Dropping)),
        pytest.param(4, "hsdp", partial(points_job, Dropping), marks=pytest.mark.prove),
        pytest.param(4, "pp2.replicate2", partial(sentences_job, "llama-tiny"), marks=pytest.mark.prove),
        pytest.param(4, "replicate2.tp2", sentences_job, marks=pytest.mark.prove),
    ],
)
def test_looking_for_the_cause_leaves_the_training_as_it_was(nproc, name, job):
    """Dropout and moments too: one more draw, or one more update, and the last loss is another."""

    def spoiled(world):
        return on_rank_1(world, job, spoil_first, at=2)

    with_check = run_ranks(verdicts, nproc, spoiled, name, every=3)
    without = run_ranks(verdicts, nproc, spoiled, name, every=0)
    assert Cause.OUTSIDE.value in with_check[0][0][0]
    assert [loss for _, loss in with_check] == [loss for _, loss in without]
    assert without[0][0] == []


def test_drift_stops_the_training_if_it_is_to():
    with refuses("train.replicas-drifted", "step 2", kind=TrainingError):
        run_ranks(
            verdicts,
            2,
            lambda world: on_rank_1(world, partial(points_job, Statistics), spoil_first, at=2),
            "ddp",
            stop=True,
        )
