"""Figures as values (plots, bars, timelines, heat maps, tables), and the axes of a plot with their ticks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from shardwise.units import format_bytes, format_number

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True, kw_only=True)
class Series:
    """One line of a plot."""

    name: str
    points: tuple[tuple[float, float], ...]
    dashed: bool = False
    """For what was predicted or fitted, beside what was measured."""


@dataclass(frozen=True, kw_only=True)
class Plot:
    """Lines over a common axis; a logarithmic axis leaves out points that are not positive."""

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    log_x: bool = False
    log_y: bool = False
    x_is_bytes: bool = False
    """Whether ticks are written as 4 KiB, 1 MiB."""


@dataclass(frozen=True, kw_only=True)
class Bars:
    """Bars made of parts, one a row: (label, value of each part)."""

    title: str
    unit: str
    parts: tuple[str, ...]
    rows: tuple[tuple[str, tuple[float, ...]], ...]
    limit: float | None = None
    """Where a dashed line marks what a bar may not exceed."""
    clip_at: float | None = None
    """Longer bars end here; the number beside them is their own."""


class GanttSpan(NamedTuple):
    """One piece of work in a timeline."""

    row: str
    kind: str
    """Its name in the legend."""
    label: str
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Gantt:
    """Work over time, one row a stream; both in seconds."""

    title: str
    spans: tuple[GanttSpan, ...]


@dataclass(frozen=True, kw_only=True)
class Heat:
    """A matrix as colours, with each value written in its cell; None is an empty cell."""

    title: str
    unit: str
    row_labels: tuple[str, ...]
    column_labels: tuple[str, ...]
    values: tuple[tuple[float | None, ...], ...]
    marked: tuple[tuple[int, int], ...] = ()
    """Cells (row, column) that the text names."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of text under a header."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


# Axes of a plot: where a value lies between its ends, and which values are written beside it.


_CROWD = 12
"""As many distinct values get a tick each, when they lie far enough apart."""


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One direction of a plot, from `low` to `high`, both finite and apart; above 0 where it is logarithmic."""

    low: float
    high: float
    log: bool = False
    is_bytes: bool = False
    at: tuple[float, ...] = ()
    """The only values that occur, where they are few: better ticks than round numbers."""

    def position(self, value: float) -> float:
        """Return where `value` lies, 0 at the low end and 1 at the high one."""
        low, high, value = (math.log(x) if self.log else x for x in (self.low, self.high, value))
        return (value - low) / (high - low)

    def ticks(self, most: int) -> list[tuple[float, str]]:
        """Return up to about `most` values to write, each with its text."""
        values = self._own_ticks(most) or self._round_ticks(most)
        return [(value, format_bytes(value) if self.is_bytes else format_number(value)) for value in values]

    def _own_ticks(self, most: int) -> list[float]:
        positions = [self.position(value) for value in self.at]
        near = any(b - a < 0.8 / most for a, b in pairwise(positions))
        return [] if near or len(positions) > _CROWD else list(self.at)

    def _round_ticks(self, most: int) -> list[float]:
        if not self.log:
            return _linear_ticks(self.low, self.high, most)
        if self.is_bytes:
            return _powers(self.low, self.high, most, base=2.0)
        tens = _powers(self.low, self.high, most, base=10.0)
        return tens if len(tens) > 2 else _ones_twos_fives(self.low, self.high) or tens


def axis_over(values: Iterable[float], *, log: bool, is_bytes: bool = False, from_zero: bool = False) -> Axis | None:
    """Return an axis that holds all `values` that it can show, None when there are none.

    `from_zero` makes a linear axis begin (or end) at 0, so that heights compare as lengths do.
    """
    shown = sorted({value for value in values if is_shown(value, log=log)})
    if not shown:
        return None
    low, high = shown[0], shown[-1]
    if from_zero and not log:
        low, high = min(low, 0.0), max(high, 0.0)
    if low == high:
        low, high = (low / 2, low * 2) if log else (low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2)
    return Axis(low=low, high=high, log=log, is_bytes=is_bytes, at=tuple(shown) if len(shown) <= _CROWD else ())


def is_shown(value: float, *, log: bool) -> bool:
    """Whether an axis can show this value."""
    return math.isfinite(value) and (value > 0 or not log)


def _linear_ticks(low: float, high: float, most: int) -> list[float]:
    """Return multiples of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * size for size in (1, 2, 5, 10) if power * size >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [step * index for index in range(first, last + 1)]


def _powers(low: float, high: float, most: int, *, base: float) -> list[float]:
    """Return powers of `base`, leaving out evenly where they would crowd."""
    first, last = math.ceil(math.log(low, base) - 1e-9), math.floor(math.log(high, base) + 1e-9)
    step = max(1, math.ceil((last - first + 1) / most))
    return [base**exponent for exponent in range(first, last + 1) if (exponent - first) % step == 0]


def _ones_twos_fives(low: float, high: float) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.floor(math.log10(high)) + 1)
    marks = [10.0**decade * digit for decade in decades for digit in (1, 2, 5)]
    return [mark for mark in marks if low <= mark <= high]
