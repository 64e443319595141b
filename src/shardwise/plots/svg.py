"""SVG rendering of line plots, stacked bars and timelines, inside an HTML page or as a standalone file."""

from __future__ import annotations

import itertools
import operator
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, NamedTuple

from shardwise.plots.figures import Axis, Bars, Point, axis_over, is_shown, spread_apart
from shardwise.units import format_bytes, format_number, format_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.plots.figures import Gantt, GanttSpan, Plot, Series

COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#edc948", "#b07aa1", "#9c755f", "#ff9da7", "#bab0ac")
"""Ten colours that are distinguishable on light and dark backgrounds and with most forms of colour blindness."""
WIDE = 880
"""Width of a figure on a desktop screen, in CSS pixels."""
NARROW = 340
"""Width of a figure on a phone with 390 CSS pixels, on which a scaled-down wide figure would be illegible."""
_LETTER = 7.0
"""Approximate width of a character at a font size of 12 pixels."""
_LINE = 15.0
"""Height of a line of text in pixels."""
_NAME = 22
"""Maximum number of characters of the label at the end of a line."""
_MARKS = 40
"""Maximum number of points of a line with a mark at each point."""


class _Frame(NamedTuple):
    """The plot area of a figure, in pixels, and its axes."""

    width: float
    """Width of the whole figure."""
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
    """A series with its colour, split into runs of consecutive visible points."""

    series: Series
    colour: str
    runs: tuple[tuple[Point, ...], ...]

    @property
    def end(self) -> Point:
        """The last point."""
        return self.runs[-1][-1]


def colours_of(series: Sequence[Series]) -> tuple[str, ...]:
    """Return a colour for each line; a dashed line has the colour of the line whose name is a prefix of its name."""
    solid: dict[str, str] = {}
    colours = []
    for one in series:
        names = [name for name in solid if one.dashed and one.name.startswith(name)]
        if names:
            colour = solid[max(names, key=len)]
        else:
            colour = solid[one.name] = COLOURS[len(solid) % len(COLOURS)]
        colours.append(colour)
    return tuple(colours)


def draw_plot(plot: Plot, width: int) -> str:
    """Return the plot as an SVG element of this width, or "" if it has no visible point."""
    x_values, y_values = [], []
    for one in plot.series:
        for point in one.points:
            if plot.shows(point):
                x_values.append(point[0])
                y_values.append(point[1])
    x_axis = axis_over(x_values, log=plot.log_x, is_bytes=plot.x_is_bytes)
    y_axis = axis_over(y_values, log=plot.log_y, from_zero=True)
    if x_axis is None or y_axis is None:
        return ""
    y_axis = y_axis.with_headroom()
    is_wide = width >= WIDE
    height = 380 if is_wide else 280
    ticks = y_axis.ticks(6)
    left = 14 + _LETTER * max((len(text) for _, text in ticks), default=0)
    frame = _Frame(width, left, width - 14, 30, height - 42, x_axis, y_axis)
    lines = []
    for one, colour in zip(plot.series, colours_of(plot.series), strict=True):
        lines.append(_Line(one, colour, plot.visible_runs(one, most=int(frame.right - left))))
    label_heights: dict[_Line, float] = {}
    if is_wide:
        label_heights = _label_heights(frame, lines)
        if label_heights:
            frame = frame._replace(right=frame.right - _LETTER * max(map(len, map(_label, label_heights))) - 2)
    shapes = _grid(frame, ticks, plot)
    for line in lines:
        shapes += _line(frame, line, plot)
    return _svg(plot.title, (width, height), [*shapes, *_end_labels(frame, label_heights)])


def draw_bars(bars: Bars, width: int) -> str:
    """Return the bars as an SVG element of this width, or "" if no value is positive."""
    shapes, height = _bars(bars, width)
    return _svg(bars.title, (width, height), shapes) if shapes else ""


def _bars(bars: Bars, width: int) -> tuple[list[str], float]:
    """Return the shapes of all bars and their total height; no shapes if no value is positive."""
    sizes = [tuple(map(_bar_size, values)) for _, values in bars.rows]
    totals = list(map(sum, sizes))
    longest = max(totals, default=0.0)
    if longest <= 0:
        return [], 0.0
    end = max(min(longest, bars.clip_at or longest), bars.limit or 0.0)
    is_wide = width >= WIDE  # labels are beside the bars, otherwise above them
    left, row_height, top = 2.0, 48, 20
    if is_wide:
        left = min(220.0, 12 + _LETTER * max(len(label) for label, _ in bars.rows))
        row_height, top = 34, 4
    total_width = 8 + _LETTER * max(map(len, map(format_number, totals)))
    scale = (width - left - total_width - 4) / end
    shapes = []
    for row, ((label, _), parts) in enumerate(zip(bars.rows, sizes, strict=True)):
        y = row * row_height + top
        if is_wide:
            shapes.append(_text((left - 8, y + 16), _shortened(label, int(left / _LETTER)), "end"))
        else:
            shapes.append(_text((0, y - 6), _shortened(label, int(width / _LETTER)), ""))
        shapes += _bar(bars, label, parts, corner=(left, y), scale=scale, end=left + end * scale)
    height = row_height * len(bars.rows) + 4
    if bars.limit is not None:
        x = left + bars.limit * scale
        shapes.append(f'<path class="axis" stroke-dasharray="4 3" d="M{x:.1f} 0V{height:g}"/>')
    return shapes, height


