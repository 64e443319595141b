"""A report as one self-contained HTML page: inline style and SVG, no script, light and dark, desktop and phone."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from html import escape
from itertools import chain, groupby

from shardwise.plots.figures import Bars, Gantt, Heat, Plot, Table
from shardwise.plots.svg import (
    COLOURS,
    DARK,
    LIGHT,
    NARROW,
    SHAPES,
    WIDE,
    colours_of,
    draw_bars,
    draw_plot,
    draw_timeline,
    kind_colours,
)
from shardwise.units import format_number

Part = Plot | Bars | Gantt | Heat | Table


@dataclass(frozen=True, kw_only=True)
class Section:
    """A section of a report: its text, then plots and tables."""

    title: str
    text: str = ""
    parts: tuple[Part, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Findings:
    """The content of a report."""

    title: str
    verdict: str
    """The summary in one sentence."""
    facts: tuple[tuple[str, str], ...]
    """(name, value), for example of the machine and the software."""
    facts_title: str = "Machine"
    method: tuple[str, ...]
    """Sentences about the method of measurement."""
    sections: tuple[Section, ...] = ()


_NUMBER = re.compile(r"[-+±<>~≈]?\s?\d[\d,.]*(e[-+]?\d+)?\s?\S{0,8}")
_MAX_FULL_SIZE_FIGURES = 3
"""Maximum number of successive plots that are all drawn large."""
_LEAST_SPREAD = 0.2
"""Minimum range of the colour scale as a share of the largest value, so that noise does not span all colours."""


def html_of(findings: Findings) -> str:
    """Return the report as a complete HTML page."""
    parts = [
        f"<header><h1>{escape(findings.title)}</h1>",
        f'<p class="verdict">{_prose(findings.verdict)}</p></header>',
        *(_section(section) for section in findings.sections),
        '<footer class="two">',
        _facts(findings) if findings.facts else "",
        _method(findings.method) if findings.method else "",
        "</footer>",
    ]
    head = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<link rel="icon" href="data:,">\n'
        f"<title>{escape(findings.title)}</title>\n<style>{STYLE}</style>\n</head>\n"
    )
    return head + "<body>\n<main>\n" + "\n".join(part for part in parts if part) + "\n</main>\n</body>\n</html>\n"


def _section(section: Section) -> str:
    text = "".join(f"<p>{_prose(line)}</p>" for line in section.text.splitlines() if line.strip())
    parts = "".join(_run(list(run)) for _, run in groupby(section.parts, key=type))
    return f"<section><h2>{escape(section.title)}</h2>{text}{parts}</section>"


def _run(parts: list[Part]) -> str:
    """Return successive parts of one kind; of many plots only the first is large."""
    large = parts[:1] if isinstance(parts[0], Plot) and len(parts) > _MAX_FULL_SIZE_FIGURES else parts
    small = [_figure(part.title, _drawn(part, NARROW)) for part in parts[len(large) :] if isinstance(part, Plot)]
    return "".join(_part(part) for part in large) + (f'<div class="many">{"".join(small)}</div>' if small else "")


def _part(part: Part) -> str:
    if isinstance(part, Table):
        return _scrolling(_table(part))
    if isinstance(part, Heat):
        return _figure(f"{part.title} ({part.unit})" if part.unit else part.title, _heat(part))
    if isinstance(part, Plot):
        return _figure(part.title, _drawn(part, WIDE, NARROW))
    if isinstance(part, Gantt):
        legend = [(kind, colour, "block") for kind, colour in kind_colours(part).items()]
        return _figure(part.title, _legend(legend) + _pictures(draw_timeline(part, WIDE), draw_timeline(part, NARROW)))
    legend = [(name, COLOURS[place % len(COLOURS)], "block") for place, name in enumerate(part.parts)]
    title = f"{part.title} ({part.unit})" if part.unit else part.title
    return _figure(title, _legend(legend) + _pictures(draw_bars(part, WIDE), draw_bars(part, NARROW)))


def _figure(title: str, inside: str) -> str:
    return f"<figure><figcaption>{escape(title)}</figcaption>{inside}</figure>"


def _drawn(plot: Plot, *widths: int) -> str:
    """Return the plot with its legend, drawn once for each width."""
    keys = zip(plot.series, colours_of(plot.series), strict=True)
    legend = [(one.name, colour, "dashed" if one.dashed else "line") for one, colour in keys]
    return _legend(legend[1:] and legend) + _pictures(*(draw_plot(plot, width) for width in widths))


def _pictures(*drawn: str) -> str:
    return "\n".join(drawn) if any(drawn) else '<p class="soft">no values</p>'


def _legend(entries: list[tuple[str, str, str]]) -> str:
    keys = [f'<li><i class="{kind}" style="--key:{colour}"></i>{escape(name)}</li>' for name, colour, kind in entries]
    return f'<ul class="legend">{"".join(keys)}</ul>' if keys else ""


def _table(table: Table) -> str:
    columns = range(len(table.header))
    cells = [[row[place] if place < len(row) else "" for place in columns] for row in table.rows]
    numeric = [any(row[place] for row in cells) and all(_is_number(row[place]) for row in cells) for place in columns]
    kinds = [' class="number"' if number else "" for number in numeric]
    head = "".join(f"<th{kind}>{escape(name)}</th>" for name, kind in zip(table.header, kinds, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{kind}>{_prose(cell)}</td>" for cell, kind in zip(row, kinds, strict=True)) + "</tr>"
        for row in cells
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _heat(heat: Heat) -> str:
    values = chain.from_iterable(heat.values)
    known = [value for value in values if value is not None and math.isfinite(value)]
    high = max(known, default=0.0)
    low = min(min(known, default=0.0), high - _LEAST_SPREAD * abs(high))
    head = "".join(f"<th>{escape(label)}</th>" for label in heat.column_labels)
    rows = []
    for number, (label, row) in enumerate(zip(heat.row_labels, heat.values, strict=True)):
        cells = "".join(_cell(value, low, high, (number, place) in heat.marked) for place, value in enumerate(row))
        rows.append(f"<tr><th>{escape(label)}</th>{cells}</tr>")
    return _scrolling(
        f'<table class="heat"><thead><tr><th></th>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table>'
    )


def _cell(value: float | None, low: float, high: float, marked: bool) -> str:  # noqa: FBT001 - one caller, above
    if value is None:
        return '<td class="none"></td>'
    share = (value - low) / (high - low) if math.isfinite(value) and high > low else 0.0
    kinds = " ".join(["deep"] * (share > 0.55) + ["marked"] * marked)
    return f'<td class="{kinds}" style="--share:{100 * share:.0f}%">{format_number(value, 3)}</td>'


def _facts(findings: Findings) -> str:
    entries = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in findings.facts)
    return f"<section><h2>{escape(findings.facts_title)}</h2><dl>{entries}</dl></section>"


def _method(method: tuple[str, ...]) -> str:
    sentences = "".join(f"<li>{_prose(sentence)}</li>" for sentence in method)
    return f'<section><h2>Method</h2><ul class="method">{sentences}</ul></section>'


def _scrolling(inside: str) -> str:
    """Return wide content in a box that scrolls horizontally, also by keyboard, so that the page does not."""
    return f'<div class="box" tabindex="0">{inside}</div>'


def _prose(text: str) -> str:
    """Return text as HTML, with text between backticks as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def _is_number(text: str) -> bool:
    return text in {"", "-"} or _NUMBER.fullmatch(text) is not None


