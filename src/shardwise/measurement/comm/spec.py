"""Settings of a sweep of collectives: sizes, dtypes, operations and groups; algbw and busbw as in nccl-tests."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from shardwise.errors import InputError, nearest
from shardwise.layout import AXES, Layout
from shardwise.units import read_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


# size, count, algbw and busbw of nccl-tests for every collective.


_ALIGNED = 16
"""In nccl-tests one rank's shard is a multiple of this many bytes (GetCollByteCount of each test)."""


@dataclass(frozen=True, kw_only=True)
class CollectiveKind:
    """Properties of a collective that define its columns in the table."""

    traffic: Literal["twice", "others", "whole", "none"]
    """Traffic of one rank's link: twice the other ranks' shards, the other ranks' shards, the whole tensor or 0."""
    is_split: bool = False
    """Whether each rank has a shard of the tensor, and `count` counts its elements; otherwise calls are in place."""
    sends_whole: bool = True
    receives_whole: bool = True
    reduces: bool = False
    is_rooted: bool = False


KINDS = {
    "all_reduce": CollectiveKind(traffic="twice", reduces=True),
    "all_gather": CollectiveKind(traffic="others", is_split=True, sends_whole=False),
    "reduce_scatter": CollectiveKind(traffic="others", is_split=True, receives_whole=False, reduces=True),
    "broadcast": CollectiveKind(traffic="whole", is_rooted=True),
    "reduce": CollectiveKind(traffic="whole", reduces=True, is_rooted=True),
    "gather": CollectiveKind(traffic="others", is_split=True, sends_whole=False, is_rooted=True),
    "scatter": CollectiveKind(traffic="others", is_split=True, receives_whole=False, is_rooted=True),
    "all_to_all": CollectiveKind(traffic="others", is_split=True),
    "barrier": CollectiveKind(traffic="none"),
}
"""Name -> kind of the collectives that `bench comm` measures, in the order of its tables."""

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
"""torch's name -> the name in the column redop; nccl-tests does not have the bitwise operations."""

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
"""torch's name -> the name in the column type."""


