"""Ranks for a measurement, started the way training starts them; the device and the job that they measure."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any

from shardwise.engines.backends import backend_row, is_own, try_library
from shardwise.engines.engine import engine_named
from shardwise.environment import identify
from shardwise.errors import InputError
from shardwise.hardware import usable_cores
from shardwise.job import load_job
from shardwise.launcher.local.function import run_forked, run_fresh
from shardwise.launcher.mpirun import find_mpirun, run_by_mpirun
from shardwise.planner.settle import local_device
from shardwise.runs.console import echo_error
from shardwise.torch_private.runtime import DYNAMO

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardwise.job import Job, JobReference
    from shardwise.launcher.local.starters import Starter
    from shardwise.measurement.specs import PlaceSpec
    from shardwise.planner.settle import LocalDevice

PRELOAD = ("torch", DYNAMO)
"""What every rank would import: torch, and what the first DDP brings in."""
_LOADING_S = 60.0
"""That a library of MPI may take to start."""


def rank_zero(fn: Callable[..., Any], nproc: int | None, *args: Any, backend: str | None = None) -> Any:
    """Run `fn(*args)` on every rank and return what rank 0's call returned; None on the other ranks of a world.

    Inside a world that torchrun, srun, mpirun or `shardwise launch` has started, this process is one of its ranks;
    else `nproc` ranks (default: 1) are started on this machine, as `backend` wants them. `fn` opens the world itself,
    and is found by its name.
    """
    me = identify()
    if me.world_size == 1:
        return on_ranks(fn, nproc or 1, *args, backend=backend)[0]
    if nproc is not None:
        raise InputError(
            f"--nproc {nproc} inside a world of {me.world_size} ranks that {me.source} started",
            code="cli.option-inside-world",
            fix="leave --nproc out, or start shardwise by itself",
        )
    found = fn(*args)
    return found if me.rank == 0 else None


def require_backend(backend: str) -> None:
    """Refuse a backend for the CPU that this machine lacks, before any rank starts; imports torch to ask it.

    A library of MPI is tried in a fork. Open MPI 5 would leave 16 MiB in /dev/shm behind each process that no mpirun
    started, so there it gets no shared memory.
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
    """Run `fn(*args)` on `nproc` fresh ranks of this machine, and return its results by rank.

    They have the threads and variables that a training's would have, and share nothing with this process, which may
    have used CUDA or threads. `fn` is found by its name. The first failing rank's exception is raised here. `starter`
    is a fork parent that serves several calls; without one, one is started. Ranks of backend "mpi" are mpirun's.
    """
    if backend_row(backend).starts_by_mpirun:
        return run_by_mpirun(partial(fn, *args), nproc)
    return run_fresh(partial(fn, *args), nproc, preload=PRELOAD, starter=starter)


# What measurements of a job have in common.


def bench_device(place: PlaceSpec, nproc: int) -> tuple[LocalDevice, str]:
    """Return what settling must know of the device, and the device that ranks open: gloo ranks may share one GPU."""
    shares = place.backend == "gloo"
    where = local_device(place.device, 1 if shares else nproc)
    return where, "cuda:0" if shares and where.kind == "cuda" else where.kind


def load_torch_job(reference: JobReference) -> Job:
    """Load a job whose model is torch's."""
    job = load_job(reference)
    fix = "shardwise train it, which reports samples per second"
    engine_named(job.engine).require_torch_model(reference.name, "bench measures torch modules", fix=fix)
    return job


def warn_if_busy() -> None:
    """Write a warning where more is running than there are cores: what is measured then will vary."""
    load, cores = os.getloadavg()[0], usable_cores()
    if load > cores:
        echo_error(f"shardwise: the machine is busy (load {load:.1f} on {cores} cores): expect wide spreads")
