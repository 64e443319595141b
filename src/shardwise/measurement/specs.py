"""The function `bench`, the Spec of each benchmark with its options and defaults, and functions that start ranks."""

from __future__ import annotations

import importlib
import os
from functools import partial
from pathlib import Path  # noqa: TC003 - read at run time by msgspec
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from shardwise.engines.backends import backend_row, is_own, try_library
from shardwise.engines.engine import engine_named
from shardwise.environment import identify
from shardwise.errors import InputError, LaunchError, nearest
from shardwise.hardware import usable_cores
from shardwise.job import load_job
from shardwise.launcher.local.function import find_mpirun, run_by_mpirun, run_forked, run_fresh
from shardwise.planner.settle import local_device
from shardwise.runs.console import echo_error
from shardwise.spec import NonNegativeInt, PositiveInt, Spec, argument, option
from shardwise.torch_private.distributed import DYNAMO

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardwise.job import Job, JobReference
    from shardwise.launcher.local.starters import Starter
    from shardwise.measurement.report import BenchReport
    from shardwise.planner.settle import LocalDevice

Nproc = Annotated[PositiveInt | None, option("--nproc", "--nproc-per-node")]
Settings = Annotated[tuple[str, ...], option("--set", metavar="KEY=VALUE")]
JobFile = Annotated[str, argument("JOB.py[:NAME]")]


class PlaceSpec(Spec, frozen=True, kw_only=True):
    """The device and the backend of the ranks."""

    device: Literal["cpu", "cuda"] | None = None
    """Device of the ranks (default: cuda if available)."""
    backend: Annotated[str | None, option(metavar="NAME")] = None
    """gloo, nccl, mpi or ucc (default: nccl on cuda, else gloo); gloo ranks may share a GPU, mpi ranks are on CPUs."""

    def __post_init__(self) -> None:
        """Convert the backend to lower case; mpi, which supports only CPU tensors, implies device cpu."""
        super().__post_init__()
        if self.backend is not None:
            msgspec.structs.force_setattr(self, "backend", self.backend.lower())
        row = backend_row(self.backend)
        if row.default_device is None:
            return
        if self.device not in (None, row.default_device):
            raise LaunchError(
                f"--device {self.device} cannot be used with --backend {row.name}, which supports only CPU tensors",
                code="world.backend-device-mismatch",
                fix="omit --device, or use --backend nccl",
            )
        msgspec.structs.force_setattr(self, "device", row.default_device)


class CommSpec(Spec, frozen=True, kw_only=True):
    """The collectives to time and check, and their settings."""

    collectives: Annotated[tuple[str, ...], argument("[COLLECTIVE]...")] = ()
    sizes: str = "1KiB:64MiB"
    """FIRST:LAST[:FACTOR], or a comma-separated list."""
    dtypes: str | None = None
    """Comma-separated dtypes to time, or all (default: float32; all are checked)."""
    ops: str | None = None
    """Comma-separated reduce operations to time, or all (default: SUM; all are checked)."""
    group: str = "world"
    """world, node, across, or an axis of --layout."""
    layout: str | None = None
    """Layout of the ranks, such as shard2.tp2."""
    root: NonNegativeInt = 0
    """Root of rooted collectives, as a rank of its group."""
    also_async: Annotated[bool, option("--async")] = False
    """Also time calls with async_op=True."""
    seconds: Annotated[float, msgspec.Meta(ge=0.1)] = 20.0
    """Approximate duration of the measurement."""
    nproc: Nproc = None
    """Processes to start (default: one per GPU, 2 on a CPU)."""
    place: PlaceSpec = PlaceSpec()
    compare: Path | None = None
    """JSON file of an earlier run to compare with; slower measurements are reported."""


class P2pSpec(Spec, frozen=True, kw_only=True):
    """Settings of the measurement of all pairs of ranks."""

    nproc: Nproc = None
    """Processes to start, at least two."""
    ways: Annotated[tuple[Literal["send", "isend", "batch"], ...], option("--way")] = ()
    """Point-to-point methods (default: all three)."""
    size: str | None = None
    """Size of a large message, such as 4MiB (default: 1MiB on CPUs, 16MiB on GPUs)."""
    small: str = "8"
    """Size of the message for the latency."""
    together: bool = False
    """Measure disjoint pairs at the same time, which shows contention."""
    seconds: Annotated[float, msgspec.Meta(gt=0)] = 20.0
    """Approximate duration of the measurement."""
    place: PlaceSpec = PlaceSpec()


