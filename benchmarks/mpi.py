"""MPI beside gloo: all_reduce on the same ranks, and how much of a DDP step's communication each of them hides.

Two ranks of this machine, which mpirun starts. They have a group over MPI and one over gloo at once; for every size the
two take turns, calls in blocks between barriers, and a turn gives one ratio mpi / gloo. MPI goes by shared memory here,
gloo by loopback, as they come.

Then one DDP step of mpi_job.py (8 MiB of gradients in buckets of 1 MiB) as `bench overlap` takes it apart: the step
whole, its compute with every collective left out, its communication alone; hidden = 1 - (step - compute) /
communication, from the fastest turn of each, since other work on the machine only adds (medians stand in brackets).
Over a link, where waiting costs nothing: a network namespace (with root) whose loopback carries RATE by tc's token
bucket, both backends by TCP. Once with layers that wait, as a host does while its accelerator computes: what is hidden
then has moved while nobody called MPI. And once with layers that compute, on the cores that communication needs too.
Without root the link is left out, with a message.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from figures import figure
from shardwise.dist import world
from shardwise.errors import ShardwiseError
from shardwise.job import load_job, refer
from shardwise.launcher.local.function import find_mpirun
from shardwise.measurement.comm.collectives import CollectiveSpec, prepare
from shardwise.measurement.overlap import Effort, measure_overlap
from shardwise.measurement.specs import rank_zero, require_backend
from shardwise.measurement.timing import time_collective
from shardwise.planner.settle import LocalDevice, settle
from shardwise.units import write_size

if TYPE_CHECKING:
    from shardwise.measurement.split import Split

RANKS = 2
SIZES = tuple(1 << power for power in range(12, 27, 2))
"""From 4 KiB to 64 MiB."""
BACKENDS = ("mpi", "gloo")
RATE = "2gbit"
LINK = f"ip link set lo up && tc qdisc add dev lo root tbf rate {RATE} burst 256kb latency 100ms"
BY_TCP = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "tcp,self", "OMPI_MCA_btl_tcp_if_include": "lo"}
"""What keeps Open MPI from shared memory, and lets it use loopback."""
JOBS = ("waiting", "computing")
"""Of mpi_job.py, named by what their layers do."""


def compare(sizes: tuple[int, ...], turns: int) -> dict[int, list[tuple[float, float]]]:
    """Called on every rank: return (mpi, gloo) seconds of every turn of each size."""
    with world(backend="mpi", device="cpu") as here:
        groups = {"mpi": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
        found = {}
        for size in sizes:
            spec = CollectiveSpec(name="all_reduce", num_bytes=size)
            made = {name: prepare(spec, group, here.device) for name, group in groups.items()}
            found[size] = [
                tuple(time_collective(made[name], groups[name], budget_s=0.05).median_s for name in BACKENDS)
                for _ in range(turns)
            ]
        return found


def take_apart(job: str, backend: str, effort: Effort) -> Split:
    """Return one DDP step, its compute and its communication over `backend`, on two fresh ranks."""
    reference = refer(f"{Path(__file__).with_name('mpi_job.py')}:{job}", {})
    batch_size, overrides = load_job(reference).batch_size, {"communication.bucket_mb": "1"}
    plan = settle("ddp", batch_size=batch_size, world_size=RANKS, device=LocalDevice(), overrides=overrides)
    [measured] = measure_overlap(reference, plan, [{}], effort=effort, nproc=RANKS, device="cpu", backend=backend)
    return measured.split


def show_overlap(effort: Effort) -> None:
    """Take steps apart over both backends; print a table of them, and the figures."""
    print(
        f"\n| one DDP step over {RATE}, ms | compute | communication | step | hidden |\n|---|---|---|---|---|",
        flush=True,
    )
    hidden = {}
    for job in JOBS:
        for backend in BACKENDS:
            split = take_apart(job, backend, effort)
            parts = (split.compute, split.communication, split.step)
            compute_s, communication_s, step_s = (timing.min_s for timing in parts)
            hidden[job, backend] = 1 - (step_s - compute_s) / communication_s
            cells = " | ".join(f"{timing.min_s * 1e3:.1f} ({timing.median_s * 1e3:.1f})" for timing in parts)
            print(f"| {job} layers, {backend} | {cells} | {hidden[job, backend]:.0%} |", flush=True)
    for (job, backend), share in hidden.items():
        figure(f"mpi.overlap.{job}.{backend}", 100 * share, "percent-hidden")


def over_a_link(options: list[str]) -> None:
    """Take a step apart in a namespace of its own, whose loopback is a slow link."""
    if os.geteuid() or not shutil.which("tc") or not shutil.which("unshare"):
        print("\nno link: it takes root, unshare and tc")
        return
    command = [sys.executable, __file__, "--linked", *options]
    shell = f'{LINK} && exec "$@"'
    done = subprocess.run(
        ["unshare", "-n", "bash", "-c", shell, "bash", *command], env={**os.environ, **BY_TCP}, check=False
    )
    if done.returncode:
        print(f"no link: its namespace ended with {done.returncode}")


def main() -> None:
    parser = argparse.ArgumentParser(description="MPI beside gloo: all_reduce, and the overlap of a DDP step.")
    parser.add_argument("--quick", action="store_true", help="fewer turns and rounds")
    parser.add_argument("--linked", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    turns, effort = (3, Effort(rounds=1)) if options.quick else (10, Effort(rounds=3, turns=10))
    if options.linked:
        show_overlap(effort)
        return
    try:
        require_backend("mpi")
    except ShardwiseError as error:
        print(f"MPI is left out: {error}")
        return
    version = subprocess.run([find_mpirun(), "--version"], capture_output=True, text=True, check=False).stdout
    print(
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}, {version.splitlines()[0]}"
    )

    found = rank_zero(compare, RANKS, SIZES, turns, backend="mpi")
    ratios = {size: statistics.median(mpi / gloo for mpi, gloo in pairs) for size, pairs in found.items()}
    print("\n| all_reduce | mpi, ms | gloo, ms | mpi / gloo | quartiles |\n|---|---|---|---|---|")
    for size, pairs in found.items():
        mpi, gloo = (statistics.median(column) * 1e3 for column in zip(*pairs, strict=True))
        low, _, high = statistics.quantiles([mpi / gloo for mpi, gloo in pairs], n=4)
        print(f"| {write_size(size)} | {mpi:.3f} | {gloo:.3f} | {ratios[size]:.2f} | {low:.2f} .. {high:.2f} |")
    for size in (SIZES[0], 1 << 20, SIZES[-1]):
        figure(f"mpi.all_reduce.{write_size(size)}", ratios[size], "x-gloo")
    figure("mpi.all_reduce.mean", statistics.geometric_mean(ratios.values()), "x-gloo", at_most=1)

    over_a_link(["--quick"] if options.quick else [])
    print(f"load {os.getloadavg()[0]:.1f} at the end")


if __name__ == "__main__":
    main()
