"""Ranks for one plan after another: forks of this process that meet in a file, or ranks of mpirun."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch

from shardwise.bench.ranks import require_backend
from shardwise.dist import local_world, world
from shardwise.errors import InputError
from shardwise.launcher.local.fork import run_forked
from shardwise.launcher.mpirun import run_by_mpirun

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from shardwise.dist import World

T = TypeVar("T")

BACKENDS = ("gloo", "mpi")

_PRELOAD = (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.pipelining",
)
"""What ranks would import each for itself, up to 800 modules in 1.5 s."""


def preload(names: Iterable[str] = _PRELOAD) -> None:
    """Import once, before a fork, what every rank would import for itself."""
    for name in names:
        with contextlib.suppress(Exception):  # what cannot be imported here may still be imported there
            importlib.import_module(name)


def require_meeting(backend: str) -> None:
    """Refuse a backend that ranks of verify could not meet by, before any of them starts."""
    if backend not in BACKENDS:
        raise InputError(
            f"backend {backend!r}, but verify's ranks are on the CPU",
            code="verify.backend-not-cpu",
            fix=f"use {' or '.join(BACKENDS)}",
        )
    if backend == "mpi":
        require_backend(backend)


def on_ranks(fn: Callable[[World], T], nproc: int, *, timeout_s: float, backend: str = "gloo") -> list[T]:
    """Run `fn(world)` on `nproc` forked gloo ranks, or on ranks of mpirun, on the CPU; return its results by rank.

    The first failing rank's exception is raised here, with the last line that any rank wrote as a note; else ranks
    are silent. This process must not have run tensor operations on several threads before: those threads do not
    survive a fork.
    """
    if backend == "mpi" and nproc > 1:
        return run_by_mpirun(lambda: _in_mpi_world(fn, timeout_s), nproc, timeout_s=timeout_s)
    with tempfile.TemporaryDirectory(prefix="shardwise-") as name:
        folder = Path(name)

        def body(rank: int) -> T:
            _write_to(folder / f"{rank}.log")
            with local_world(folder / "store", rank, nproc, timeout_s=timeout_s) as here:
                return fn(here)

        try:
            return run_forked(body, nproc, timeout_s=timeout_s)
        except Exception as error:
            lines = [line for log in sorted(folder.glob("*.log")) for line in log.read_text().splitlines() if line]
            error.add_note(f"last words: {lines[-1] if lines else 'none'}")
            raise


def _in_mpi_world(fn: Callable[[World], T], timeout_s: float) -> T:
    """Communicate over a world of its own, called on every rank that mpirun started."""
    torch.set_num_threads(1)  # as forks have it
    with world(backend="mpi", device="cpu", timeout_s=timeout_s) as here:
        return fn(here)


def _write_to(path: Path) -> None:
    """Send what this process writes, also from native code, to a file."""
    with path.open("w") as log:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