class OverlapSpec(Spec, frozen=True, kw_only=True):
    """The job, the plan and the communication settings to measure."""

    job: JobFile
    plan: str = "auto"
    """auto, preset, product or .toml file."""
    nproc: Nproc = None
    """Processes to start (default: 1)."""
    buckets: Annotated[str | None, option(metavar="MB,MB")] = None
    """Sizes of DDP's buckets (default: 1,5,25,100)."""
    prefetch: Annotated[str | None, option(metavar="N,N")] = None
    """Numbers of FSDP blocks to prefetch (default: 1,2,4)."""
    rounds: PositiveInt = 3
    """How often each setting is built and measured."""
    settings: Settings = ()
    """Override a field of the job or the plan."""
    place: PlaceSpec = PlaceSpec()


class ScalingSpec(Spec, frozen=True, kw_only=True):
    """The job or script to measure, and the numbers of ranks."""

    ranks: Annotated[str | None, option(metavar="N,N")] = None
    """Numbers of ranks (default: powers of two up to --nproc)."""
    nproc: Nproc = None
    """Maximum number of processes (default: GPUs, otherwise cores)."""
    mode: Literal["strong", "weak"] | None = None
    """Strong or weak scaling (default: both for a job, strong for a script)."""
    rounds: PositiveInt = 3
    """How often each number of ranks is measured."""
    plan: str | None = None
    """Plan of a job: preset, product or .toml file, which is refitted (default: ddp)."""
    settings: Settings = ()
    """Override a field of the job or the plan."""
    place: PlaceSpec = PlaceSpec()
    pattern: Annotated[str | None, option(metavar="REGEX")] = None
    """Regular expression whose group matches the throughput in the output of a script."""
    script: Annotated[str, argument("JOB.py[:NAME]|SCRIPT.py")]
    arguments: Annotated[tuple[str, ...], argument("[ARGUMENTS]...")] = ()


class StepPlaceSpec(PlaceSpec, frozen=True, kw_only=True):
    """The device and the backend of the ranks; with cuda:0, all ranks share the first GPU."""

    device: Literal["cpu", "cuda", "cuda:0"] | None = None  # type: ignore[assignment]
    """Device of the ranks (default: cuda if available); with cuda:0, all ranks share the first GPU."""


class StepSpec(Spec, frozen=True, kw_only=True):
    """The job and the plan to run for a few steps."""

    job: JobFile
    plan: str = "auto"
    """auto, preset, product or .toml file."""
    nproc: Nproc = None
    """Processes to start (default: 1)."""
    fake_world: PositiveInt | None = None
    """World size of a fake world, in which only one rank runs."""
    rank: NonNegativeInt = 0
    """The rank of the fake world that runs."""
    steps: PositiveInt = 5
    """Steps to measure."""
    settings: Settings = ()
    """Override a field of the job or the plan."""
    place: StepPlaceSpec = StepPlaceSpec()
    profile: bool = False
    """Also report the kernels that take the most time."""
    trace: Path | None = None
    """Write a trace for Perfetto, .json or .json.gz."""


# `bench` as a function of a benchmark's name and options that returns its report.


_PARTS: dict[str, tuple[type[Spec], str]] = {
    "comm": (CommSpec, "shardwise.measurement.comm.report"),
    "p2p": (P2pSpec, "shardwise.measurement.p2p_report"),
    "overlap": (OverlapSpec, "shardwise.measurement.overlap_report"),
    "scaling": (ScalingSpec, "shardwise.measurement.scaling_report"),
    "step": (StepSpec, "shardwise.measurement.step_findings"),
}
"""Name -> Spec, and the module whose `measure` runs it: imported on use, since all need torch."""


