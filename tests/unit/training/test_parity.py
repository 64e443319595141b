"""Any number of ranks and any accumulation give the losses and weights of one process."""

import itertools
from pathlib import Path

import pytest
import torch

import shardwise as sw
from jobs import Points, Tokens, small_resnet, train_split
from shardwise.plans import Plan, Precision
from shardwise.runs import EventLog
from shardwise.runs.recorder import Timeline
from shardwise.testing import run_ranks
from shardwise.training.loop import run_loop

BATCH = 120  # divides by 1 to 4 ranks x 1, 2 and 5 micro-batches
LENGTH = 257  # a prime: the last step of each epoch has 17 samples, fewer than the 20 cells of 4 ranks x 5
IMAGES = Points(LENGTH, 1, 8, 8, classes=10)


def decoder_job(**changes):
    return make_job(
        model=lambda: sw.models.decoder(
            "llama-tiny", vocab_size=32, width=16, num_layers=2, num_heads=4, num_kv_heads=2, context=8
        ),
        data=train_split(Tokens(LENGTH, 8, 32, ignored=lambda index: slice(1 + index % 8, None))),
        loss=sw.losses.token_cross_entropy,
        clip_norm=0.5,
        **changes,
    )


def resnet_job(norm, **changes):
    return make_job(model=lambda: small_resnet(norm), data=train_split(IMAGES), loss=sw.losses.cross_entropy, **changes)


def make_job(**fields):
    length = {} if {"steps", "epochs"} & fields.keys() else {"epochs": 2}
    return sw.Job(
        optimizer=sw.adamw(lr=1e-2, weight_decay=0.1),
        schedule=sw.schedules.Cosine(warmup=2, floor=0.1),
        batch_size=BATCH,
        **length,
        **fields,
    )


def trained(world, job, accumulation=1, dtype="fp64"):
    """Train and return the loss of every step and the final weights and buffers of this rank."""
    losses = []
    plan = Plan.preset("ddp", world.size, batch_size=BATCH, accumulation=accumulation)
    precision = Precision(parameter=dtype, compute=dtype, reduce=dtype, optimizer=dtype)
    plan = Plan(**{**vars(plan), "precision": precision})
    events = EventLog(None, lambda event: losses.extend(event.get("losses", [])))
    _, step = run_loop(job, plan, world, events, Timeline())
    return torch.tensor(losses, dtype=torch.float64), {
        k: v.double() for k, v in sw.unwrap(step.model).state_dict().items()
    }


def distance(one, other):
    """Largest relative difference of losses and of any weight tensor."""
    (losses, weights), (other_losses, other_weights) = one, other
    assert len(losses) == len(other_losses) > 0
    parts = [(losses, other_losses)] + [(weights[name], other_weights[name]) for name in weights]
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-3)) for a, b in parts)


def check_exact(job, cases):
    """Return the gap of each case to one process, all of them below 1e-9."""
    reference = run_ranks(trained, 1, job)[0]
    gaps = {}
    for ranks, accumulation in cases:
        results = run_ranks(trained, ranks, job, accumulation)
        gaps[ranks, accumulation] = max(distance(result, reference) for result in results)
    assert max(gaps.values()) < 1e-9, gaps
    return gaps


WHOLE = list(itertools.product([1, 2, 3, 4], [1, 2, 5]))
SLICE = [(2, 1), (3, 2), (4, 5)]


def test_decoder_equals_one_process():
    check_exact(decoder_job(), SLICE)


@pytest.mark.prove
def test_group_norm_resnet_equals_one_process():
    check_exact(resnet_job("group", epochs=1), SLICE)


def test_batch_norm_resnet_equals_one_process():
    check_exact(resnet_job("batch", epochs=1), [(3, 1)])


def test_gradient_sync_after_every_micro_batch_changes_nothing():
    def every(world, job):
        plan = Plan.preset("ddp", world.size, batch_size=BATCH, accumulation=5)
        precision = Precision(parameter="fp64", compute="fp64", reduce="fp64", optimizer="fp64")
        plan = Plan(**{**vars(plan), "precision": precision, "gradient_sync": "every"})
        _, step = run_loop(job, plan, world, EventLog(None), Timeline())
        return sw.unwrap(step.model).state_dict()

    job = decoder_job(epochs=1)
    last, every_time = run_ranks(trained, 2, job, 5)[0][1], run_ranks(every, 2, job)[0]
    assert all(torch.allclose(last[name], every_time[name], rtol=1e-9, atol=0) for name in last)


@pytest.mark.prove
def test_fp32_stays_within_the_noise_floor():
    check_fp32([(2, 1)])


def check_fp32(cases):
    """Return gaps in units of the floor: what summing the same gradients in another order does to one process."""
    job = decoder_job(steps=30)
    reference = run_ranks(trained, 1, job, 1, "fp32")[0]
    floor = max(distance(run_ranks(trained, 1, job, accumulation, "fp32")[0], reference) for accumulation in (2, 4, 5))
    gaps = {}
    for ranks, accumulation in cases:
        results = run_ranks(trained, ranks, job, accumulation, "fp32")
        gaps[ranks, accumulation] = max(distance(result, reference) for result in results) / floor
    assert max(gaps.values()) < 4, (floor, gaps)
    return gaps


@pytest.fixture(scope="module")
def table():
    """Rows of docs/results/parity.md, written when the whole proof has run."""
    rows = {}
    yield rows
    if len(rows) == 4:
        (Path(__file__).parents[3] / "docs" / "results" / "parity.md").write_text(render(rows))


def render(rows):
    lines = [
        "# Data parallelism compared with one process",
        "",
        "Made by `make prove`. A cell is the largest relative difference of any loss or weight tensor between several",
        f"ranks and one process, on equal global batches of {BATCH} from {LENGTH} samples; the last step of an epoch",
        "is short and uneven. Rows in fp64 must stay below 1e-9. The row in fp32 is in units of the noise floor (one",
        "process with a different order of summation) after 30 steps, and must stay below 4.",
        "",
        "| job | " + " | ".join(f"{ranks} x {accumulation}" for ranks, accumulation in WHOLE) + " |",
        "|---" * (1 + len(WHOLE)) + "|",
    ]
    for name, gaps in sorted(rows.items()):
        cells = [f"{gaps[case]:.1e}" if case in gaps else "" for case in WHOLE]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", "Columns: ranks x accumulation.", ""])


@pytest.mark.prove
@pytest.mark.parametrize("name", ["decoder, fp64", "group-norm ResNet, fp64"])
def test_every_split_equals_one_process(name, table):
    table[name] = check_exact(decoder_job() if "decoder" in name else resnet_job("group"), WHOLE)


@pytest.mark.prove
def test_every_world_of_a_batch_norm_resnet_equals_one_process(table):
    table["batch-norm ResNet, fp64"] = check_exact(resnet_job("batch"), [(ranks, 1) for ranks in (1, 2, 3, 4)])


@pytest.mark.prove
def test_every_split_in_fp32_stays_within_the_noise_floor(table):
    table["decoder, fp32"] = check_fp32(WHOLE[1:])
