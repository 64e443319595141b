"""The report of a measurement: as text, as JSON, and its findings in a file, as HTML or as Markdown."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

from shardwise.errors import InputError
from shardwise.measurement.report.html import html_of
from shardwise.plots.figures import Bars, Heat, Plot, Table
from shardwise.spec import Report
from shardwise.units import format_bytes, format_number

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from shardwise.measurement.report.findings import Findings, Section


class BenchReport(Report, frozen=True, kw_only=True):
    """What one measurement of `bench` answers."""

    def findings(self) -> Findings:
        """Return what a page or a Markdown file shows."""
        raise NotImplementedError

    def write(self, path: Path) -> None:
        """Write the findings as a page (.html) or as Markdown (.md)."""
        write_report(self.findings(), path)


# Findings as Markdown: the same text and tables; of a plot a few points, of bars and heat maps every value.


_FEW = 9
"""Points of a plot that are written."""


def markdown_of(findings: Findings) -> str:
    """Return the whole document, in GitHub's flavour."""
    blocks = [f"# {_words(findings.title)}", f"**{_prose(findings.verdict)}**"]
    for section in findings.sections:
        blocks += _section(section)
    if findings.facts:
        blocks += ["## Machine", _table(("", ""), findings.facts)]
    if findings.method:
        blocks += ["## Method", "\n".join(f"- {_prose(sentence)}" for sentence in findings.method)]
    return "\n\n".join(blocks) + "\n"


def _section(section: Section) -> list[str]:
    blocks = [f"## {_words(section.title)}", *(_prose(line) for line in section.text.splitlines() if line.strip())]
    for part in section.parts:
        blocks += _part(part)
    return blocks


def _part(part: Plot | Bars | Heat | Table) -> list[str]:
    if isinstance(part, Table):
        return [_table(part.header, part.rows)]
    if isinstance(part, Plot):
        return [_caption(part.title, part.y_label), _plot(part)]
    if isinstance(part, Bars):
        rows = [(label, *map(format_number, (*values, sum(values)))) for label, values in part.rows]
        return [_caption(part.title, part.unit), _table(("", *part.parts, "together"), rows)]
    return [_caption(part.title, part.unit), _table(("", *part.column_labels), _heat_rows(part))]


def _caption(title: str, unit: str) -> str:
    return f"**{_words(title)}**" + (f" ({_words(unit)})" if unit else "")


def _plot(plot: Plot) -> str:
    """Return a table of a few places, those where most of the lines have a point."""
    values = [dict(one.points) for one in plot.series]
    seen = Counter(x for line in values for x in line)
    most = max(seen.values(), default=0)
    places = _spread(sorted(x for x, count in seen.items() if count == most))
    rows = [
        (
            format_bytes(x) if plot.x_is_bytes else format_number(x),
            *(format_number(line[x]) if x in line else "" for line in values),
        )
        for x in places
    ]
    return _table((plot.x_label, *(one.name for one in plot.series)), rows) if rows else "no values"


def _spread(places: Sequence[float]) -> list[float]:
    """Return the ends and what lies evenly between them."""
    if len(places) <= _FEW:
        return list(places)
    return [places[round(index * (len(places) - 1) / (_FEW - 1))] for index in range(_FEW)]


def _heat_rows(heat: Heat) -> list[tuple[str, ...]]:
    rows = []
    for number, (label, row) in enumerate(zip(heat.row_labels, heat.values, strict=True)):
        cells = ["" if value is None else format_number(value) for value in row]
        for place, value in enumerate(row):
            if value is not None and (number, place) in heat.marked:
                cells[place] += " (!)"
        rows.append((label, *cells))
    return rows


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(_words(cell) for cell in line) + " |" for line in lines)


def _prose(text: str) -> str:
    """Return text with nothing in them that Markdown takes for its own, but code between backticks."""
    return "".join(part if part.startswith("`") else _words(part) for part in re.split(r"(`[^`]+`)", text))


def _words(text: str) -> str:
    """Return text on one line, as Markdown will show them; an underscore inside a name is only a letter there."""
    flat = " ".join(text.split())
    kept = re.sub(r"[\\`*\[\]|]|(?<![^\W_])_|_(?![^\W_])", r"\\\g<0>", flat).replace("<", "&lt;")
    pad = (" " if text[:1].isspace() else "", " " if text[-1:].isspace() else "")
    return pad[0] + kept + pad[1] if kept else kept


_WRITERS = {".html": html_of, ".md": markdown_of}


def check_report_path(path: Path) -> None:
    """Refuse a path that no report can be written to; call it before measuring, so that nothing is measured in vain."""
    if path.suffix not in _WRITERS:
        raise InputError(
            f"a report named {path.name} is of no known kind",
            code="bench.report-extension",
            fix="end its name with .html or .md",
        )
    if not path.parent.is_dir():
        raise InputError(
            f"the folder {path.parent} of the report does not exist",
            code="cli.output-folder-missing",
            fix=f"mkdir -p {path.parent}",
        )
    if path.is_dir():
        raise InputError(f"{path} is a folder", code="cli.output-is-folder", fix="name a file")


def write_report(findings: Findings, path: Path) -> None:
    """Write the findings to `path`, by its suffix: .html (one file that needs nothing else) or .md."""
    check_report_path(path)
    try:
        path.write_text(_WRITERS[path.suffix](findings), encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"the report {path} cannot be written ({error.strerror})",
            code="cli.output-write-failed",
            fix="name another place",
        ) from error
