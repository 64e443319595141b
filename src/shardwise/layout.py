"""Layouts: degrees of parallelism per axis, conversion between rank and coordinate, and groups along axes."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields, replace

from shardwise.errors import LayoutError, nearest

AXES = ("pp", "replicate", "shard", "cp", "tp")
"""Axes, outermost first: tensor-parallel peers have consecutive ranks, so that they share the fastest link."""


@dataclass(frozen=True, kw_only=True)
class Coordinate:
    """Index of a rank on each axis."""

    pp: int = 0
    replicate: int = 0
    shard: int = 0
    cp: int = 0
    tp: int = 0


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Degrees of parallelism along each axis."""

    pp: int = 1
    """Pipeline parallelism: number of ranks among which the layers are split."""
    replicate: int = 1
    """Replicas of the (possibly sharded) model, each of which trains on different samples."""
    shard: int = 1
    """Ranks over which parameters, gradients or optimizer states are sharded; each trains on different samples."""
    cp: int = 1
    """Context parallelism: number of ranks over which each sequence is sharded."""
    tp: int = 1
    """Tensor parallelism: number of ranks over which each weight matrix is sharded."""

    def __post_init__(self) -> None:
        for axis in AXES:
            degree = getattr(self, axis)
            if not isinstance(degree, int) or isinstance(degree, bool) or degree < 1:
                raise LayoutError(
                    f"layout axis {axis} must be a positive integer, got {degree!r}",
                    code="layout.degree-invalid",
                    fix="use an integer of at least 1",
                )

    @property
    def world_size(self) -> int:
        """Number of ranks of this layout."""
        return math.prod(self.degrees)

    @property
    def dp(self) -> int:
        """Number of data-parallel ranks, replicate x shard."""
        return self.replicate * self.shard

    @property
    def degrees(self) -> tuple[int, ...]:
        """Degrees in the order of AXES."""
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def folded(self) -> Layout:
        """This layout with cp folded into shard, for parameters, gradients and optimizer states."""
        return self if self.cp == 1 else replace(self, shard=self.shard * self.cp, cp=1)

    def coordinate(self, rank: int) -> Coordinate:
        """Return the coordinate of `rank`."""
        if not 0 <= rank < self.world_size:
            raise LayoutError(
                f"rank {rank} is out of range for layout {self}",
                code="layout.rank-out-of-range",
                fix=f"use a rank from 0 to {self.world_size - 1}",
            )
        indices = {}
        for axis, degree in zip(reversed(AXES), reversed(self.degrees), strict=True):
            rank, indices[axis] = divmod(rank, degree)
        return Coordinate(**indices)

    def rank(self, coordinate: Coordinate) -> int:
        """Return the rank at `coordinate`."""
        rank = 0
        for axis, degree in zip(AXES, self.degrees, strict=True):
            rank = rank * degree + getattr(coordinate, axis)
        return rank

    def data_index(self, rank: int) -> int:
        """Return the data-parallel rank of `rank`, which its tp, pp and cp peers share."""
        coordinate = self.coordinate(rank)
        return coordinate.replicate * self.shard + coordinate.shard

    def draw_index(self, rank: int) -> int:
        """Return the index of the random number stream of `rank`; tp and pp peers share one of `dp` x `cp` streams."""
        return self.data_index(rank) * self.cp + self.coordinate(rank).cp

    def reports_loss(self, rank: int) -> bool:
        """Whether the loss of `rank` is part of the total: true for the first of each group of tp peers.

        Tensor-parallel peers compute the same loss. Context-parallel peers each compute the loss of their own tokens,
        and of the pipeline stages only the last has a loss.
        """
        return self.coordinate(rank).tp == 0

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """Return all groups of ranks that differ only along `axes`, with ascending ranks."""
        for axis in axes:
            if axis not in AXES:
                raise LayoutError(f"layout has no axis {axis!r}", code="layout.unknown-axis", fix=nearest(axis, AXES))
        others = [axis for axis in AXES if axis not in axes]
        members: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            coordinate = self.coordinate(rank)
            members.setdefault(tuple(getattr(coordinate, axis) for axis in others), []).append(rank)
        return tuple(map(tuple, members.values()))

    def __str__(self) -> str:
        parts = [f"{axis}{degree}" for axis, degree in zip(AXES, self.degrees, strict=True) if degree > 1]
        return ".".join(parts) or "one"


def parse_layout(text: str) -> Layout:
    """Return the layout of a string such as "pp2.shard2.tp2", as `str(layout)` formats it."""
    degrees: dict[str, int] = {}
    for part in [] if text == "one" else text.split("."):
        match = re.fullmatch(r"([a-z]+)([0-9]+)", part)
        if match is None:
            raise LayoutError(
                f"layout {text!r} has an invalid part {part!r}",
                code="layout.syntax",
                fix="write axes with degrees, such as pp2.shard2.tp2",
            )
        axis, degree = match[1], int(match[2])
        if axis == "ep":
            raise LayoutError(
                "layout axis ep (expert parallelism) is not supported",
                code="layout.axis-reserved",
                fix=f"use only {', '.join(AXES)}",
            )
        if axis not in {field.name for field in fields(Layout)}:
            raise LayoutError(
                f"layout {text!r} has an unknown axis {axis!r}", code="layout.unknown-axis", fix=nearest(axis, AXES)
            )
        if axis in degrees:
            raise LayoutError(
                f"layout {text!r} contains axis {axis} twice", code="layout.axis-repeated", fix="write each axis once"
            )
        degrees[axis] = degree
    return Layout(**degrees)
