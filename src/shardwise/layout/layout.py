"""The layout: degrees per axis, rank to coordinate and back, groups along an axis."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields, replace

from shardwise.errors import LayoutError, nearest

AXES = ("pp", "replicate", "shard", "cp", "tp")
"""Outermost first: neighbours along tp are neighbouring ranks, so that they share the fastest link."""


@dataclass(frozen=True, kw_only=True)
class Coordinate:
    """The index of one rank on each axis."""

    pp: int = 0
    replicate: int = 0
    shard: int = 0
    cp: int = 0
    tp: int = 0


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How one world of ranks is partitioned along each axis."""

    pp: int = 1
    """Pipeline stages. 1 means no pipeline."""
    replicate: int = 1
    """Copies of the (possibly sharded) model, each on other samples."""
    shard: int = 1
    """Ranks over which parameters, gradients or optimizer states are sharded, each on other samples."""
    cp: int = 1
    """Ranks that share one sequence."""
    tp: int = 1
    """Ranks that share one matrix."""

    def __post_init__(self) -> None:
        for axis in AXES:
            degree = getattr(self, axis)
            if not isinstance(degree, int) or isinstance(degree, bool) or degree < 1:
                raise LayoutError(
                    f"layout axis {axis} is {degree!r}",
                    code="layout.degree-invalid",
                    fix="use a whole number of at least 1",
                )

    @property
    def world_size(self) -> int:
        """Ranks this layout needs."""
        return math.prod(self.degrees)

    @property
    def dp(self) -> int:
        """Ranks that read different samples: replicate x shard."""
        return self.replicate * self.shard

    @property
    def degrees(self) -> tuple[int, ...]:
        """Degrees in the order of AXES."""
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def folded(self) -> Layout:
        """The layout of parameters, gradients and optimizer states: cp peers, the inner neighbours, count as shards."""
        return replace(self, shard=self.shard * self.cp, cp=1)

    def coordinate(self, rank: int) -> Coordinate:
        """Return the coordinate of `rank`."""
        if not 0 <= rank < self.world_size:
            raise LayoutError(
                f"rank {rank} is outside layout {self}",
                code="layout.rank-out-of-range",
                fix=f"use 0 to {self.world_size - 1}",
            )
        places = {}
        for axis, degree in zip(reversed(AXES), reversed(self.degrees), strict=True):
            rank, places[axis] = divmod(rank, degree)
        return Coordinate(**places)

    def rank(self, coordinate: Coordinate) -> int:
        """Return the rank at `coordinate`."""
        rank = 0
        for axis, degree in zip(AXES, self.degrees, strict=True):
            rank = rank * degree + getattr(coordinate, axis)
        return rank

    def data_index(self, rank: int) -> int:
        """Return the data-parallel rank of `rank`; tp, pp and cp peers share one."""
        place = self.coordinate(rank)
        return place.replicate * self.shard + place.shard

    def draw_index(self, rank: int) -> int:
        """Return which of the `dp` x `cp` streams of random numbers `rank` draws from: one for each slice of tokens."""
        return self.data_index(rank) * self.cp + self.coordinate(rank).cp

    def reports_loss(self, rank: int) -> bool:
        """Whether the loss of `rank` counts: tp peers compute the same one, so the first reports it.

        All cp peers report: each has the loss of its own tokens. Of the stages of a pipeline all may report, too: only
        the last has a loss.
        """
        return self.coordinate(rank).tp == 0

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """Return every group of ranks that differ only along `axes`, each in order."""
        for axis in axes:
            if axis not in AXES:
                raise LayoutError(f"layout has no axis {axis!r}", code="layout.unknown-axis", fix=nearest(axis, AXES))
        others = [axis for axis in AXES if axis not in axes]
        members: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            place = self.coordinate(rank)
            members.setdefault(tuple(getattr(place, axis) for axis in others), []).append(rank)
        return tuple(map(tuple, members.values()))

    def __str__(self) -> str:
        parts = [f"{axis}{degree}" for axis, degree in zip(AXES, self.degrees, strict=True) if degree > 1]
        return ".".join(parts) or "one"


def parse_layout(text: str) -> Layout:
    """Read the form that `str(layout)` writes, such as "pp2.shard2.tp2"."""
    degrees: dict[str, int] = {}
    for part in [] if text == "one" else text.split("."):
        match = re.fullmatch(r"([a-z]+)([0-9]+)", part)
        if match is None:
            raise LayoutError(
                f"layout {text!r} has a part {part!r}",
                code="layout.syntax",
                fix="write axis and degree, such as pp2.shard2.tp2",
            )
        axis, degree = match[1], int(match[2])
        if axis == "ep":
            raise LayoutError(
                "layout axis ep (expert parallel) is reserved",
                code="layout.axis-reserved",
                fix=f"use only {', '.join(AXES)}",
            )
        if axis not in {field.name for field in fields(Layout)}:
            raise LayoutError(
                f"layout {text!r} names an unknown axis {axis!r}", code="layout.unknown-axis", fix=nearest(axis, AXES)
            )
        if axis in degrees:
            raise LayoutError(
                f"layout {text!r} names axis {axis} twice", code="layout.axis-repeated", fix="name each axis once"
            )
        degrees[axis] = degree
    return Layout(**degrees)
