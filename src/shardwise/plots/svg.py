"""Plots, stacked bars and timelines as SVG: inside a page, or as a file of their own."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, NamedTuple

from shardwise.plots.figures import Axis, Bars, axis_over, is_shown
from shardwise.units import format_bytes, format_number, format_seconds

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardwise.plots.figures import Gantt, GanttSpan, Plot, Series

COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#edc948", "#b07aa1", "#9c755f", "#ff9da7", "#bab0ac")
"""Ten that stay apart on light and dark grounds, and for most forms of colour blindness."""
WIDE = 880
"""Width of a picture on a desk, in CSS pixels."""
NARROW = 340
"""Width on a phone of 390 pixels: a picture drawn for a desk would have letters of half the size there."""
_LETTER = 7.0
"""Width of a letter of 12 pixels, about."""
_LINE = 15.0
"""Height that a line of text needs."""
_NAME = 22
"""Letters of a line's name beside its end."""
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
            self.left + self.x.position(point[0]) * (self.right - self.left),
            self.bottom - self.y.position(point[1]) * (self.bottom - self.top),
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
    left = 14 + _LETTER * max(len(text) for _, text in ticks or [(0, "")])
    bare = _Frame(width, left, width - 14, 30, height - 42, x_axis, y_axis)
    runs = [tuple(_runs(plot, one, most=int(bare.right - left))) for one in plot.series]
    lines = [_Line(*line) for line in zip(plot.series, colours_of(plot.series), runs, strict=True)]
    ends = _ends(bare, lines) if width >= WIDE else {}
    margin = max((_LETTER * len(_shortened(line.series.name, _NAME)) + 2 for line in ends), default=0.0)
    frame = bare._replace(right=bare.right - margin)
    shapes = [*_grid(frame, ticks, plot), *(shape for line in lines for shape in _line(frame, line, plot))]
    return _svg(plot.title, (width, height), [*shapes, *_end_labels(frame, ends)])


def draw_bars(bars: Bars, width: int) -> str:
    """Return the bars as an SVG element of this width, "" when there is nothing to compare."""
    shapes, height = _bars(bars, width)
    return _svg(bars.title, (width, height), shapes) if shapes else ""


def _bars(bars: Bars, width: int) -> tuple[list[str], float]:
    """Return the shapes of all bars, and the height they need; none when there is nothing to compare."""
    sizes = []
    for _, values in bars.rows:
        sizes.append(tuple(max(0.0, value) if is_shown(value, log=False) else 0.0 for value in values))
    longest = max((sum(parts) for parts in sizes), default=0.0)
    if longest <= 0:
        return [], 0.0
    end = max(min(longest, bars.clip_at or longest), bars.limit or 0.0)
    beside = width >= WIDE
    left = min(220.0, 12 + _LETTER * max(len(label) for label, _ in bars.rows)) if beside else 2.0
    row_height = 34 if beside else 48
    total_width = 8 + _LETTER * max(len(format_number(sum(parts))) for parts in sizes)
    scale = (width - left - total_width - 4) / end
    shapes = []
    for row, ((label, _), parts) in enumerate(zip(bars.rows, sizes, strict=True)):
        y = row * row_height + (4 if beside else 20)
        if beside:
            shapes.append(_text((left - 8, y + 16), _shortened(label, int(left / _LETTER)), "end"))
        else:
            shapes.append(_text((0, y - 6), _shortened(label, int(width / _LETTER)), ""))
        shapes += _bar(bars, label, parts, corner=(left, y), scale=scale, end=left + end * scale)
    height = row_height * len(bars.rows) + 4
    if bars.limit is not None:
        x = left + bars.limit * scale
        shapes.append(f'<path class="axis" stroke-dasharray="4 3" d="M{x:.1f} 0V{height:g}"/>')
    return shapes, height