def count_of(name: str, num_bytes: int, itemsize: int, ranks: int) -> int:
    """Return the value of column `count` for about `num_bytes`: elements of a rank's shard, or of an unsplit tensor.

    The count is rounded down as in nccl-tests (shards to 16 bytes) to at least 1; 0 for collectives without data.
    """
    kind = KINDS[name]
    if kind.traffic == "none":
        return 0
    if not kind.is_split:
        return max(1, num_bytes // itemsize)
    part, aligned = num_bytes // itemsize // ranks, max(1, _ALIGNED // itemsize)
    return part // aligned * aligned or max(1, part)


def size_of(name: str, count: int, itemsize: int, ranks: int) -> int:
    """Return the value of column `size`: the larger of the bytes that one rank sends and receives."""
    return count * itemsize * (ranks if KINDS[name].is_split else 1)


def buffer_bytes(name: str, size: int, ranks: int) -> int:
    """Return the bytes of one rank's send and receive buffers."""
    kind = KINDS[name]
    if kind.traffic == "none":
        return 0
    if not kind.is_split:
        return size
    return sum(size if whole else size // ranks for whole in (kind.sends_whole, kind.receives_whole))


def bus_factor(name: str, ranks: int) -> float:
    """Return busbw / algbw: the minimum traffic of the busiest rank's link as a multiple of `size`."""
    others = (ranks - 1) / ranks
    return {"twice": 2 * others, "others": others, "whole": 1.0, "none": 0.0}[KINDS[name].traffic]


def bandwidths(name: str, size: int, seconds: float, ranks: int) -> tuple[float, float]:
    """Return the columns algbw and busbw, in GB/s of 1e9 bytes."""
    algorithm = size / seconds / 1e9
    return algorithm, algorithm * bus_factor(name, ranks)


FACTOR = 4
"""Default factor from one size to the next."""
PLACES = ("world", "node", "across")


@dataclass(frozen=True, kw_only=True)
class SweepSettings:
    """The collectives to time and check, with sizes, dtypes, operations and groups."""

    collectives: tuple[str, ...] = tuple(KINDS)
    sizes: tuple[int, ...] = tuple(1 << power for power in range(10, 27, 2))
    """Bytes, ascending."""
    dtypes: tuple[str, ...] = ("float32",)
    operations: tuple[str, ...] = ("SUM",)
    checked_dtypes: tuple[str, ...] = tuple(TYPES)
    """dtypes that are checked once on small tensors, with each of `checked_operations`."""
    checked_operations: tuple[str, ...] = tuple(OPERATIONS)
    named: tuple[str, ...] = ()
    """Operations and dtypes that were requested by name: an unsupported one raises an error."""
    groups: tuple[str, ...] = ("world",)
    """world, node (ranks of one node), across (ranks with the same local rank), or an axis of `layout`."""
    layout: Layout | None = None
    root: int = 0
    """Root as a rank of its group."""
    modes: tuple[str, ...] = ("sync",)
    """sync, async or both."""
    budget_s: float = 20.0
    """Approximate duration of the sweep: sets how often each call is repeated, at least three times."""
    device: str | None = None
    backend: str | None = None


def read_names(given: str | Iterable[str], known: Iterable[str], what: str) -> tuple[str, ...]:
    """Parse names in a list or a comma-separated text, or "all"; raise InputError for unknown names."""
    items = given.split(",") if isinstance(given, str) else list(given)
    names = tuple(dict.fromkeys(item.strip() for item in items if item.strip()))
    if names == ("all",):
        return tuple(known)
    for name in names:
        if name not in set(known):
            raise InputError(f"{what} {name!r} does not exist", code="bench.unknown-choice", fix=nearest(name, known))
    if not names:
        raise InputError(
            f"at least one {what} is required", code="bench.nothing-named", fix=f"use any of {', '.join(known)}"
        )
    return names


def read_aliased(given: str, table: Mapping[str, str], what: str) -> tuple[str, ...]:
    """Return torch's names for comma-separated names of torch (case-insensitive) or of nccl-tests."""
    names = {name.lower(): name for name in table}
    aliases = {alias.lower(): name for name, alias in table.items()}
    found = []
    for item in given.split(","):
        key = item.strip().lower()
        found.append(names.get(key) or aliases.get(key, item))
    return read_names(found, tuple(table), what)


def read_sizes(text: str) -> tuple[int, ...]:
    """Parse ascending sizes from "1KiB:64MiB" (factor 4), "1KiB:64MiB:2" (factor 2) or a comma-separated list."""
    if ":" not in text:
        return tuple(sorted({read_size(part) for part in text.split(",")}))
    first, last, *rest = text.split(":")
    factor = rest[0] if rest else str(FACTOR)
    if len(rest) > 1 or not re.fullmatch(r"[0-9]+", factor) or int(factor) < 2:
        raise InputError(
            f"--sizes {text} must have an integer factor above 1",
            code="bench.sizes-factor-invalid",
            fix="use FIRST:LAST or FIRST:LAST:FACTOR",
        )
    low, high = read_size(first), read_size(last)
    if low > high:
        raise InputError(
            f"--sizes {text} must be ascending", code="bench.sizes-descending", fix=f"use --sizes {last}:{first}"
        )
    sizes = [low]
    while sizes[-1] * int(factor) <= high:
        sizes.append(sizes[-1] * int(factor))
    return tuple(sizes)


def read_groups(text: str, layout: Layout | None) -> tuple[str, ...]:
    """Parse comma-separated groups; raise InputError for an axis whose degree in `layout` is not above 1."""
    groups = read_names(text, (*PLACES, *AXES), "group")
    for axis in set(groups) & set(AXES):
        if layout is None:
            raise InputError(
                f"--group {axis} is an axis, which requires --layout",
                code="bench.group-without-layout",
                fix=f"add --layout, such as {axis}2",
            )
        if getattr(layout, axis) == 1:
            split = [name for name in AXES if getattr(layout, name) > 1]
            raise InputError(
                f"--group {axis} must be an axis with a degree above 1, but its degree in layout {layout} is 1",
                code="bench.group-axis-unsplit",
                fix=f"use --group with one of {', '.join((*PLACES, *split))}",
            )
    return groups


def group_ranks(group: str, world: tuple[tuple[int, int], ...], layout: Layout | None) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of every group of one kind; `world` has (node, local rank) of each rank.

    Raise InputError if the world cannot be divided into such groups.
    """
    size = len(world)
    if group == "world":
        return (tuple(range(size)),)
    if group in AXES:
        assert layout is not None  # noqa: S101 - read_groups checks it
        if layout.world_size != size:
            raise InputError(
                f"layout {layout} needs {layout.world_size} ranks, but the world has {size}",
                code="layout.world-size-mismatch",
                fix=f"use --nproc {layout.world_size}, or another --layout",
            )
        return layout.groups(group)
    place = 0 if group == "node" else 1
    members: dict[int, list[int]] = {}
    for rank, where in enumerate(world):
        members.setdefault(where[place], []).append(rank)
    if group == "across" and len(members[world[0][1]]) == 1:
        raise InputError(
            "--group across needs several nodes, the world has 1",
            code="bench.group-one-node",
            fix="use --group world, or start the command on more nodes",
        )
    if len({len(ranks) for ranks in members.values()}) > 1:
        raise InputError(
            f"--group {group} needs groups of equal size, got sizes {sorted(map(len, members.values()))}",
            code="bench.groups-unequal",
            fix="start the same number of ranks on every node",
        )
    return tuple(map(tuple, members.values()))