def _bar_size(value: float) -> float:
    return max(0.0, value) if is_shown(value, log=False) else 0.0


def _bar(bars: Bars, label: str, parts: tuple[float, ...], *, corner: Point, scale: float, end: float) -> list[str]:
    """Return the shapes of one bar, clipped at `end`, and the label of its total."""
    (x, y), shapes = corner, []
    for part, size, colour in zip(bars.parts, parts, _cycle(len(bars.parts)), strict=True):
        width = min(size * scale, end - x)
        shapes += _part((x, y), width, colour, tip=f"{label}, {part}: {format_number(size)} {bars.unit}", size=size)
        x += max(0.0, width)
    return [*shapes, _text((x + 6, y + 16), format_number(sum(parts)), "total")]


def _part(corner: Point, width: float, colour: str, *, tip: str, size: float) -> list[str]:
    if width < 0.3:
        return []
    (x, y), text = corner, format_number(size)
    shapes = [_rect(corner, (width, 24), colour, tip)]
    if width > _LETTER * len(text) + 8:
        shapes.append(_text((x + width / 2, y + 16), text, f"middle {ink_on(colour)}"))
    return shapes


def ink_on(colour: str) -> str:
    """Return the CSS class of text on a background of this colour: "on-dark" or "on-light"."""
    red, green, blue = bytes.fromhex(colour.removeprefix("#"))
    return "on-light" if 0.299 * red + 0.587 * green + 0.114 * blue > 150 else "on-dark"


def _cycle(count: int) -> list[str]:
    """Return `count` colours, repeating them if necessary."""
    return list(itertools.islice(itertools.cycle(COLOURS), count))


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
    path, num_points = "", 0
    for run in line.runs:
        path += "M" + "L".join("{:.1f} {:.1f}".format(*frame.at(point)) for point in run)
        num_points += len(run)
    shapes = []
    if path:
        dash = ' stroke-dasharray="5 4"' if line.series.dashed else ""
        shapes.append(f'<path class="line" stroke="{line.colour}"{dash} d="{path}"/>')
    is_marked = num_points <= _MARKS and not line.series.dashed
    x_text = format_bytes if plot.x_is_bytes else format_number
    for run in line.runs:
        if not is_marked and len(run) > 1:
            continue
        for point in run:
            x, y = frame.at(point)
            tip = f"{line.series.name}: {x_text(point[0])}, {format_number(point[1])} {plot.y_label}"
            shapes.append(
                f'<circle class="mark" cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{line.colour}">'
                f"<title>{escape(tip)}</title></circle>"
            )
    return shapes


def _label_heights(frame: _Frame, lines: list[_Line]) -> dict[_Line, float]:
    """Return the y position of the label of each line; empty if there is one line or the line ends are too close."""
    visible = sorted((line for line in lines if line.runs), key=lambda line: frame.at(line.end)[1])
    ends = [frame.at(line.end)[1] for line in visible]
    heights = spread_apart(ends, frame.top, frame.bottom + 6, least=_LINE)
    if len(ends) < 2 or max(map(abs, map(operator.sub, heights, ends))) > 2 * _LINE:
        return {}
    return dict(zip(visible, heights, strict=True))


def _end_labels(frame: _Frame, label_heights: dict[_Line, float]) -> list[str]:
    """Return the label of each line next to its last point, with a thin leader line."""
    shapes = []
    for line, height in label_heights.items():
        x, y = frame.at(line.end)
        dash = ' stroke-dasharray="1 5"' if frame.right - x > 20 else ""  # a long solid leader looks like data
        leader = f"M{x + 4:.1f} {y:.1f}L{frame.right + 9:.1f} {height:.1f}"
        shapes.append(f'<path class="lead" stroke="{line.colour}"{dash} d="{leader}"/>')
        shapes.append(_text((frame.right + 12, height + 4), _label(line), ""))
    return shapes


def _label(line: _Line) -> str:
    return _shortened(line.series.name, _NAME)