def _bar(bars: Bars, label: str, parts: tuple[float, ...], *, corner: Point, scale: float, end: float) -> list[str]:
    """Return one bar, clipped at `end`, with its total beside it."""
    (x, y), shapes = corner, []
    for part, size, colour in zip(bars.parts, parts, _cycle(len(bars.parts)), strict=True):
        wide = min(size * scale, end - x)
        shapes += _part((x, y), wide, colour, tip=f"{label}, {part}: {format_number(size)} {bars.unit}", size=size)
        x += max(0.0, wide)
    return [*shapes, _text((x + 6, y + 16), format_number(sum(parts)), "total")]


def _part(corner: Point, wide: float, colour: str, *, tip: str, size: float) -> list[str]:
    if wide < 0.3:
        return []
    (x, y), text = corner, format_number(size)
    shapes = [_rect(corner, (wide, 24), colour, tip)]
    if wide > _LETTER * len(text) + 8:
        shapes.append(_text((x + wide / 2, y + 16), text, f"middle {ink_on(colour)}"))
    return shapes


def ink_on(colour: str) -> str:
    """Return the class of text that stand out on this colour: "on-dark" or "on-light"."""
    red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return "on-light" if 0.299 * red + 0.587 * green + 0.114 * blue > 150 else "on-dark"


def _cycle(count: int) -> list[str]:
    return [COLOURS[place % len(COLOURS)] for place in range(count)]


def _shown(plot: Plot, point: Point) -> bool:
    return is_shown(point[0], log=plot.log_x) and is_shown(point[1], log=plot.log_y)


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
    for value, text in ticks:
        _, y = frame.at((frame.x.low, value))
        shapes.append(f'<path class="grid" d="M{frame.left:.1f} {y:.1f}H{frame.right:.1f}"/>')
        shapes.append(_text((frame.left - 7, y + 4), text, "end soft"))
    num_ticks = max(2, int((frame.right - frame.left) / 72))
    for value, text in frame.x.ticks(num_ticks):
        x, _ = frame.at((value, frame.y.low))
        half = _LETTER * len(text) / 2
        shapes.append(f'<path class="grid" d="M{x:.1f} {frame.bottom:.1f}v5"/>')
        shapes.append(_text((min(max(x, half), frame.width - half), frame.bottom + 19), text, "middle soft"))
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
        shapes.append(_text((frame.right + 12, height + 4), _shortened(line.series.name, _NAME), ""))
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


def _shortened(text: str, letters: int) -> str:
    return text if len(text) <= letters else text[: max(1, letters - 1)] + "…"


def _text(place: Point, text: str, kind: str) -> str:
    return f'<text x="{place[0]:.1f}" y="{place[1]:.1f}" class="{kind}">{escape(text)}</text>'


def _svg(title: str, size: tuple[int, float], shapes: list[str]) -> str:
    kind = "wide" if size[0] >= WIDE else "narrow"
    head = f'<svg class="{kind}" viewBox="0 0 {size[0]} {size[1]:g}" role="img" aria-label="{escape(title)}">'
    return "\n".join([head, *shapes, "</svg>"])


def _rect(corner: Point, size: tuple[float, float], colour: str, tip: str, kind: str = "part") -> str:
    return (
        f'<rect x="{corner[0]:.1f}" y="{corner[1]:.1f}" width="{size[0]:.1f}" height="{size[1]:g}" fill="{colour}"'
        f' class="{kind}"><title>{escape(tip)}</title></rect>'
    )


# Figures below each other as a file of their own, with legends and style inside.


SHEET = 960
"""Width of a file of its own."""
_MARGIN = 20
_ROW = 26
"""Height of a row of a timeline."""


def draw_sheet(title: str, figures: Sequence[Bars | Gantt]) -> str:
    """Return the figures as one SVG document, which reads on light and dark grounds."""
    shapes, y = [_text((_MARGIN, 30), title, "head")], 62.0
    for figure in figures:
        inner, height = _with_legend(figure, SHEET - 2 * _MARGIN)
        shapes += [f'<g transform="translate({_MARGIN} {y:g})">', *inner, "</g>"]
        y += height + 30
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {SHEET} {y:g}" width="{SHEET}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>svg{{{LIGHT};font-family:system-ui,sans-serif}}",
        f"@media(prefers-color-scheme:dark){{svg{{{DARK}}}}}{SHAPES}",
        ".ground{fill:var(--card)}svg text.head{font-size:16px;font-weight:600}</style>",
        f'<rect class="ground" width="{SHEET}" height="{y:g}"/>',
    ]
    return "\n".join([*head, *shapes, "</svg>", ""])


