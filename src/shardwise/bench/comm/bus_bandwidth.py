"""What nccl-tests calls size, count, algbw and busbw, for every collective."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

_ALIGNED = 16
"""Bytes that one rank's part is a multiple of in nccl-tests (GetCollByteCount of each test)."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What a collective is, as far as its columns are concerned."""

    traffic: Literal["twice", "others", "whole", "none"]
    """Of the whole tensor, what passes one rank's link: all but its own part, twice that, everything, or nothing."""
    is_cut: bool = False
    """Whether ranks have parts of the whole, and `count` is one part's; else they work on the whole in place."""
    sends_whole: bool = True
    receives_whole: bool = True
    reduces: bool = False
    is_rooted: bool = False


KINDS = {
    "all_reduce": Kind(traffic="twice", reduces=True),
    "all_gather": Kind(traffic="others", is_cut=True, sends_whole=False),
    "reduce_scatter": Kind(traffic="others", is_cut=True, receives_whole=False, reduces=True),
    "broadcast": Kind(traffic="whole", is_rooted=True),
    "reduce": Kind(traffic="whole", reduces=True, is_rooted=True),
    "gather": Kind(traffic="others", is_cut=True, sends_whole=False, is_rooted=True),
    "scatter": Kind(traffic="others", is_cut=True, receives_whole=False, is_rooted=True),
    "all_to_all": Kind(traffic="others", is_cut=True),
    "barrier": Kind(traffic="none"),
}
"""Name -> kind of all that `bench comm` measures, in the order of its tables."""

OPERATIONS = {
    "SUM": "sum",
    "AVG": "avg",
    "PRODUCT": "prod",
    "MIN": "min",
    "MAX": "max",
    "BAND": "band",
    "BOR": "bor",
    "BXOR": "bxor",
    "PREMUL_SUM": "mulsum",
}
"""torch's name -> what stands in the column redop; nccl-tests has none of the three on bits."""

TYPES = {
    "float32": "float",
    "float64": "double",
    "float16": "half",
    "bfloat16": "bfloat16",
    "float8_e4m3fn": "f8e4m3",
    "float8_e5m2": "f8e5m2",
    "int8": "int8",
    "uint8": "uint8",
    "int32": "int32",
    "int64": "int64",
}
"""torch's name -> what stands in the column type."""


def count_of(name: str, num_bytes: int, itemsize: int, ranks: int) -> int:
    """Return the column count for about `num_bytes`: elements of a rank's part where the whole is cut, else of all.

    Rounded down as nccl-tests rounds (parts to 16 bytes), but never to none; 0 for what moves nothing.
    """
    kind = KINDS[name]
    if kind.traffic == "none":
        return 0
    if not kind.is_cut:
        return max(1, num_bytes // itemsize)
    part, aligned = num_bytes // itemsize // ranks, max(1, _ALIGNED // itemsize)
    return part // aligned * aligned or max(1, part)


def size_of(name: str, count: int, itemsize: int, ranks: int) -> int:
    """Return the column size in bytes: of the larger of what one rank sends and receives."""
    return count * itemsize * (ranks if KINDS[name].is_cut else 1)


def buffer_bytes(name: str, size: int, ranks: int) -> int:
    """Return the bytes of all that one rank sends from and receives into."""
    kind = KINDS[name]
    if kind.traffic == "none":
        return 0
    if not kind.is_cut:
        return size
    return sum(size if whole else size // ranks for whole in (kind.sends_whole, kind.receives_whole))


def bus_factor(name: str, ranks: int) -> float:
    """Return busbw / algbw: the share of `size` that passes the link of the busiest rank at the least."""
    others = (ranks - 1) / ranks
    return {"twice": 2 * others, "others": others, "whole": 1.0, "none": 0.0}[KINDS[name].traffic]


def bandwidths(name: str, size: int, seconds: float, ranks: int) -> tuple[float, float]:
    """Return the columns algbw and busbw, in GB/s of 1e9 bytes."""
    algorithm = size / seconds / 1e9
    return algorithm, algorithm * bus_factor(name, ranks)
