"""Findings as one page that needs nothing else: style and pictures inside, no script, light or dark, desk or phone."""

from __future__ import annotations

import math
import re
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING

from shardwise.bench.report.axes import in_digits
from shardwise.bench.report.draw import NARROW, WIDE, colours_of, draw_bars, draw_plot
from shardwise.bench.report.findings import Bars, Heat, Plot, Table
from shardwise.bench.report.style import STYLE
from shardwise.planner.search.picture import COLOURS

if TYPE_CHECKING:
    from shardwise.bench.report.findings import Findings, Section

_NUMBER = re.compile(r"[-+±<>~≈]?\s?\d[\d,.]*(e[-+]?\d+)?\s?\S{0,8}")
_FEW = 3
"""Plots in a row that are all drawn large."""
_LEAST_SPREAD = 0.2
"""Of the largest value: closer values are noise, and would look like night and day with all colours between them."""


def html_of(findings: Findings) -> str:
    """Return the whole page."""
    parts = [
        f"<header><h1>{escape(findings.title)}</h1>",
        f'<p class="verdict">{_prose(findings.verdict)}</p></header>',
        *(_section(section) for section in findings.sections),
        '<footer class="two">',
        _facts(findings.facts) if findings.facts else "",
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
    words = "".join(f"<p>{_prose(line)}</p>" for line in section.text.splitlines() if line.strip())
    parts = "".join(_run(list(run)) for _, run in groupby(section.parts, key=type))
    return f"<section><h2>{escape(section.title)}</h2>{words}{parts}</section>"


def _run(parts: list[Plot | Bars | Heat | Table]) -> str:
    """Return parts of one kind that follow each other; of many plots only the first is large."""
    large = parts[:1] if isinstance(parts[0], Plot) and len(parts) > _FEW else parts
    small = [_figure(part.title, _drawn(part, NARROW)) for part in parts[len(large) :] if isinstance(part, Plot)]
    return "".join(_part(part) for part in large) + (f'<div class="many">{"".join(small)}</div>' if small else "")


def _part(part: Plot | Bars | Heat | Table) -> str:
    if isinstance(part, Table):
        return _scrolling(_table(part))
    if isinstance(part, Heat):
        return _figure(f"{part.title} ({part.unit})" if part.unit else part.title, _heat(part))
    if isinstance(part, Plot):
        return _figure(part.title, _drawn(part, WIDE, NARROW))
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
    known = [value for row in heat.values for value in row if value is not None and math.isfinite(value)]
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
    return f'<td class="{kinds}" style="--share:{100 * share:.0f}%">{in_digits(value, 3)}</td>'


def _facts(facts: tuple[tuple[str, str], ...]) -> str:
    entries = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts)
    return f"<section><h2>Machine</h2><dl>{entries}</dl></section>"


def _method(method: tuple[str, ...]) -> str:
    sentences = "".join(f"<li>{_prose(sentence)}</li>" for sentence in method)
    return f'<section><h2>Method</h2><ul class="method">{sentences}</ul></section>'


def _scrolling(inside: str) -> str:
    """Return something wide in a box that scrolls by itself, with the keyboard too, so that the page never does."""
    return f'<div class="box" tabindex="0">{inside}</div>'


def _prose(words: str) -> str:
    """Return words as HTML, with what stands between backticks as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(words))


def _is_number(words: str) -> bool:
    return words in {"", "-"} or _NUMBER.fullmatch(words) is not None
