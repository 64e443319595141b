"""Batch norms and frozen layers in a pipeline; norms against accumulation without a pipeline, in fp64."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import shardwise as sw
import shardwise.training.step.pipeline_schedule  # 1 s, once, before ranks are forked
from refusals import refuses
from shardwise.plans import Plan, Precision
from shardwise.testing import run_ranks
from shardwise.training.build import build_step

DOUBLE = Precision(parameter="fp64", compute="fp64", reduce="fp64", optimizer="fp64")


class Block(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), norm(6)

    def forward(self, x):
        return x + torch.relu(self.norm(self.linear(x)))


class Normed(nn.Module):
    """Batch norms before the layers, in them and after."""

    def __init__(self, norm=nn.BatchNorm1d):
        super().__init__()
        self.first, self.first_norm = nn.Linear(6, 6), norm(6)
        self.layers = nn.ModuleList(Block(norm) for _ in range(4))
        self.last_norm, self.last = norm(6), nn.Linear(6, 3)

    def forward(self, x):
        x = self.first_norm(self.first(x))
        for layer in self.layers:
            x = layer(x)
        return self.last(self.last_norm(x))


class OwnNorm(nn.BatchNorm1d):
    """A class derived from torch's, whose forward could be anything."""


def points(_):
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(13, 6, generator=generator), torch.randint(0, 3, (13,), generator=generator))


JOB = sw.Job(
    model=Normed,
    data=points,
    loss=sw.losses.cross_entropy,
    optimizer=sw.sgd(lr=0.1),
    batch_size=8,  # of 13 samples: micro-batches of the second step are short, or empty
    epochs=1,
)


def trained(world, job, plan):
    step = build_step(job, plan, world)
    for batch in step.feed:
        step(batch)
    return {name: value.detach().clone() for name, value in [*step.named_parameters(), *step.buffers().items()]}


def train(layout, nproc, accumulation, job=JOB, **changes):
    plan = Plan.preset(layout, nproc, batch_size=job.batch_size, accumulation=accumulation)
    ranks = run_ranks(trained, nproc, job, dataclasses.replace(plan, precision=DOUBLE, **changes))
    return {name: value for rank in ranks for name, value in rank.items()}


@pytest.mark.parametrize(
    ("layout", "accumulation", "recompute"),
    [("pp2", 2, "full"), ("pp2.replicate2", 4, "none")],
    ids=["recomputed", "one row a rank, synced"],
)
def test_short_steps_train_as_without_a_pipeline(layout, accumulation, recompute):
    nproc = 4 if "replicate" in layout else 2
    expected = train("ddp", nproc // 2, accumulation)
    found = train(layout, nproc, accumulation, recompute=recompute)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-9, msg=name)


def test_short_step_of_a_norm_class_of_its_own_is_refused_by_its_name():
    job = dataclasses.replace(JOB, model=lambda: Normed(OwnNorm))
    with refuses("support.batch-norm-filler-rows", "norm"):
        train("pp2", 2, 2, job)


def half_frozen():
    """Return a model whose first half, a whole pipeline stage, is frozen."""
    model = Normed()
    for part in (model.first, model.first_norm, *model.layers[:2]):
        part.requires_grad_(requires_grad=False)
    return model


def test_stage_that_is_wholly_frozen_is_refused_by_its_number():
    job = dataclasses.replace(JOB, model=half_frozen)
    with refuses("model.no-trainable-parameter", "stage 0"):
        train("pp2", 2, 2, job)
