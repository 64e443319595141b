"""Pipelines times other axes, built from a job: losses, norms, weights and evaluation of one process, in fp64."""

import dataclasses

import pytest
import torch
from torch.nn import functional
from torch.utils.data import TensorDataset

import shardwise as sw
import shardwise.training.step.pipeline_schedule  # 1 s, once, before ranks are forked
from shardwise.models import decoder
from shardwise.plans import Plan
from shardwise.plans.catalogue import DecoderConfig
from shardwise.plans.sections import Offload, Pipeline, Precision
from shardwise.testing import run_ranks
from shardwise.training.build import build_step
from shardwise.training.evaluate import evaluate

VOCAB = 13
DOUBLE = Precision(parameter="fp64", compute="fp64", reduce="fp64", optimizer="fp64")


def sequences(_):
    tokens = torch.randint(0, VOCAB, (20, 7), generator=torch.Generator().manual_seed(3))
    return TensorDataset(tokens[:, :-1], tokens[:, 1:])


def loss_sum(output, batch):
    return functional.cross_entropy(output.flatten(0, 1), batch[1].flatten(), reduction="sum")


CONFIG = DecoderConfig(family="llama", vocab_size=VOCAB, context=8, width=8, num_heads=2, mlp_width=12, num_layers=4)
TIED = dataclasses.replace(CONFIG, family="gpt2", tie_head=True)
JOB = sw.Job(
    model=lambda: decoder(CONFIG),
    data=sequences,
    loss=sw.Loss(sum=loss_sum, count=lambda batch: batch[1].numel()),
    optimizer=sw.adamw(lr=1e-2),
    batch_size=8,  # of 20 samples: the third step is half filler
    epochs=1,
    clip_norm=0.5,
)


def trained(world, job, plan):
    step = build_step(job, plan, world)
    reports = [step(batch) for batch in step.feed]
    return {
        "losses": [report.loss_share.item() for report in reports] if plan.layout.reports_loss(world.rank) else None,
        "norms": [report.grad_norm.item() for report in reports],
        "weights": {name: getattr(p, "full_tensor", lambda p=p: p)().detach() for name, p in step.named_parameters()},
        "whole": step.whole_weights(),
        "elements": step.num_parameters,
        "evaluation": evaluate(step, sequences("test")),
    }


def train(layout, nproc, accumulation, job=JOB, **changes):
    plan = Plan.preset(layout, nproc, batch_size=job.batch_size, accumulation=accumulation)
    return run_ranks(trained, nproc, job, dataclasses.replace(plan, precision=DOUBLE, **changes))


@pytest.mark.representative("pp2.shard2-4-interleaved_1f1b-3", "pp2.tp2-2-1f1b-0")
@pytest.mark.parametrize(
    ("layout", "accumulation", "schedule", "zero"),
    [
        ("pp2.replicate2", 4, "dualpipev", 0),
        ("pp2.shard2", 4, "zbv", 1),
        ("pp2.shard2", 4, "interleaved_1f1b", 3),
        ("pp2.tp2", 2, "1f1b", 0),
    ],
)
def test_pipeline_times_another_axis_trains_as_one_process(layout, accumulation, schedule, zero):
    (one,) = train("ddp", 1, 1)
    check(one, train(layout, 4, accumulation, pipeline=Pipeline(schedule=schedule), zero=zero))


def check(one, ranks):
    """Compare losses, norms, evaluation and weights, of which every rank has some, with those of one process."""
    losses = [sum(shares) for shares in zip(*(rank["losses"] for rank in ranks if rank["losses"]), strict=True)]
    assert losses == pytest.approx(one["losses"], rel=1e-9)
    for rank in ranks:
        assert rank["norms"] == pytest.approx(one["norms"], rel=1e-9)
        assert rank["evaluation"] == pytest.approx(one["evaluation"], rel=1e-9)
    for rank in ranks:
        for name, value in rank["weights"].items():
            torch.testing.assert_close(value, one["weights"][name], rtol=1e-9, atol=1e-9, msg=name)
    assert {name for rank in ranks for name in rank["weights"]} == one["weights"].keys()


def test_uneven_virtual_stages_that_recompute_some_blocks_train_as_one_process():
    deep = dataclasses.replace(JOB, model=lambda: decoder(dataclasses.replace(CONFIG, num_layers=10)))
    four_stages_per_rank = Pipeline(schedule="interleaved_1f1b", split=(1, 3, 4, 5, 7, 8, 9))
    (one,) = train("ddp", 1, 1, deep)
    check(one, train("pp2", 2, 4, deep, pipeline=four_stages_per_rank, recompute="full", recompute_blocks=1))


TIED_JOB = dataclasses.replace(JOB, model=lambda: decoder(TIED))
TIED_CASES = [
    ("pp2", 4, "1f1b", 0, {"fused_loss": True}),
    ("pp2", 4, "zbv", 0, {}),
    ("pp2.shard2", 2, "interleaved_1f1b", 3, {}),
    *(("pp2", 4, schedule, 0, {}) for schedule in ("gpipe", "looped_bfs", "interleaved_zero_bubble", "dualpipev")),
    ("pp4", 4, "1f1b", 0, {}),
    ("pp2.replicate2", 4, "1f1b", 0, {"recompute": "full"}),
    ("pp2.shard2", 2, "1f1b", 1, {"offload": Offload(optimizer="cpu")}),
    ("pp2.shard2", 2, "1f1b", 2, {"offload": Offload(parameters="cpu", optimizer="cpu")}),
    ("pp2.shard2", 4, "zbv", 1, {}),
    ("pp2.tp2", 2, "1f1b", 0, {}),
    ("pp2.tp2", 4, "zbv", 0, {}),
    ("pp2", 4, "1f1b", 0, {"compile": "blocks"}),
]
PROVED = [pytest.param(*case, marks=pytest.mark.prove) for case in TIED_CASES[3:]]


@pytest.mark.parametrize(("layout", "accumulation", "schedule", "zero", "options"), [*TIED_CASES[:3], *PROVED])
def test_parameter_tied_across_stages_trains_as_in_one_process(layout, accumulation, schedule, zero, options):
    """Clipped by the norm of one process, so the tied parameter counts once."""
    (one,) = train("ddp", 1, 1, TIED_JOB)
    nproc = 2 if layout == "pp2" else 4
    ranks = train(layout, nproc, accumulation, TIED_JOB, zero=zero, pipeline=Pipeline(schedule=schedule), **options)
    check(one, ranks)
    copies = [rank["weights"]["embed.weight"] for rank in ranks if "embed.weight" in rank["weights"]]
    assert all(torch.equal(copy, copies[0]) for copy in copies)
    pp = 4 if layout == "pp4" else 2
    assert sum(rank["elements"] for rank in ranks) * pp == one["elements"] * nproc
    whole = ranks[0]["whole"]
    assert whole.keys() == one["whole"].keys()
    assert whole["head.weight"].data_ptr() == whole["embed.weight"].data_ptr()
