"""What buckets, overlap and prefetch gain over none, measured side by side in one run.

    torchrun --nproc_per_node=2 communication_overlap.py
    shardwise launch --nproc_per_node=2 communication_overlap.py

Every way computes the same gradients of the same network. The ways take turns, one step each, round after round, so
that a busy machine slows all of them alike; the table has medians. On CPU, gloo's threads need the cores that compute,
so there is little to hide behind: read the table of your own machine, not this text.
"""

import argparse
import dataclasses
import time
from collections.abc import Callable
from itertools import pairwise
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

import shardwise as sw
from shardwise.plans import Communication

Way = Callable[[], None]
"""One forward and backward, ending when the gradients are summed over ranks (communicates, on every rank)."""


class Block(nn.Module):
    """A residual block with four small parameters and two large ones, [N, width] to [N, width]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, width)
        self.down = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x, changed a little."""
        return x + self.down(torch.relu(self.up(self.norm(x))))


def network(width: int, num_blocks: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for _ in range(num_blocks)))


def alone(model: nn.Module, x: torch.Tensor) -> Way:
    """No communication at all: the floor."""

    def step() -> None:
        model(x).square().mean().backward()

    return step


def after_backward(model: nn.Module, x: torch.Tensor, bucket_bytes: int) -> Way:
    """All-reduce when backward is done: parameter by parameter (bucket_bytes 0), or flat buckets of them."""

    def step() -> None:
        model(x).square().mean().backward()
        # <after>
        gradients = [parameter.grad for parameter in model.parameters()]
        for bucket in buckets(gradients, bucket_bytes):
            flat = torch.cat([gradient.flatten() for gradient in bucket])
            dist.all_reduce(flat)
            flat /= dist.get_world_size()
            for gradient, piece in zip(bucket, flat.split([each.numel() for each in bucket]), strict=True):
                gradient.copy_(piece.view_as(gradient))
        # </after>

    return step


def during_backward(model: nn.Module, x: torch.Tensor) -> Way:
    """All-reduce each gradient as soon as it is there, without waiting: overlap, but no buckets."""
    # <during>
    pending: list[tuple[dist.Work, torch.Tensor]] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda ready: pending.append((dist.all_reduce(ready.grad, async_op=True), ready.grad))
        )  # then, after backward: wait for each
    # </during>

    def step() -> None:
        model(x).square().mean().backward()
        for work, gradient in pending:
            work.wait()
            gradient.div_(dist.get_world_size())
        pending.clear()

    return step


def planned(model: nn.Module, x: torch.Tensor, world: sw.World, preset: str, **communication: float) -> Way:
    """DDP or FSDP2 as a plan configures it: buckets and overlap, or prefetching."""
    # <planned>
    plan = dataclasses.replace(sw.Plan.preset(preset, world.size), communication=Communication(**communication))
    return alone(sw.parallelize(model, plan, world), x)
    # </planned>


def nothing_ahead(model: nn.Sequential, x: torch.Tensor, world: sw.World) -> Way:
    """FSDP2 that gathers each block when it is needed: its prefetch names what is gathered already."""
    step = planned(model, x, world, "fsdp")
    for block in units(model):
        block.set_modules_to_backward_prefetch([block])
    return step


def ahead_async(model: nn.Sequential, x: torch.Tensor, world: sw.World) -> Way:
    """FSDP2 that gathers the next block in the background while one computes, started by hooks.

    FSDP2's own prefetch relies on CUDA streams: without them it gathers earlier, but still waits.
    """

    def gathering(block: FSDPModule) -> Callable[..., None]:
        def hook(*_: object) -> None:
            block.unshard(async_op=True)  # waited for when the block is used

        return hook

    step = nothing_ahead(model, x, world)
    blocks = units(model)
    for block, following in pairwise(blocks):
        block.up.register_forward_pre_hook(gathering(following))
        following.down.register_full_backward_pre_hook(gathering(block))
    return step


def units(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model if isinstance(module, FSDPModule)]


def buckets(tensors: list[torch.Tensor], most_bytes: int):
    """Yield runs of tensors that together stay below `most_bytes`, at least one each; last layers first."""
    bucket: list[torch.Tensor] = []
    for tensor in reversed(tensors):
        if bucket and sum(each.nbytes for each in bucket) + tensor.nbytes > most_bytes:
            yield bucket
            bucket = []
        bucket.append(tensor)
    yield bucket


def all_ways(world: sw.World, make: Callable[[], nn.Sequential], x: torch.Tensor) -> dict[str, Way]:
    """Return every way by name, each with a network of its own (communicates, on every rank)."""
    return {
        "no communication": alone(make().to(world.device), x),
        "none: each parameter, after backward": after_backward(make().to(world.device), x, 0),
        "buckets of 1 MiB, after backward": after_backward(make().to(world.device), x, 1 << 20),
        "overlap: each parameter, during backward": during_backward(make().to(world.device), x),
        "both: DDP, buckets of 1 MiB": planned(make(), x, world, "ddp", bucket_mb=1),
        "both: DDP, buckets of 25 MiB": planned(make(), x, world, "ddp", bucket_mb=25),
        "FSDP2, nothing ahead": nothing_ahead(make(), x, world),
        "FSDP2, prefetch 1 (its default)": planned(make(), x, world, "fsdp", prefetch=1),
        "FSDP2, prefetch 2": planned(make(), x, world, "fsdp", prefetch=2),
        "FSDP2, next block in the background": ahead_async(make(), x, world),
    }


def timed(ways: dict[str, Way], world: sw.World, rounds: int) -> dict[str, list[float]]:
    """Return the milliseconds of every way in every round, the slowest rank's (communicates, on every rank)."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 2):  # the first two warm up: connections, DDP's order of buckets
        for name, step in ways.items():
            world.barrier()
            started = time.perf_counter()
            step()
            if world.device.type == "cuda":
                torch.cuda.synchronize()
            elapsed = max(world.gather(1e3 * (time.perf_counter() - started)))
            if turn >= 2:
                times[name].append(elapsed)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description="What buckets, overlap and prefetch gain, measured")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--rows", type=int, default=128, help="of each rank's input")
    options = parser.parse_args()
    with sw.world() as world:
        x = torch.randn(options.rows, options.width, device=world.device)
        ways = all_ways(world, lambda: network(options.width, options.blocks), x)
        times = timed(ways, world, options.rounds)
        if world.is_main:
            print(report(times))


def report(times: dict[str, list[float]]) -> str:
    """Return the table of medians, then what each idea gained: the median over rounds of before minus after."""
    floor = median(times["no communication"])
    lines = [f"{'':<44}{'ms a step':>9}{'above the floor':>17}"]
    for name, values in times.items():
        lines.append(f"{name:<44}{median(values):>9.1f}{median(values) - floor:>17.1f}")
    _, none, bucketed, overlapped, ddp, _, fsdp, *ahead = times.values()
    for idea, before, after in (
        ("buckets", none, bucketed),
        ("overlap", none, overlapped),
        ("buckets and overlap (DDP)", none, ddp),
        ("FSDP2's prefetch 1", fsdp, ahead[0]),
        ("FSDP2's prefetch 2", fsdp, ahead[1]),
        ("gathering in the background", fsdp, ahead[2]),
    ):
        saved = median(b - a for b, a in zip(before, after, strict=True))
        lines.append(f"{idea}: {saved:+.1f} ms saved, {saved / median(before):+.0%}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
