"""MPI under MLX, which insists on starting it: so it comes first, and mpi4py finds it started."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx

from shardwise.environment import adopt, variables

_ALL_THREADS = "3"
"""MPI_THREAD_MULTIPLE: MLX asks for one thread, and Open MPI lets this variable ask for more."""


@cache
def mpi_group() -> mx.distributed.Group | None:
    """Start MPI through MLX, on every rank and before the world, and return MLX's group of all ranks.

    None where MPI was started by another, where MLX finds no Open MPI (it knows no other), or where mpirun started
    none but this rank. There is one MPI in a process: later calls return what the first did.
    """
    mpi = _mpi4py()
    if mpi is not None and mpi.Is_initialized():
        return None
    before = variables("")
    adopt({"OMPI_MPI_THREAD_LEVEL": _ALL_THREADS, **_library(), **before})
    try:
        return mx.distributed.init(strict=True, backend="mpi")
    except RuntimeError:
        return None
    finally:
        adopt(before)


def _mpi4py() -> Any:
    """Return mpi4py's module MPI with MPI not started by it; None without mpi4py or a library."""
    try:
        import mpi4py

        mpi4py.rc.initialize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError, OSError):
        return None
    return MPI


def _library() -> dict[str, str]:
    """Name the library that mpi4py has loaded, so that there are not two; Linux tells, elsewhere MLX looks itself."""
    if not sys.platform.startswith("linux"):
        return {}
    lines = Path("/proc/self/maps").read_text().splitlines()
    path = next((line.split()[-1] for line in lines if "/libmpi.so" in line), None)
    return {} if path is None else {"MLX_MPI_LIBNAME": path}
