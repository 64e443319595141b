"""Data of figures (line plots, stacked bars, timelines, heat maps, tables), and their rendering as text."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from shardwise.units import format_bytes, format_number

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    Row = tuple[int, float | None, float | None, float | None]
    Span = tuple[int, int] | None
    "First step of a range of steps, and the minimum, maximum and mean in it; None if the range has no value."

Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Series:
    """A line of a plot."""

    name: str
    points: tuple[tuple[float, float], ...]
    dashed: bool = False
    """Whether to draw a dashed line, for predicted or fitted values."""


@dataclass(frozen=True, kw_only=True)
class Plot:
    """A line plot; points that are not positive are not drawn on a logarithmic axis."""

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    log_x: bool = False
    log_y: bool = False
    x_is_bytes: bool = False
    """Whether the ticks of the x axis are formatted as sizes, such as 4 KiB."""

    def shows(self, point: Point) -> bool:
        """Return whether a point is visible on the axes of the plot."""
        return is_shown(point[0], log=self.log_x) and is_shown(point[1], log=self.log_y)

    def visible_runs(self, series: Series, most: int) -> tuple[tuple[Point, ...], ...]:
        """Return the runs of consecutive visible points, reduced to the resolution of `most` pixels."""
        runs: list[list[Point]] = [[]]
        for point in series.points:
            if self.shows(point):
                runs[-1].append(point)
            elif runs[-1]:
                runs.append([])
        return tuple(_downsample(run, most) for run in runs if run)


def _downsample(points: list[Point], most: int) -> tuple[Point, ...]:
    """Return the minimum and maximum of the points of each pixel, so that no peak is lost."""
    if len(points) <= 2 * most:
        return tuple(points)
    size = -(-len(points) // most)
    found: list[Point] = []
    for start in range(0, len(points), size):
        part = points[start : start + size]
        low, high = min(part, key=_height), max(part, key=_height)
        if part.index(low) > part.index(high):
            low, high = high, low
        found.append(low)
        if high is not low:
            found.append(high)
    return tuple(found)


def _height(point: Point) -> float:
    return point[1]


@dataclass(frozen=True, kw_only=True)
class Bars:
    """A chart of horizontal stacked bars."""

    title: str
    unit: str
    parts: tuple[str, ...]
    rows: tuple[tuple[str, tuple[float, ...]], ...]
    """Label of each bar and the value of each part."""
    limit: float | None = None
    """Position of a dashed line, such as the memory capacity."""
    clip_at: float | None = None
    """Value at which longer bars are clipped; their label shows the true value."""


class GanttSpan(NamedTuple):
    """An operation in a timeline."""

    row: str
    kind: str
    """Name in the legend."""
    label: str
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Gantt:
    """A timeline in seconds, one row per stream."""

    title: str
    spans: tuple[GanttSpan, ...]
    kinds: tuple[str, ...] = ()
    """Kinds of operations in the order of their colours, if several timelines share them; else those of `spans`."""


@dataclass(frozen=True, kw_only=True)
class Heat:
    """A heat map with the value written in each cell; None is an empty cell."""

    title: str
    unit: str
    row_labels: tuple[str, ...]
    column_labels: tuple[str, ...]
    values: tuple[tuple[float | None, ...], ...]
    marked: tuple[tuple[int, int], ...] = ()
    """Cells (row, column) to highlight."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A text table with a header."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


_MAX_VALUE_TICKS = 12
"""Maximum number of distinct values for which each value gets a tick."""


