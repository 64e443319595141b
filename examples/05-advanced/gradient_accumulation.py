"""Gradient accumulation: the mean-of-means trap in numbers, no_sync, and what shardwise does instead.

    torchrun --nproc_per_node=2 gradient_accumulation.py
    shardwise launch --nproc_per_node=2 gradient_accumulation.py

Sentences have different lengths, so micro-batches and ranks have different numbers of tokens. Each way below computes
the gradient of the same 16 sentences; the reference is one backward over all of them on one process.
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import shardwise as sw

SENTENCES, LENGTH, TOKENS = 16, 12, 50
ACCUMULATE = 4
PADDING = -100
"""The target that cross_entropy leaves out."""


class Sentences(torch.utils.data.Dataset):
    """Token rows [LENGTH] of which only the first tokens count: 1 in the first sentence, 12 in the last."""

    def __len__(self) -> int:
        return SENTENCES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.randint(TOKENS, (LENGTH + 1,), generator=torch.Generator().manual_seed(index))
        targets = tokens[1:].clone()
        targets[1 + index * (LENGTH - 1) // (SENTENCES - 1) :] = PADDING
        return tokens[:-1], targets


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(TOKENS, 16), nn.Linear(16, TOKENS))


job = sw.Job(
    model=network,
    data=lambda split: Sentences() if split == "train" else None,
    loss=sw.losses.token_cross_entropy,
    optimizer=sw.sgd(lr=1.0),
    batch_size=SENTENCES,
    steps=1,
)


def reference(batch) -> torch.Tensor:
    """Return the gradient of the mean over all tokens, from one backward on this process alone."""
    tokens, targets = batch
    model = network()
    cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
    return flat_gradient(model)


def mean_of_means(model: DistributedDataParallel, windows: list) -> None:
    """Accumulate as most guides do it: sends gradients every time, and weighs a short sentence like a long one."""
    # <trap>
    for tokens, targets in windows:
        loss = cross_entropy(model(tokens).flatten(0, 1), targets.flatten())  # a mean over THIS micro-batch
        (loss / len(windows)).backward()  # a mean of means; DDP makes it a mean of means of means
    # </trap>


def sum_over_count(model: DistributedDataParallel, windows: list) -> None:
    """Accumulate sums over the tokens of the whole step, and send once (all-reduces the count)."""
    # <right>
    count = sum((targets != PADDING).sum() for _, targets in windows)
    dist.all_reduce(count)  # tokens of this step over all ranks and micro-batches
    scale = dist.get_world_size() / count.item()  # DDP divides by the world size: undo that
    for index, (tokens, targets) in enumerate(windows):
        is_last = index == len(windows) - 1
        with nullcontext() if is_last else model.no_sync():  # around forward, too: DDP decides there
            loss = cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="sum")
            (loss * scale).backward()
    # </right>


def by_shardwise(world: sw.World, accumulation: int) -> torch.Tensor:
    """Return the gradient that a described job steps with (on every rank)."""
    # <shardwise>
    plan = sw.Plan.preset("ddp", world.size, batch_size=job.batch_size, accumulation=accumulation)
    step = sw.build_step(job, plan, world)
    before = flat_values(step.model)
    for batch in step.feed:
        step(batch)
    # </shardwise>
    return before - flat_values(step.model)  # SGD with a rate of 1 steps by exactly the gradient


def flat_gradient(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def flat_values(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten().clone() for parameter in model.parameters()])


def by_ddp(accumulate, windows: list, device: torch.device) -> tuple[torch.Tensor, int]:
    """Return the gradient of one plain DDP window, and how many all-reduces of gradients it took (communicates)."""
    model = DistributedDataParallel(network().to(device))
    calls: list[int] = []

    def average(_, bucket: dist.GradBucket):  # what DDP does by itself, counted
        calls.append(bucket.index())
        mean = bucket.buffer().div_(dist.get_world_size())
        return dist.all_reduce(mean, async_op=True).get_future().then(lambda done: done.value()[0])

    model.register_comm_hook(None, average)
    accumulate(model, windows)
    return flat_gradient(model), len(calls)


def main() -> None:
    with sw.world() as world:
        batch = torch.utils.data.default_collate([Sentences()[index] for index in range(SENTENCES)])
        batch = [part.to(world.device) for part in batch]
        mine = [part.tensor_split(world.size)[world.rank] for part in batch]
        windows = list(zip(*(part.tensor_split(ACCUMULATE) for part in mine), strict=True))
        counts = world.gather([int((targets != PADDING).sum()) for _, targets in windows])
        world.print(f"tokens in each micro-batch, by rank: {counts}")

        true = reference(batch)
        world.print(f"{'one step of 16 sentences':<42}{'error of the gradient':<24}all-reduces of gradients")
        for name, accumulate in (("mean of means", mean_of_means), ("sum over count, no_sync", sum_over_count)):
            gradient, calls = by_ddp(accumulate, windows, world.device)
            world.print(f"plain DDP, {name:<31}{error(gradient, true):<24}{calls}")
        for accumulation in (1, ACCUMULATE):
            name = f"shardwise, accumulation {accumulation}"
            world.print(f"{name:<42}{error(by_shardwise(world, accumulation), true)}")


def error(gradient: torch.Tensor, true: torch.Tensor) -> str:
    """Return the largest error relative to the largest component, as text."""
    return f"{((gradient - true).abs().max() / true.abs().max()).item():.2%}"


if __name__ == "__main__":
    main()