def _shortened(text: str, letters: int) -> str:
    return text if len(text) <= letters else text[: max(1, letters - 1)] + "…"


def _text(position: Point, text: str, kind: str) -> str:
    return f'<text x="{position[0]:.1f}" y="{position[1]:.1f}" class="{kind}">{escape(text)}</text>'


def _svg(title: str, size: tuple[int, float], shapes: list[str]) -> str:
    kind = "wide" if size[0] >= WIDE else "narrow"
    head = f'<svg class="{kind}" viewBox="0 0 {size[0]} {size[1]:g}" role="img" aria-label="{escape(title)}">'
    return "\n".join([head, *shapes, "</svg>"])


def _rect(corner: Point, size: tuple[float, float], colour: str, tip: str, kind: str = "part") -> str:
    return (
        f'<rect x="{corner[0]:.1f}" y="{corner[1]:.1f}" width="{size[0]:.1f}" height="{size[1]:g}" fill="{colour}"'
        f' class="{kind}"><title>{escape(tip)}</title></rect>'
    )


SHEET = 960
"""Width of a standalone SVG file."""
_MARGIN = 20
_ROW = 26
"""Height of a row of a timeline."""


def draw_sheet(title: str, figures: Sequence[Bars | Gantt]) -> str:
    """Return the figures with legends and styles as one SVG document for light and dark backgrounds."""
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
    """Return the shapes of a figure with its title and legend, and their total height."""
    if isinstance(figure, Bars):
        names = figure.parts
        shapes, height = _bars(figure, width)
    else:
        names = tuple(kind_colours(figure))
        shapes, height = _timeline(figure, width)
    legend, top = _legend(names, width)
    title = _text((0, 0), figure.title, "total")
    return [title, *legend, f'<g transform="translate(0 {top:g})">', *shapes, "</g>"], top + height


def _legend(names: Sequence[str], width: float) -> tuple[list[str], float]:
    """Return the shapes of a legend and its height."""
    shapes, x, y = list[str](), 0.0, 12.0
    for name, colour in zip(names, _cycle(len(names)), strict=True):
        entry_width = 30 + _LETTER * len(name)
        if x + entry_width > width:
            x, y = 0.0, y + 20
        shapes += [_rect((x, y), (12, 12), colour, name), _text((x + 17, y + 10), name, "soft")]
        x += entry_width
    return shapes, y + 26


def kind_colours(timeline: Gantt) -> dict[str, str]:
    """Return the colour of each kind of operation in a timeline; kinds that do not occur have none."""
    found = dict.fromkeys(span.kind for span in timeline.spans)
    kinds = timeline.kinds or tuple(found)
    return {kind: colour for kind, colour in zip(kinds, _cycle(len(kinds)), strict=True) if kind in found}


def draw_timeline(timeline: Gantt, width: int) -> str:
    """Return a timeline as an SVG element of this width, or "" if it is empty."""
    if not timeline.spans:
        return ""
    shapes, height = _timeline(timeline, width)
    return _svg(timeline.title, (width, height), shapes)


def _timeline(timeline: Gantt, width: float) -> tuple[list[str], float]:
    """Return the shapes of a timeline with one row per stream, and its height; very short spans are merged."""
    colours = kind_colours(timeline)
    rows = list(dict.fromkeys(span.row for span in timeline.spans))
    end = max(span.end for span in timeline.spans)
    left = 12 + _LETTER * max(map(len, rows))
    scale = (width - left) / end
    shapes = []
    for number, row in enumerate(rows):
        shapes.append(_text((left - 8, number * _ROW + 15), row, "end"))
    for span in _merge_short_spans(timeline.spans, least=1 / scale):
        corner = (left + span.start * scale, rows.index(span.row) * _ROW)
        span_width = max(0.4, (span.end - span.start) * scale - 0.3)
        tip = f"{span.label}, {format_seconds(span.end - span.start)}"
        # Of class "work", because the border of "part" would hide a thin span.
        shapes.append(_rect(corner, (span_width, _ROW - 6), colours[span.kind], tip, kind="work"))
    return shapes, len(rows) * _ROW


def _merge_short_spans(spans: Sequence[GanttSpan], least: float) -> list[GanttSpan]:
    """Merge a span with the previous one of its row and kind if the span and the gap are both shorter than `least`."""
    merged: list[GanttSpan] = []
    for span in sorted(spans, key=lambda span: (span.row, span.start)):
        if merged and span.end - span.start < least:
            last = merged[-1]
            if (last.row, last.kind) == (span.row, span.kind) and span.start - last.end < least:
                merged[-1] = last._replace(end=span.end)
                continue
        merged.append(span)
    return merged


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
