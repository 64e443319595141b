"""The report of a benchmark: its sections, facts about the machine, and its forms as text, JSON, Markdown and HTML."""

from __future__ import annotations

import os
import platform
import re
import socket
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from shardwise.environment import identify
from shardwise.errors import InputError
from shardwise.hardware.probe import package_version, probe_gpus, usable_cores
from shardwise.plots.figures import Bars, Gantt, Heat, Plot, Table
from shardwise.plots.page import html_of
from shardwise.runs.console import counted
from shardwise.spec import Report
from shardwise.units import format_bytes, format_number

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from shardwise.plots.page import Findings, Part, Section


# Facts about the machine, its devices and its software, as text.


def machine_facts(device: torch.device | None) -> tuple[tuple[str, str], ...]:
    """Return (name, value) of this host, its devices, and the software versions that affect a measurement.

    `device` is the measured device, or None if it does not matter. CUDA is not initialized.
    """
    facts = [
        ("host", socket.gethostname()),
        ("processor", f"{_processor()}, {counted(usable_cores(), 'core')} usable"),
        ("memory", f"{_memory() / 2**30:.1f} GiB"),
        ("GPUs", _gpus()),
        ("measured on", str(device) if device is not None else ""),
        ("torch", str(torch.__version__)),
        ("backends", ", ".join(_backends())),
        ("shardwise", package_version("shardwise")),
        ("Python", platform.python_version()),
        ("system", f"{platform.system()} {platform.release()}, {platform.machine()}"),
        ("date", datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")),
    ]
    return tuple((name, value) for name, value in facts if value)


def _processor() -> str:
    """Return the processor's name from /proc/cpuinfo, otherwise the architecture."""
    listing = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", listing.read_text() if listing.exists() else "", re.MULTILINE)
    return re.sub(r"\s+", " ", found[1]).strip() if found else platform.machine()


def _memory() -> int:
    """Return the bytes of host memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _gpus() -> str:
    counts = Counter((gpu.name, gpu.memory_bytes) for gpu in probe_gpus())
    return ", ".join(f"{count} x {name} ({size / 2**30:.1f} GiB)" for (name, size), count in counts.items()) or "none"


def _backends() -> list[str]:
    """Return the communication libraries of torch, with versions if available."""
    names = ["gloo"] if torch.distributed.is_gloo_available() else []
    if torch.version.cuda:
        names.append(f"CUDA {torch.version.cuda}")
    if torch.distributed.is_nccl_available():
        names.append("NCCL " + ".".join(str(part) for part in torch.cuda.nccl.version()))
    return names


# The device of a rank. With gloo, several ranks may share one GPU.


def rank_device(device: str | None, backend: str | None) -> str | None:
    """Return the device of this rank: `device`, except that gloo ranks are distributed over the GPUs."""
    if backend != "gloo" or device not in (None, "cuda") or not torch.cuda.is_available():
        return device
    return f"cuda:{identify().local_rank % torch.cuda.device_count()}"


class BenchReport(Report, frozen=True, kw_only=True):
    """The report of one benchmark of `bench`."""

    def findings(self) -> Findings:
        """Return the content of the HTML or Markdown report."""
        raise NotImplementedError

    def write(self, path: Path) -> None:
        """Write the report as HTML (.html) or as Markdown (.md)."""
        write_report(self.findings(), path)


# The Markdown report has the text and tables of the HTML report, some points of each plot, and all other values.


_MAX_POINTS = 9
"""Maximum number of points of a series in Markdown."""


def markdown_of(findings: Findings) -> str:
    """Return the report as GitHub-flavored Markdown."""
    blocks = [f"# {_escape(findings.title)}", f"**{_prose(findings.verdict)}**"]
    for section in findings.sections:
        blocks += _section(section)
    if findings.facts:
        blocks += ["## Machine", _table(("", ""), findings.facts)]
    if findings.method:
        blocks += ["## Method", "\n".join(f"- {_prose(sentence)}" for sentence in findings.method)]
    return "\n\n".join(blocks) + "\n"


def _section(section: Section) -> list[str]:
    blocks = [f"## {_escape(section.title)}", *(_prose(line) for line in section.text.splitlines() if line.strip())]
    for part in section.parts:
        blocks += _part(part)
    return blocks


def _part(part: Part) -> list[str]:
    if isinstance(part, Table):
        return [_table(part.header, part.rows)]
    if isinstance(part, Gantt):
        seconds: dict[str, float] = {}
        for span in part.spans:
            seconds[span.kind] = seconds.get(span.kind, 0.0) + span.end - span.start
        totals = [(kind, format_number(total)) for kind, total in seconds.items()]
        return [_caption(part.title, "s"), _table(("", "total"), totals)]
    if isinstance(part, Plot):
        return [_caption(part.title, part.y_label), _plot(part)]
    if isinstance(part, Bars):
        rows = [(label, *map(format_number, (*values, sum(values)))) for label, values in part.rows]
        return [_caption(part.title, part.unit), _table(("", *part.parts, "total"), rows)]
    return [_caption(part.title, part.unit), _table(("", *part.column_labels), _heat_rows(part))]


def _caption(title: str, unit: str) -> str:
    return f"**{_escape(title)}**" + (f" ({_escape(unit)})" if unit else "")


def _plot(plot: Plot) -> str:
    """Return a table of the values at a sample of those x at which the most series have a point."""
    values = [dict(one.points) for one in plot.series]
    seen = Counter(x for line in values for x in line)
    most = max(seen.values(), default=0)
    rows = []
    for x in _sample(sorted(x for x, count in seen.items() if count == most)):
        label = format_bytes(x) if plot.x_is_bytes else format_number(x)
        rows.append((label, *(format_number(line[x]) if x in line else "" for line in values)))
    if not rows:
        return "no values"
    return _table((plot.x_label, *(one.name for one in plot.series)), rows)


def _sample(values: Sequence[float]) -> list[float]:
    """Return at most _MAX_POINTS of the values: the first, the last, and evenly spaced ones between them."""
    if len(values) <= _MAX_POINTS:
        return list(values)
    last = len(values) - 1
    return [values[round(index * last / (_MAX_POINTS - 1))] for index in range(_MAX_POINTS)]


def _heat_rows(heat: Heat) -> list[tuple[str, ...]]:
    rows = []
    for number, (label, row) in enumerate(zip(heat.row_labels, heat.values, strict=True)):
        cells = ["" if value is None else format_number(value) for value in row]
        for column, value in enumerate(row):
            if value is not None and (number, column) in heat.marked:
                cells[column] += " (!)"
        rows.append((label, *cells))
    return rows


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(_escape(cell) for cell in line) + " |" for line in lines)


def _prose(text: str) -> str:
    """Return text with Markdown's special characters escaped, except code between backticks."""
    return "".join(part if part.startswith("`") else _escape(part) for part in re.split(r"(`[^`]+`)", text))


def _escape(text: str) -> str:
    """Return text on one line with special characters escaped; an underscore inside a name needs no escape."""
    flat = " ".join(text.split())
    kept = re.sub(r"[\\`*\[\]|]|(?<![^\W_])_|_(?![^\W_])", r"\\\g<0>", flat).replace("<", "&lt;")
    pad = (" " if text[:1].isspace() else "", " " if text[-1:].isspace() else "")
    return pad[0] + kept + pad[1] if kept else kept


_WRITERS = {".html": html_of, ".md": markdown_of}


def check_report_path(path: Path) -> None:
    """Raise InputError if a report cannot be written to `path`; call this before measuring."""
    if path.suffix not in _WRITERS:
        raise InputError(
            f"the report must be a .html or .md file, got {path.name}",
            code="bench.report-extension",
            fix=f"use {path.stem}.html or {path.stem}.md",
        )
    if not path.parent.is_dir():
        raise InputError(
            f"the directory {path.parent} of the report does not exist",
            code="cli.output-folder-missing",
            fix=f"run mkdir -p {path.parent}",
        )
    if path.is_dir():
        raise InputError(f"report {path} is a directory", code="cli.output-is-folder", fix="pass the path of a file")


def write_report(findings: Findings, path: Path) -> None:
    """Write the report to `path` in the format of its suffix: .html (one self-contained file) or .md."""
    check_report_path(path)
    try:
        path.write_text(_WRITERS[path.suffix](findings), encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"the report {path} cannot be written ({error.strerror})",
            code="cli.output-write-failed",
            fix="pass another path",
        ) from error
