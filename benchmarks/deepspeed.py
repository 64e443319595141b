"""DeepSpeed: what our Step adds to a bare DeepSpeed loop, and torch's own ZeRO-2 and 3 beside DeepSpeed's.

Two CPU ranks train the same decoder (fp32) from the same weights on the same samples with the same `torch.optim.AdamW`.
Contenders are built once, then take turns of a few steps in an order drawn anew each round; all ranks wait for each
other before and after a turn. A contender's overhead is its time over that of the bare loop of the same round and
stage: the median over rounds is the figure, quartiles stand beside it. Figures are CPU time summed over the ranks,
which leaves out the moments when other programs had the cores; wall time stands beside it.

bare deepspeed   deepspeed.initialize with the JSON of the plan; a DataLoader, engine(), engine.backward, engine.step
shardwise        sw.build_step with engine = "deepspeed": its feed, denominator, gradient check and reports
native           sw.build_step with engine = "torch": FSDP2

Memory is what the tensors of a contender on rank 0 take between steps.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import importlib
import os
import random
import statistics
import sys
import time
import warnings
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler

import shardwise as sw
from figures import figure
from shardwise.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

RANKS = 2
LENGTH, BATCH = 128, 8
ROUNDS, QUICK_ROUNDS = 15, 3
STEPS, QUICK_STEPS = 8, 3
"""Of a turn."""
STAGES, QUICK_STAGES = (1, 2, 3), (2, 3)
TARGET = 3.0
"""Percent that our Step may add to a bare loop."""


class Reading(NamedTuple):
    """Seconds per step."""

    cpu: float
    wall: float


def make_job() -> sw.Job:
    return sw.Job(
        model=lambda: sw.models.decoder("llama-tiny", vocab_size=256, context=LENGTH, width=256, num_layers=4),
        data=sw.datasets.text(length=LENGTH),
        loss=sw.losses.token_cross_entropy,
        optimizer=lambda named: torch.optim.AdamW([parameter for _, parameter in named], lr=1e-3),
        batch_size=BATCH,
        steps=100_000,
    )


def make_plan(stage: int, engine: str) -> sw.Plan:
    return dataclasses.replace(sw.Plan.preset(f"zero{stage}", RANKS, batch_size=BATCH), engine=engine)


def bare(stage: int, _world: sw.World) -> Callable[[], object]:
    """Return one step of a loop as DeepSpeed's guide has it."""
    import deepspeed
    from shardwise.engines.deepspeed.config import deepspeed_config

    job = make_job()
    torch.manual_seed(0)
    model = job.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = deepspeed_config(make_plan(stage, "deepspeed"), clip_norm=None)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    batches = endless(job)

    def step() -> None:
        tokens, targets = next(batches)
        loss = cross_entropy(engine(tokens).flatten(0, 1), targets.flatten())
        engine.backward(loss)
        engine.step()

    return step


def endless(job: sw.Job) -> Iterator[list[torch.Tensor]]:
    dataset = job.data("train")
    while True:
        yield from DataLoader(dataset, BATCH // RANKS, sampler=DistributedSampler(dataset), drop_last=True)


def ours(stage: int, world: sw.World, engine: str) -> Callable[[], object]:
    step = sw.build_step(make_job(), make_plan(stage, engine), world)
    batches = iter(step.feed)
    return lambda: step(next(batches))


CONTENDERS: dict[str, Callable[[int, sw.World], Callable[[], object]]] = {
    "bare deepspeed": bare,
    "shardwise": lambda stage, world: ours(stage, world, "deepspeed"),
    "native": lambda stage, world: ours(stage, world, "torch"),
}


def take_turn(step: Callable[[], object], steps: int) -> Reading:
    """Communicate; return seconds per step, CPU time summed over ranks."""
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
        step()
    mine = torch.tensor([time.process_time() - cpu], dtype=torch.float64)
    dist.all_reduce(mine)
    return Reading(mine.item() / steps, (time.perf_counter() - wall) / steps)


def tensor_bytes() -> int:
    """Return the bytes of all storages that tensors of this process point to."""
    gc.collect()
    tensors = [tensor for tensor in gc.get_objects() if isinstance(tensor, torch.Tensor)]
    local = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in local}.values())