def bench(part: str | Spec, *arguments: Any, **options: Any) -> BenchReport | None:
    """Run a benchmark: `bench("comm", nproc=2)`, or one of the Specs of `shardwise.measurement.specs`.

    `part` is comm, p2p, overlap, scaling or step; options are those of the command. Return None on ranks other than 0
    of a world that torchrun, srun or `shardwise launch` started.
    """
    if isinstance(part, str):
        if part not in _PARTS:
            raise InputError(f"benchmark {part!r} does not exist", code="bench.unknown-part", fix=nearest(part, _PARTS))
        spec: Spec = _PARTS[part][0].of(*arguments, **options)
    else:
        spec = part
    for kind, module in _PARTS.values():
        if type(spec) is kind:
            report: BenchReport | None = importlib.import_module(module).measure(spec)
            return report
    raise InputError(
        f"{type(spec).__name__} is not the Spec of a benchmark",
        code="bench.unknown-part",
        fix=f"use one of {', '.join(kind.__name__ for kind, _ in _PARTS.values())}",
    )


PRELOAD = ("torch", DYNAMO)
"""Modules to import before ranks are forked: torch, and dynamo, which the first DDP model imports."""
_LOADING_S = 60.0
"""Timeout in seconds for loading an MPI library."""


def rank_zero(fn: Callable[..., Any], nproc: int | None, *args: Any, backend: str | None = None) -> Any:
    """Run `fn(*args)` on every rank and return the result of rank 0; None on the other ranks of an existing world.

    Inside a world that torchrun, srun, mpirun or `shardwise launch` started, this process is one of its ranks;
    otherwise `nproc` ranks (default: 1) are started on this machine, in the way that `backend` needs. `fn` opens the
    world itself and must be importable by its name.
    """
    me = identify()
    if me.world_size == 1:
        return on_ranks(fn, nproc or 1, *args, backend=backend)[0]
    if nproc is not None:
        raise InputError(
            f"--nproc {nproc} cannot be used inside a world of {me.world_size} ranks that {me.source} started",
            code="cli.option-inside-world",
            fix="omit --nproc, or run the command outside of the world",
        )
    found = fn(*args)
    return found if me.rank == 0 else None


def require_backend(backend: str) -> None:
    """Raise an error if a CPU backend is not available on this machine, before any rank starts; imports torch.

    The MPI library is loaded in a forked process. That process does not use shared memory, since Open MPI 5 leaves
    16 MiB in /dev/shm for each process that mpirun did not start.
    """
    import torch

    from shardwise.dist.backends import choose_backend

    if backend_row(backend).starts_by_mpirun:
        find_mpirun()
    choose_backend(backend, torch.device("cpu"))
    if is_own(backend):
        run_forked(lambda _: try_library(backend), 1, timeout_s=_LOADING_S, extra={"OMPI_MCA_btl": "self"})


def on_ranks(
    fn: Callable[..., Any],
    nproc: int,
    *args: Any,
    starter: Starter | None = None,
    backend: str | None = None,
) -> list[Any]:
    """Run `fn(*args)` on `nproc` new ranks of this machine, and return its results by rank.

    The ranks have the thread count and environment variables of a training run, and share nothing with this process,
    which may have used CUDA or threads. `fn` must be importable by its name. The first exception of a rank is raised.
    `starter` is a fork parent for several calls; by default a new one is started. mpirun starts ranks of backend "mpi".
    """
    if backend_row(backend).starts_by_mpirun:
        return run_by_mpirun(partial(fn, *args), nproc)
    return run_fresh(partial(fn, *args), nproc, preload=PRELOAD, starter=starter)


# Functions for benchmarks of a job.


def bench_device(place: PlaceSpec, nproc: int) -> tuple[LocalDevice, str]:
    """Return the device to resolve a plan for, and the device that ranks open; gloo ranks may share one GPU."""
    shares = place.backend == "gloo"
    where = local_device(place.device, 1 if shares else nproc)
    return where, "cuda:0" if shares and where.kind == "cuda" else where.kind


def load_torch_job(reference: JobReference) -> Job:
    """Load a job; raise an error if its model is not a torch module."""
    job = load_job(reference)
    fix = "use shardwise train, which reports samples per second"
    engine_named(job.engine).require_torch_model(reference.name, "bench measures torch modules", fix=fix)
    return job


def warn_if_busy() -> None:
    """Print a warning if the load exceeds the number of cores, since measurements then vary."""
    load, cores = os.getloadavg()[0], usable_cores()
    if load > cores:
        echo_error(f"shardwise: the machine is busy (load {load:.1f} on {cores} cores): expect wide spreads")