@dataclass(frozen=True, kw_only=True)
class Axis:
    """An axis of a plot from `low` to `high`, which are finite and different, and positive if it is logarithmic."""

    low: float
    high: float
    log: bool = False
    is_bytes: bool = False
    at: tuple[float, ...] = ()
    """The distinct values, if they are few enough to be used as ticks in place of round numbers."""

    def position(self, value: float) -> float:
        """Return the relative position of a value, from 0 at `low` to 1 at `high`."""
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return (value - low) / (high - low)

    def with_headroom(self) -> Axis:
        """Return the axis with a margin at each end except at 0, so that the outermost points are not on the edge."""
        low, high = self.low, self.high
        if self.log:
            margin = (high / low) ** 0.04
            return Axis(low=low / margin, high=high * margin, log=True)
        margin = (high - low) * 0.05
        if self.low < 0:
            low -= margin
        if self.high > 0:
            high += margin
        return Axis(low=low, high=high)

    def ticks(self, most: int) -> list[tuple[float, str]]:
        """Return the values and labels of about `most` ticks."""
        label = format_bytes if self.is_bytes else format_number
        values = self._value_ticks(most) or self._round_ticks(most)
        return list(zip(values, map(label, values), strict=True))

    def _value_ticks(self, most: int) -> list[float]:
        if len(self.at) > _MAX_VALUE_TICKS:
            return []
        for left, right in pairwise(self.at):
            if self.position(right) - self.position(left) < 0.8 / most:
                return []
        return list(self.at)

    def _round_ticks(self, most: int) -> list[float]:
        if not self.log:
            return _linear_ticks(self.low, self.high, most)
        if self.is_bytes:
            return _powers(self.low, self.high, most, base=2.0)
        tens = _powers(self.low, self.high, most, base=10.0)
        if len(tens) > 2:
            return tens
        return _ones_twos_fives(self.low, self.high) or tens


def axis_over(values: Iterable[float], *, log: bool, is_bytes: bool = False, from_zero: bool = False) -> Axis | None:
    """Return an axis that contains all finite `values`, or None if there are none.

    `from_zero` extends a linear axis to 0, so that heights are comparable.
    """
    shown = sorted({value for value in values if is_shown(value, log=log)})
    if not shown:
        return None
    low, high = shown[0], shown[-1]
    if from_zero and not log:
        low, high = min(low, 0.0), max(high, 0.0)
    if low == high and log:
        low, high = low / 2, low * 2
    elif low == high:
        margin = (abs(low) or 1) / 2
        low, high = low - margin, high + margin
    if len(shown) > _MAX_VALUE_TICKS:
        shown = []
    return Axis(low=low, high=high, log=log, is_bytes=is_bytes, at=tuple(shown))


def is_shown(value: float, *, log: bool) -> bool:
    """Return whether an axis can show this value: it is finite, and positive if the axis is logarithmic."""
    return math.isfinite(value) and (value > 0 or not log)


def _linear_ticks(low: float, high: float, most: int) -> list[float]:
    """Return multiples of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * size for size in (1, 2, 5, 10) if power * size >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [step * index for index in range(first, last + 1)]


def _powers(low: float, high: float, most: int, *, base: float) -> list[float]:
    """Return about `most` evenly spaced powers of `base`."""
    first, last = math.ceil(math.log(low, base) - 1e-9), math.floor(math.log(high, base) + 1e-9)
    step = max(1, math.ceil((last - first + 1) / most))
    return [base**exponent for exponent in range(first, last + 1, step)]


def _ones_twos_fives(low: float, high: float) -> list[float]:
    """Return the values 1, 2 and 5 times a power of ten in a range."""
    found = []
    for decade in range(math.floor(math.log10(low)), math.floor(math.log10(high)) + 1):
        found += [10.0**decade * digit for digit in (1, 2, 5) if low <= 10.0**decade * digit <= high]
    return found


def spread_apart(heights: list[float], top: float, bottom: float, *, least: float) -> list[float]:
    """Return ascending y positions, moved as little as possible, at least `least` apart, from `top` to `bottom`.

    This is isotonic regression by the pool-adjacent-violators algorithm: labels that touch form a block, which is
    placed at the mean of their positions.
    """
    blocks: list[tuple[float, int]] = []  # position of the first label, and number of labels
    for index, height in enumerate(heights):
        blocks.append((height - index * least, 1))
        while len(blocks) > 1 and blocks[-2][0] >= blocks[-1][0]:
            (upper, above), (lower, below) = blocks[-2:]
            blocks[-2:] = [((upper * above + lower * below) / (above + below), above + below)]
    lowest = bottom - (len(heights) - 1) * least
    spread: list[float] = []
    for first, count in blocks:
        for _ in range(count):
            spread.append(max(top, min(first, lowest)) + len(spread) * least)
    return spread


def table_lines(table: Table, *, num_left: int = 1) -> list[str]:
    """Return the lines of a table; the first `num_left` columns are left-aligned, the others right-aligned."""
    aligned = []
    for number, column in enumerate(zip(table.header, *table.rows, strict=True)):
        width = max(map(len, column))
        align = str.ljust if number < num_left else str.rjust
        aligned.append([align(text, width) for text in column])
    return ["  ".join(cells).rstrip() for cells in zip(*aligned, strict=True)]


_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bits of the dots of a braille character by row and column."""