# The style sheet of a report, for light and dark mode, desktop and phone.


STYLE = (
    """
:root{LIGHT;--accent:ACCENT;--alarm:ALARM}
@media(prefers-color-scheme:dark){
:root{DARK;--accent:#7ea6d3}}
*{box-sizing:border-box}
body{margin:0;background:var(--ground);color:var(--ink);font:16px/1.55 system-ui,-apple-system,"Segoe UI",sans-serif;
-webkit-text-size-adjust:100%;overflow-wrap:anywhere}
main{max-width:980px;margin:0 auto;padding:40px 24px 56px}
h1{font-size:1.75rem;line-height:1.2;letter-spacing:-.01em;margin:0 0 16px;text-wrap:balance}
h2{font-size:1.15rem;line-height:1.3;margin:0 0 8px}
p{margin:0 0 10px}
code{font:.9em ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;background:var(--ground);
border:1px solid var(--rule);border-radius:4px;padding:0 .3em}
section,.verdict{background:var(--card);border:1px solid var(--rule);border-radius:12px;padding:22px 24px;
margin:0 0 20px}
.verdict{font-size:1.15rem;line-height:1.45;font-weight:500;border-left:5px solid var(--accent)}
.soft{color:var(--soft)}
figure{margin:20px 0 0}
figcaption{font-weight:600;font-size:.95rem;margin:0 0 6px}
svg{display:block;width:100%;height:auto}
svg.narrow{display:none}
.many{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,20rem),1fr));gap:0 28px}
.many svg.narrow{display:block}
SHAPES.legend{list-style:none;display:flex;flex-wrap:wrap;gap:2px 16px;margin:0 0 10px;padding:0;font-size:.85rem;
color:var(--soft)}
.legend i{display:inline-block;width:16px;border-top:3px solid var(--key);border-radius:2px;vertical-align:middle;
margin-right:6px}
.legend i.dashed{border-top-style:dashed;border-top-width:2px;border-radius:0}
.legend i.block{width:11px;height:11px;border:0;background:var(--key);vertical-align:-1px}
.box{overflow:auto;max-height:36rem;margin:16px 0 0;border:1px solid var(--rule);border-radius:8px}
.box:focus-visible{outline:2px solid var(--accent)}
table{border-collapse:collapse;width:100%;font-size:.875rem;font-variant-numeric:tabular-nums}
th,td{padding:7px 12px;text-align:left;border-bottom:1px solid var(--rule);white-space:nowrap;vertical-align:top}
tbody tr:last-child>*{border-bottom:0}
thead th{color:var(--soft);font-weight:600;font-size:.8rem;background:var(--ground);position:sticky;top:0}
.number{text-align:right}
.box:has(.heat){border:0;margin:8px 0 0}
.heat{width:auto;min-width:min(100%,24rem);border-collapse:separate;border-spacing:2px}
.heat th,.heat td{border:0;text-align:center;padding:8px 10px}
.heat th{background:none;color:var(--soft);font-weight:600;font-size:.8rem}
.heat thead th{position:static}
.heat tbody th{text-align:right;position:sticky;left:0;background:var(--card)}
.heat td{border-radius:4px;min-width:3.4rem;background:color-mix(in srgb,COLOUR var(--share,0%),var(--ground))}
.heat td.deep{color:#fff}
.heat td.none{background:none}
.heat td.marked{outline:2.5px solid var(--alarm);outline-offset:-1px;font-weight:700}
dl{display:grid;grid-template-columns:max-content 1fr;gap:4px 16px;margin:0;font-size:.9rem}
dt{color:var(--soft)}
dd{margin:0}
.method{margin:0;padding-left:1.1em;font-size:.9rem}
.method li{margin:0 0 6px}
.two{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,22rem),1fr));gap:0 20px;align-items:start}
@media(max-width:640px){
main{padding:20px 12px 32px}
h1{font-size:1.4rem}
section,.verdict{padding:16px 14px;margin:0 0 14px;border-radius:10px}
.verdict{font-size:1.05rem}
svg.wide{display:none}
svg.narrow{display:block}
th,td{padding:6px 9px}
.heat th,.heat td{padding:6px 5px;min-width:2.8rem}
dl{grid-template-columns:1fr;gap:0}
dd{margin:0 0 8px}}
@media print{.box{max-height:none}body{background:#fff}section,.verdict{break-inside:avoid}}
""".replace("ACCENT", COLOURS[0])
    .replace("ALARM", COLOURS[3])
    .replace("COLOUR", COLOURS[0])
    .replace("LIGHT", LIGHT)
    .replace("DARK", DARK)
    .replace("SHAPES", SHAPES.lstrip("\n"))
)
"""Colours are those of the planner's figures; a phone shows the figures that were drawn for its width."""
