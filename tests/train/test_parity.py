"""Any number of ranks and any accumulation give the losses and weights of one process."""

import itertools

import pytest
import torch
from torch.utils.data import Dataset

import shardwise as sw
from shardwise.plan import Plan, Precision
from shardwise.run import EventLog
from shardwise.run.timeline import Timeline
from shardwise.testing import run_ranks
from shardwise.train.loop import run_loop

BATCH = 120  # divides by 1 to 4 ranks x 1, 2 and 5 micro-batches
LENGTH = 257  # a prime: the last step of each epoch has 17 samples, fewer than the 20 cells of 4 ranks x 5


class RandomTokens(Dataset):
    """Sequences whose tails are ignored, so that ranks count different numbers of tokens."""

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, 32, (9,), generator=generator)
        target = tokens[1:].clone()
        target[1 + index % 8 :] = -100
        return tokens[:-1], target


class RandomImages(Dataset):
    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(1, 8, 8, generator=generator), torch.tensor(index % 10)


def train_only(dataset):
    return lambda split: dataset() if split == "train" else None


def decoder_job(**changes):
    return make_job(
        model=lambda: sw.models.decoder(
            "llama-tiny", vocab_size=32, width=16, num_layers=2, num_heads=4, num_kv_heads=2, context=8
        ),
        data=train_only(RandomTokens),
        loss=sw.losses.token_cross_entropy,
        clip_norm=0.5,
        **changes,
    )


def resnet_job(norm, **changes):
    return make_job(
        model=lambda: small_resnet(norm), data=train_only(RandomImages), loss=sw.losses.cross_entropy, **changes
    )


def small_resnet(norm):
    """The real class with its first two stages: enough for every kind of layer."""
    model = sw.models.resnet18(num_classes=10, in_channels=1, norm=norm, stem="small")
    model.stages = torch.nn.Sequential(*list(model.stages.children())[:1])
    model.head = torch.nn.Linear(64, 10)
    return model


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
    _, module = run_loop(job, plan, world, events, Timeline())
    return torch.tensor(losses, dtype=torch.float64), {k: v.double() for k, v in module.state_dict().items()}


def distance(one, other):
    """Largest relative difference of losses and of any weight tensor."""
    (losses, weights), (other_losses, other_weights) = one, other
    assert len(losses) == len(other_losses) > 0
    parts = [(losses, other_losses)] + [(weights[name], other_weights[name]) for name in weights]
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-3)) for a, b in parts)


def check_exact(job, cases):
    reference = run_ranks(trained, 1, job)[0]
    for ranks, accumulation in cases:
        results = run_ranks(trained, ranks, job, accumulation)
        gaps = [distance(result, reference) for result in results]
        assert max(gaps) < 1e-9, f"{ranks} ranks x accumulation {accumulation}: {gaps}"


WHOLE = list(itertools.product([1, 2, 3, 4], [1, 2, 5]))
SLICE = [(2, 1), (3, 2), (4, 5)]


def test_decoder_equals_one_process():
    check_exact(decoder_job(), SLICE)


def test_group_norm_resnet_equals_one_process():
    check_exact(resnet_job("group", epochs=1), SLICE)


def test_batch_norm_resnet_equals_one_process():
    check_exact(resnet_job("batch", epochs=1), [(2, 1), (3, 1)])


def test_gradient_sync_after_every_micro_batch_changes_nothing():
    def every(world, job):
        plan = Plan.preset("ddp", world.size, batch_size=BATCH, accumulation=5)
        precision = Precision(parameter="fp64", compute="fp64", reduce="fp64", optimizer="fp64")
        plan = Plan(**{**vars(plan), "precision": precision, "gradient_sync": "every"})
        _, module = run_loop(job, plan, world, EventLog(None), Timeline())
        return module.state_dict()

    job = decoder_job(epochs=1)
    last, every_time = run_ranks(trained, 2, job, 5)[0][1], run_ranks(every, 2, job)[0]
    assert all(torch.allclose(last[name], every_time[name], rtol=1e-9, atol=0) for name in last)


def test_fp32_stays_within_the_noise_floor():
    check_fp32([(2, 1)])


@pytest.mark.prove
@pytest.mark.parametrize("job", [decoder_job(), resnet_job("group")], ids=["decoder", "group-norm resnet"])
def test_every_split_equals_one_process(job):
    check_exact(job, WHOLE)


@pytest.mark.prove
def test_every_world_of_a_batch_norm_resnet_equals_one_process():
    check_exact(resnet_job("batch"), [(ranks, 1) for ranks in (1, 2, 3, 4)])


@pytest.mark.prove
def test_every_split_in_fp32_stays_within_the_noise_floor():
    check_fp32(WHOLE[1:])


def check_fp32(cases):
    """The floor is what summing the same gradients in another order does to one process."""
    job = decoder_job(steps=30)
    reference = run_ranks(trained, 1, job, 1, "fp32")[0]
    floor = max(distance(run_ranks(trained, 1, job, accumulation, "fp32")[0], reference) for accumulation in (2, 4, 5))
    for ranks, accumulation in cases:
        gap = max(distance(result, reference) for result in run_ranks(trained, ranks, job, accumulation, "fp32"))
        assert gap < 4 * floor, f"{ranks} ranks x accumulation {accumulation}: {gap:.1e}, floor {floor:.1e}"