def bounds(rows: Sequence[Row], *, from_zero: bool = False) -> tuple[float, float]:
    """Return the minimum and maximum of a curve; `from_zero` includes zero in the range."""
    values = [0.0] if from_zero else []
    for _, low, high, _ in rows:
        if low is not None and high is not None:
            values += [low, high]
    return min(values, default=0.0), max(values, default=0.0)


def draw_curve(
    rows: Sequence[Row], width: int, height: int, low: float, high: float, *, braille: bool = True, steps: Span = None
) -> list[str]:
    """Return `height` lines of `width` characters that show the values from `low` to `high`.

    Each column is filled from its minimum to its maximum, so that spikes are visible. The columns cover the first to
    the last of `steps`, by default the steps of the curve.
    """
    num_columns, num_rows = width, height
    if braille:
        num_columns, num_rows = 2 * width, 4 * height
    scale = 0.0
    if high > low:
        scale = (num_rows - 1) / (high - low)
    dots = [bytearray(num_columns) for _ in range(num_rows)]  # 1 where a dot is set
    previous: tuple[int, int] | None = None
    for x, column in sorted(_columns(rows, num_columns, steps).items()):
        bottom = num_rows - 1 - round((column[0] - low) * scale)
        top = num_rows - 1 - round((column[1] - low) * scale)
        first, last = top, bottom
        if previous is not None:  # connects the column with the previous one
            first, last = min(top, previous[1]), max(bottom, previous[0])
        for y in range(first, last + 1):
            dots[y][x] = True
        previous = (top, bottom)
    if braille:
        return _braille(dots)
    return [line.translate(_ASCII).decode() for line in dots]


_ASCII = bytes.maketrans(b"\0\1", b" #")


def _columns(rows: Sequence[Row], num_columns: int, steps: Span) -> dict[int, tuple[float, float]]:
    """Return the minimum and maximum in each column of dots; columns between two points are interpolated."""
    columns: dict[int, tuple[float, float]] = {}
    if not rows:
        return columns
    first, last = steps or (rows[0][0], rows[-1][0])
    last = max(last, first + 1)
    for step, low, high, _ in rows:
        if low is None or high is None:
            continue
        x = (step - first) * (num_columns - 1) // (last - first)
        known = columns.get(x, (low, high))
        columns[x] = (min(low, known[0]), max(high, known[1]))
    for left, right in pairwise(sorted(columns)):
        start, end = sum(columns[left]) / 2, sum(columns[right]) / 2
        for x in range(left + 1, right):
            value = start + (end - start) * (x - left) / (right - left)
            columns[x] = (value, value)
    return columns


def _braille(dots: Sequence[Sequence[int]]) -> list[str]:
    lines = [""] * (len(dots) // 4)
    for number in range(len(lines)):
        for left in range(0, len(dots[0]), 2):
            lines[number] += _character(dots, 4 * number, left)
    return lines


def _character(dots: Sequence[Sequence[int]], top: int, left: int) -> str:
    """Return the braille character of four rows and two columns of dots."""
    number = 0
    for y in range(4):
        for x in range(2):
            if dots[top + y][left + x]:
                number += _DOTS[y][x]
    return chr(0x2800 + number) if number else " "