def _with_legend(figure: Bars | Gantt, width: int) -> tuple[list[str], float]:
    """Return a figure below its title and its legend, and the height of all three."""
    if isinstance(figure, Bars):
        names = figure.parts
        shapes, height = _bars(figure, width)
    else:
        names = tuple(dict.fromkeys(span.kind for span in figure.spans))
        shapes, height = _timeline(figure, dict(zip(names, _cycle(len(names)), strict=True)), width)
    legend, top = _legend(names, width)
    title = _text((0, 0), figure.title, "total")
    return [title, *legend, f'<g transform="translate(0 {top:g})">', *shapes, "</g>"], top + height


def _legend(names: Sequence[str], width: float) -> tuple[list[str], float]:
    """Return names beside their colours, and where they end."""
    shapes, x, y = list[str](), 0.0, 12.0
    for name, colour in zip(names, _cycle(len(names)), strict=True):
        wide = 30 + _LETTER * len(name)
        if x + wide > width:
            x, y = 0.0, y + 20
        shapes += [_rect((x, y), (12, 12), colour, name), _text((x + 17, y + 10), name, "soft")]
        x += wide
    return shapes, y + 26


def _timeline(timeline: Gantt, colours: Mapping[str, str], width: float) -> tuple[list[str], float]:
    """Return one row per stream, and the height of all; neighbours too thin to see are drawn as one."""
    rows = list(dict.fromkeys(span.row for span in timeline.spans))
    end = max(span.end for span in timeline.spans)
    left = 12 + _LETTER * max(len(row) for row in rows)
    scale = (width - left) / end
    shapes = [_text((left - 8, number * _ROW + 15), row, "end") for number, row in enumerate(rows)]
    for span in _joined(timeline.spans, least=1 / scale):
        corner = (left + span.start * scale, rows.index(span.row) * _ROW)
        wide = max(0.4, (span.end - span.start) * scale - 0.3)
        tip = f"{span.label}, {format_seconds(span.end - span.start)}"
        shapes.append(_rect(corner, (wide, _ROW - 6), colours[span.kind], tip, kind="work"))  # a border would hide it
    return shapes, len(rows) * _ROW


def _joined(spans: Sequence[GanttSpan], least: float) -> list[GanttSpan]:
    """Join neighbours of one kind that are shorter than `least`, as are the gaps between them."""
    joined: list[GanttSpan] = []
    for span in sorted(spans, key=lambda span: (span.row, span.start)):
        last = joined[-1] if joined else None
        is_thin = span.end - span.start < least
        if last and is_thin and (last.row, last.kind) == (span.row, span.kind) and span.start - last.end < least:
            joined[-1] = last._replace(end=span.end)
        else:
            joined.append(span)
    return joined


# Colours and style, shared by pages and files.


LIGHT = "--ground:#f6f7f9;--card:#fff;--ink:#1c2024;--soft:#5f6772;--rule:#e3e6ea"
DARK = "--ground:#111318;--card:#191c22;--ink:#e8eaed;--soft:#9aa3af;--rule:#2c313a"
SHAPES = """
svg text{font-size:12px;fill:var(--ink);font-variant-numeric:tabular-nums}
svg text.soft{fill:var(--soft)}
svg text.end{text-anchor:end}
svg text.middle{text-anchor:middle}
svg text.total{font-weight:600}
svg text.on-dark{fill:#fff}
svg text.on-light{fill:#1c2024}
.grid{stroke:var(--rule);fill:none}
.axis{stroke:var(--soft);fill:none}
.line{fill:none;stroke-width:2;stroke-linejoin:round;stroke-linecap:round}
.lead{fill:none;stroke-width:1;opacity:.6}
.mark{stroke:var(--card);stroke-width:1.2}
.part{stroke:var(--card)}
"""
