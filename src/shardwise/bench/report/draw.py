"""Plots, axes and stacked bars as SVG inside a page."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from shardwise.planner.search.report import COLOURS
from shardwise.units import format_bytes, format_number

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from shardwise.bench.report.findings import Bars, Plot, Series


WIDE = 880
"""Width of a picture on a desk, in CSS pixels."""
NARROW = 340
"""Width on a phone of 390 pixels: a picture drawn for a desk would have letters of half the size there."""
_LETTER = 7.0
"""Width of a letter of 12 pixels, about."""
_LINE = 15.0
"""Height that a line of words needs."""
_MARKS = 40
"""A line of more points is drawn without a mark on each."""

Point = tuple[float, float]


class _Frame(NamedTuple):
    """The part of a picture where the data lie."""

    width: float
    """Of the whole picture."""
    left: float
    right: float
    top: float
    bottom: float
    x: Axis
    y: Axis

    def at(self, point: Point) -> Point:
        return (
            self.left + self.x.place(point[0]) * (self.right - self.left),
            self.bottom - self.y.place(point[1]) * (self.bottom - self.top),
        )


@dataclass(frozen=True)
class _Line:
    """One series as it is drawn: runs of points between those that have no place."""

    series: Series
    colour: str
    runs: tuple[tuple[Point, ...], ...]


def colours_of(series: Sequence[Series]) -> tuple[str, ...]:
    """Return a colour for each line; a dashed one has that of the line whose name its own begins with."""
    taken: dict[str, str] = {}
    colours = []
    for one in series:
        kin = max((name for name in taken if one.dashed and one.name.startswith(name)), key=len, default=None)
        colours.append(taken[kin] if kin is not None else COLOURS[len(taken) % len(COLOURS)])
        if kin is None:
            taken[one.name] = colours[-1]
    return tuple(colours)


def draw_plot(plot: Plot, width: int) -> str:
    """Return the plot as an SVG element of this width, "" when no point of it can be shown."""
    points = [point for one in plot.series for point in one.points]
    points = [point for point in points if _shown(plot, point)]
    x_axis = axis_over((x for x, _ in points), log=plot.log_x, is_bytes=plot.x_is_bytes)
    y_axis = axis_over((y for _, y in points), log=plot.log_y, from_zero=True)
    if x_axis is None or y_axis is None:
        return ""
    y_axis = _with_headroom(y_axis)
    height = 380 if width >= WIDE else 280
    ticks = y_axis.ticks(6)
    left = 14 + _LETTER * max(len(words) for _, words in ticks or [(0, "")])
    bare = _Frame(width, left, width - 14, 30, height - 42, x_axis, y_axis)
    runs = [tuple(_runs(plot, one, most=int(bare.right - left))) for one in plot.series]
    lines = [_Line(*line) for line in zip(plot.series, colours_of(plot.series), runs, strict=True)]
    ends = _ends(bare, lines) if width >= WIDE else {}
    room = max((_LETTER * len(_short(line.series.name)) + 2 for line in ends), default=0.0)
    frame = bare._replace(right=bare.right - room)
    shapes = [*_grid(frame, ticks, plot), *(shape for line in lines for shape in _line(frame, line, plot))]
    return _svg(plot.title, (width, height), [*shapes, *_end_labels(frame, ends)])


def draw_bars(bars: Bars, width: int) -> str:
    """Return the bars as an SVG element of this width, "" when there is nothing to compare."""
    sizes = [
        tuple(max(0.0, value) if has_place(value, log=False) else 0.0 for value in parts) for _, parts in bars.rows
    ]
    most = max((sum(parts) for parts in sizes), default=0.0)
    if most <= 0:
        return ""
    beside = width >= WIDE
    left = min(220.0, 12 + _LETTER * max(len(label) for label, _ in bars.rows)) if beside else 2.0
    row_height = 34 if beside else 48
    total_width = 8 + _LETTER * max(len(format_number(sum(parts))) for parts in sizes)
    scale = (width - left - total_width - 4) / most
    shapes = []
    for row, ((label, _), parts) in enumerate(zip(bars.rows, sizes, strict=True)):
        y = row * row_height + (4 if beside else 20)
        words = _cut(label, int(left / _LETTER) if beside else int(width / _LETTER))
        shapes.append(
            _text((0 if not beside else left - 8, y + (16 if beside else -6)), words, "end" if beside else "")
        )
        x = left
        for part, size, colour in zip(bars.parts, parts, _cycle(len(bars.parts)), strict=True):
            shapes += _part(
                (x, y), size * scale, colour, tip=f"{label}, {part}: {format_number(size)} {bars.unit}", size=size
            )
            x += size * scale
        shapes.append(_text((x + 6, y + 16), format_number(sum(parts)), "total"))
    return _svg(bars.title, (width, row_height * len(bars.rows) + 4), shapes)


def _part(corner: Point, wide: float, colour: str, *, tip: str, size: float) -> list[str]:
    if wide < 0.3:
        return []
    (x, y), words = corner, format_number(size)
    rect = (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="24" fill="{colour}" class="part">'
        f"<title>{escape(tip)}</title></rect>"
    )
    roomy = wide > _LETTER * len(words) + 8
    return [rect, *([_text((x + wide / 2, y + 16), words, f"middle {ink_on(colour)}")] if roomy else [])]


def ink_on(colour: str) -> str:
    """Return the class of words that stand out on this colour: "on-dark" or "on-light"."""
    red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return "on-light" if 0.299 * red + 0.587 * green + 0.114 * blue > 150 else "on-dark"


def _cycle(count: int) -> list[str]:
    return [COLOURS[place % len(COLOURS)] for place in range(count)]


def _shown(plot: Plot, point: Point) -> bool:
    return has_place(point[0], log=plot.log_x) and has_place(point[1], log=plot.log_y)


def _with_headroom(axis: Axis) -> Axis:
    """Return the axis with a little air, so that the outermost points are not on the edge."""
    if axis.log:
        air = (axis.high / axis.low) ** 0.04
        return Axis(low=axis.low / air, high=axis.high * air, log=True)
    air = (axis.high - axis.low) * 0.05
    return Axis(low=axis.low - air if axis.low < 0 else axis.low, high=axis.high + air if axis.high > 0 else axis.high)


def _runs(plot: Plot, series: Series, most: int) -> list[tuple[Point, ...]]:
    """Return the points in runs without a gap, thinned to what `most` pixels can show."""
    runs: list[list[Point]] = [[]]
    for point in series.points:
        if _shown(plot, point):
            runs[-1].append(point)
        elif runs[-1]:
            runs.append([])
    return [_thinned(run, most) for run in runs if run]


def _thinned(points: list[Point], most: int) -> tuple[Point, ...]:
    """Return the lowest and highest of each pixel's points, so that no peak is lost."""
    if len(points) <= 2 * most:
        return tuple(points)
    size = -(-len(points) // most)
    kept: list[Point] = []
    for start in range(0, len(points), size):
        places = range(start, min(start + size, len(points)))
        ends = {min(places, key=lambda place: points[place][1]), max(places, key=lambda place: points[place][1])}
        kept += [points[place] for place in sorted(ends)]
    return tuple(kept)


def _grid(frame: _Frame, ticks: list[tuple[float, str]], plot: Plot) -> list[str]:
    shapes = [_text((2, 14), plot.y_label, "soft")]
    for value, words in ticks:
        _, y = frame.at((frame.x.low, value))
        shapes.append(f'<path class="grid" d="M{frame.left:.1f} {y:.1f}H{frame.right:.1f}"/>')
        shapes.append(_text((frame.left - 7, y + 4), words, "end soft"))
    room = max(2, int((frame.right - frame.left) / 72))
    for value, words in frame.x.ticks(room):
        x, _ = frame.at((value, frame.y.low))
        half = _LETTER * len(words) / 2
        shapes.append(f'<path class="grid" d="M{x:.1f} {frame.bottom:.1f}v5"/>')
        shapes.append(_text((min(max(x, half), frame.width - half), frame.bottom + 19), words, "middle soft"))
    shapes.append(f'<path class="axis" d="M{frame.left:.1f} {frame.bottom:.1f}H{frame.right:.1f}"/>')
    shapes.append(_text(((frame.left + frame.right) / 2, frame.bottom + 37), plot.x_label, "middle soft"))
    return shapes


def _line(frame: _Frame, line: _Line, plot: Plot) -> list[str]:
    paths = []
    for run in line.runs:
        places = [frame.at(point) for point in run]
        paths.append("M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places))
    dash = ' stroke-dasharray="5 4"' if line.series.dashed else ""
    shapes = [f'<path class="line" stroke="{line.colour}"{dash} d="{"".join(paths)}"/>'] if paths else []
    marked = sum(len(run) for run in line.runs) <= _MARKS and not line.series.dashed
    for run in line.runs:
        for point in run if marked or len(run) == 1 else ():
            x, y = frame.at(point)
            where = format_bytes(point[0]) if plot.x_is_bytes else format_number(point[0])
            tip = f"{line.series.name}: {where}, {format_number(point[1])} {plot.y_label}"
            shapes.append(
                f'<circle class="mark" cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{line.colour}">'
                f"<title>{escape(tip)}</title></circle>"
            )
    return shapes


def _ends(frame: _Frame, lines: list[_Line]) -> dict[_Line, float]:
    """Return at which height to write each line's name; nothing for a line alone, and where they end too close."""
    ends = sorted((frame.at(line.runs[-1][-1])[1], place) for place, line in enumerate(lines) if line.runs)
    heights = _apart([height for height, _ in ends], frame.top, frame.bottom + 6)
    moved = max((abs(new - old) for new, (old, _) in zip(heights, ends, strict=True)), default=0.0)
    if len(ends) < 2 or moved > 2 * _LINE:
        return {}
    return {lines[place]: height for (_, place), height in zip(ends, heights, strict=True)}


def _end_labels(frame: _Frame, ends: dict[_Line, float]) -> list[str]:
    """Return the name of each line beside its last point, and a thin line to it where it had to move."""
    shapes = []
    for line, height in ends.items():
        x, y = frame.at(line.runs[-1][-1])
        far = ' stroke-dasharray="1 5"' if frame.right - x > 20 else ""  # else it looks like more of the line
        way = f"M{x + 4:.1f} {y:.1f}L{frame.right + 9:.1f} {height:.1f}"
        shapes.append(f'<path class="lead" stroke="{line.colour}"{far} d="{way}"/>')
        shapes.append(_text((frame.right + 12, height + 4), _short(line.series.name), ""))
    return shapes


def _apart(heights: list[float], top: float, bottom: float) -> list[float]:
    """Return ascending heights moved as little as keeps each a line from the next, and all in the picture."""
    blocks: list[tuple[float, int]] = []  # of labels that touch: the height of the first, and how many
    for place, height in enumerate(heights):
        blocks.append((height - place * _LINE, 1))
        while len(blocks) > 1 and blocks[-2][0] >= blocks[-1][0]:
            (upper, above), (lower, below) = blocks[-2:]
            blocks[-2:] = [((upper * above + lower * below) / (above + below), above + below)]
    lowest = bottom - (len(heights) - 1) * _LINE
    firsts = [max(top, min(first, lowest)) for first, count in blocks for _ in range(count)]
    return [first + place * _LINE for place, first in enumerate(firsts)]


def _short(name: str) -> str:
    return _cut(name, 22)


def _cut(words: str, letters: int) -> str:
    return words if len(words) <= letters else words[: max(1, letters - 1)] + "…"


def _text(place: Point, words: str, kind: str) -> str:
    return f'<text x="{place[0]:.1f}" y="{place[1]:.1f}" class="{kind}">{escape(words)}</text>'


def _svg(title: str, size: tuple[int, float], shapes: list[str]) -> str:
    kind = "wide" if size[0] >= WIDE else "narrow"
    head = f'<svg class="{kind}" viewBox="0 0 {size[0]} {size[1]:g}" role="img" aria-label="{escape(title)}">'
    return "\n".join([head, *shapes, "</svg>"])


# Axes of a plot: where a value lies between its ends, and which values are written beside it.


_CROWD = 12
"""As many distinct places get a tick each, when they lie far enough apart."""


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One direction of a plot, from `low` to `high`, both finite and apart; above 0 where it is logarithmic."""

    low: float
    high: float
    log: bool = False
    is_bytes: bool = False
    at: tuple[float, ...] = ()
    """The only places that have data, where they are few: better ticks than round numbers."""

    def place(self, value: float) -> float:
        """Return where `value` lies, 0 at the low end and 1 at the high one."""
        low, high, value = (math.log(x) if self.log else x for x in (self.low, self.high, value))
        return (value - low) / (high - low)

    def ticks(self, most: int) -> list[tuple[float, str]]:
        """Return up to about `most` values to write, with their words."""
        values = self._places(most) or self._round(most)
        return [(value, format_bytes(value) if self.is_bytes else format_number(value)) for value in values]

    def _places(self, most: int) -> list[float]:
        places = [self.place(value) for value in self.at]
        near = any(b - a < 0.8 / most for a, b in pairwise(places))
        return [] if near or len(places) > _CROWD else list(self.at)

    def _round(self, most: int) -> list[float]:
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
    shown = sorted({value for value in values if has_place(value, log=log)})
    if not shown:
        return None
    low, high = shown[0], shown[-1]
    if from_zero and not log:
        low, high = min(low, 0.0), max(high, 0.0)
    if low == high:
        low, high = (low / 2, low * 2) if log else (low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2)
    return Axis(low=low, high=high, log=log, is_bytes=is_bytes, at=tuple(shown) if len(shown) <= _CROWD else ())


def has_place(value: float, *, log: bool) -> bool:
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
