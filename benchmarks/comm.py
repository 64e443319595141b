"""Does `bench comm` change what it measures? Collectives beside bare loops, and its fits on held-out sizes.

One run on two gloo ranks of this machine (with `--device cuda`: on as many nccl ranks as there are GPUs):

tool        what `bench comm` calls: blocks of calls between barriers, the slowest rank of each, the median block
bare        loops of as many calls of the same torch function on the same tensors, with nothing between them, the
            slowest rank of each, the median loop

Both take turns, so that other load affects both; a turn gives one ratio tool / bare, and a collective has the median
of its ratios at all sizes from 1 MiB on. Then alpha-beta fits to every second of 17 sizes from 1 KiB to 64 MiB, judged
on the others: the mean relative error of all collectives. Then the whole default sweep, as a user starts it, on two and
on four ranks. Columns and factors are compared with cases worked out by hand in tests/unit/bench/test_comm_columns.py.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time

import torch
import torch.distributed as dist

from figures import figure
from shardwise.dist import world
from shardwise.measurement.comm.collectives import CollectiveSpec, prepare
from shardwise.measurement.comm.spec import KINDS
from shardwise.measurement.comm.verdict import held_out_error
from shardwise.measurement.specs import rank_zero
from shardwise.measurement.timing import calls_in_block, slowest, time_block, time_collective
from shardwise.units import write_size

MOVING = tuple(name for name, kind in KINDS.items() if kind.traffic != "none")
SIZES = (1 << 20, 1 << 22, 1 << 24)
FITTED = tuple(1 << power for power in range(10, 27))
LOOPS = 3
"""Bare loops, or blocks of the tool, in one turn."""


def compare_all(sizes: tuple[int, ...], turns: int, device: str) -> dict[tuple[str, int], list[tuple[float, float]]]:
    """Called on every rank: return (tool, bare) seconds of every turn of each collective and size."""
    with world(device=device) as here:
        found = {}
        for name in MOVING:
            for size in sizes:
                made = prepare(CollectiveSpec(name=name, num_bytes=size), dist.group.WORLD, here.device)
                found[name, size] = [take_turns(made, here.device, turn) for turn in range(turns)]
        return found


def take_turns(collective, device, turn):
    def tool():
        return time_collective(collective, dist.group.WORLD, budget_s=0.0, most=LOOPS).median_s

    def bare():
        return bare_loops(collective.call, device)

    if turn % 2:
        return tool(), bare()
    return tuple(reversed((bare(), tool())))


def bare_loops(call, device):
    """Return the seconds of a call in the median of a few loops that do nothing else, on the slowest rank."""
    call()
    once = statistics.median(slowest([time_block(call, 1, device) for _ in range(3)], dist.group.WORLD, device))
    times = calls_in_block(once)
    loops = [time_block(call, times, device) for _ in range(LOOPS)]
    return statistics.median(slowest(loops, dist.group.WORLD, device)) / times


def fit_all(sizes: tuple[int, ...], rounds: int, device: str) -> dict[str, float]:
    """Called on every rank: return each collective's error on held-out sizes; rounds take turns over all sizes."""
    with world(device=device) as here:
        least: dict[tuple[str, int], float] = {}
        for _ in range(rounds):
            for size in sizes:
                for name in MOVING:
                    made = prepare(CollectiveSpec(name=name, num_bytes=size), dist.group.WORLD, here.device)
                    timing = time_collective(made, dist.group.WORLD, budget_s=0.02)
                    least[name, size] = min(least.get((name, size), timing.min_s), timing.min_s)
        return {name: held_out_error([(size, least[name, size]) for size in sizes]) for name in MOVING}


def sweep_seconds(nproc: int, device: str) -> float:
    began = time.perf_counter()
    command = [sys.executable, "-m", "shardwise", "bench", "comm", "--nproc", str(nproc), "--device", device]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"the sweep on {nproc} ranks ended with {done.returncode}: {done.stdout[-300:]}{done.stderr[-300:]}")
        return float("nan")
    print(f"  {nproc} ranks: {done.stdout.splitlines()[-1]}")
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description="bench comm beside bare loops, and its fits on held-out sizes.")
    parser.add_argument("--quick", action="store_true", help="fewer turns, the sweep on two ranks only")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    ranks = torch.cuda.device_count() if options.device == "cuda" else 2
    turns, sizes, rounds = (10, SIZES[:2], 1) if options.quick else (30, SIZES, 6)
    print(
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}, {ranks} ranks", flush=True
    )

    found = rank_zero(compare_all, ranks, sizes, turns, options.device)
    print(f"\n{'collective':<16}{'size':>8}{'tool ms':>10}{'bare ms':>10}{'ratio':>8}{'quartiles':>16}")
    for (name, size), pairs in found.items():
        tool, bare = (statistics.median(column) * 1e3 for column in zip(*pairs, strict=True))
        low, middle, high = statistics.quantiles([tool / bare for tool, bare in pairs], n=4)
        spread = f"{low:.2f} .. {high:.2f}"
        print(f"{name:<16}{write_size(size):>8}{tool:>10.3f}{bare:>10.3f}{middle:>8.3f}{spread:>16}")
    apart = {}
    for name in MOVING:
        ratios = [tool / bare for (of, _), pairs in found.items() if of == name for tool, bare in pairs]
        apart[name] = abs(statistics.median(ratios) - 1)
    print("apart: " + ", ".join(f"{name} {share:.1%}" for name, share in apart.items()), flush=True)

    errors = rank_zero(fit_all, ranks, FITTED, rounds, options.device)
    print("\nheld-out error: " + ", ".join(f"{name} {error:.1%}" for name, error in errors.items()))

    print("\ndefault sweep:", flush=True)
    sweeps = [
        (nproc, sweep_seconds(nproc, options.device)) for nproc in ((2,) if options.quick else (2, 4)) if ranks > 1
    ]
    print(f"load {os.getloadavg()[0]:.1f} at the end\n")
    figure("comm.apart.worst", 100 * max(apart.values()), "percent", at_most=5)
    figure("comm.apart.mean", 100 * statistics.mean(apart.values()), "percent", at_most=5)
    figure("comm.fit.held_out", 100 * statistics.mean(errors.values()), "percent", at_most=15)
    for nproc, seconds in sweeps:
        figure(f"comm.sweep.{nproc}", seconds, "seconds", at_most=60)


if __name__ == "__main__":
    main()