def compete(world: sw.World, stages: tuple[int, ...], rounds: int, steps: int) -> dict:
    """Return readings by (name, stage), and state bytes between steps."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    warnings.simplefilter("ignore", FutureWarning)
    built, state_bytes = {}, {}
    for stage in stages:
        for name, build in CONTENDERS.items():
            before = tensor_bytes()
            built[name, stage] = build(stage, world)
            take_turn(built[name, stage], 2)
            state_bytes[name, stage] = tensor_bytes() - before
    readings = {key: [] for key in built}
    order = random.Random(0)
    for _ in range(rounds):
        for key in order.sample(list(built), len(built)):
            readings[key].append(take_turn(built[key], steps))
    return {"readings": readings, "state_bytes": state_bytes}


def overheads(readings: dict, name: str, stage: int, kind: str) -> list[float]:
    """Return percent over the bare loop, round by round."""
    pairs = zip(readings[name, stage], readings["bare deepspeed", stage], strict=True)
    return [100 * (getattr(own, kind) / getattr(base, kind) - 1) for own, base in pairs]


def show(found: dict) -> None:
    readings, state_bytes = found["readings"], found["state_bytes"]
    columns = f"{'stage':>6}{'CPU ms':>9}{'wall ms':>9}{'over bare':>11}{'quartiles':>18}{'wall':>8}{'MB':>8}"
    print(f"\n{'per step':<18}{columns}")
    for (name, stage), own in readings.items():
        cpu, wall = (1e3 * statistics.median(getattr(reading, kind) for reading in own) for kind in ("cpu", "wall"))
        low, middle, high = statistics.quantiles(overheads(readings, name, stage, "cpu"), n=4, method="inclusive")
        over_wall = statistics.median(overheads(readings, name, stage, "wall"))
        print(
            f"{name:<18}{stage:>6}{cpu:>9.1f}{wall:>9.1f}{middle:>10.1f}%{f'{low:.1f} .. {high:.1f}':>18}"
            f"{over_wall:>7.1f}%{state_bytes[name, stage] / 1e6:>8.2f}"
        )
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds, steps and stages")
    quick = parser.parse_args().quick
    try:
        known = version("deepspeed")
    except PackageNotFoundError:
        print("DeepSpeed is not installed: pip install -r benchmarks/peers.txt")
        return
    os.environ |= {"DS_ACCELERATOR": "cpu", "DS_LOG_LEVEL": "error"}
    stages, rounds, steps = (QUICK_STAGES, QUICK_ROUNDS, QUICK_STEPS) if quick else (STAGES, ROUNDS, STEPS)
    print(f"{rounds} rounds of {steps} steps on {RANKS} ranks; DeepSpeed {known}, torch {torch.__version__}")
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start", flush=True)
    found = run_ranks(compete, RANKS, stages, rounds, steps, timeout_s=1200)[0]
    show(found)
    readings, state_bytes = found["readings"], found["state_bytes"]
    for stage in stages:
        own = statistics.median(overheads(readings, "shardwise", stage, "cpu"))
        figure(f"deepspeed.zero{stage}.overhead", own, "percent-over-bare-deepspeed", at_most=TARGET)
    for stage in stages:
        native = 1 + statistics.median(overheads(readings, "native", stage, "cpu")) / 100
        figure(f"deepspeed.zero{stage}.native.time", native, "x-bare-deepspeed")
        figure(
            f"deepspeed.zero{stage}.native.memory",
            state_bytes["native", stage] / state_bytes["bare deepspeed", stage],
            "x-bare-deepspeed",
        )


def step_aside() -> None:
    """Put the library in the place of this file, which is what `import deepspeed` finds first in any benchmark."""
    place = next(place for place, folder in enumerate(sys.path) if Path(folder).resolve() == Path(__file__).parent)
    folder = sys.path.pop(place)
    del sys.modules["deepspeed"]
    importlib.import_module("deepspeed")
    sys.path.insert(place, folder)


if __name__ == "__main__":
    main()
elif __name__ == "deepspeed":
    step_aside()
