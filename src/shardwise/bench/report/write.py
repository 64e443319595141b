"""Writing what a measurement found to a file, as a page or as Markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.bench.report.html import html_of
from shardwise.bench.report.markdown import markdown_of
from shardwise.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

    from shardwise.bench.report.findings import Findings

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
            f"there is no folder {path.parent} for the report",
            code="cli.output-folder-missing",
            fix=f"mkdir -p {path.parent}",
        )
    if path.is_dir():
        raise InputError(f"{path} is a folder", code="cli.output-is-folder", fix="name a file")


def write_report(findings: Findings, path: Path) -> None:
    """Write the findings to `path`, whose suffix says how: .html (one file that needs nothing else) or .md."""
    check_report_path(path)
    try:
        path.write_text(_WRITERS[path.suffix](findings), encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"the report {path} cannot be written ({error.strerror})",
            code="cli.output-write-failed",
            fix="name another place",
        ) from error
