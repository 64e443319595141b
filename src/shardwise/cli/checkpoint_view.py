"""How checkpoints look on a terminal."""

from __future__ import annotations

import math
import sys
import time
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console
from rich.table import Table

from shardwise.checkpoint.convert.contents import bytes_of
from shardwise.runs.console import say
from shardwise.units import format_bytes_si

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from shardwise.checkpoint.convert.contents import Contents
    from shardwise.checkpoint.convert.convert import ConvertReport
    from shardwise.checkpoint.diff import DiffReport
    from shardwise.checkpoint.folder import ListingRow

MAX_ROWS = 20
"""Differing tensors that are shown, the worst first."""


def show_listing(rows: Sequence[ListingRow]) -> None:
    """Show a table of checkpoints, and below it what is wrong with the damaged ones."""
    table = _table("step", "saved", "size", "layout", "metrics", "state", "name")
    for row in rows:
        table.add_row(
            "" if row.step is None else str(row.step),
            "" if row.saved_at is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row.saved_at)),
            "" if row.num_bytes is None else format_bytes_si(row.num_bytes),
            row.layout,
            " ".join(f"{name} {value:.4g}" for name, value in row.metrics.items()),
            "damaged" if row.damages else "sound",
            row.path.name + (" (latest)" if row.is_latest else ""),
        )
    _show(table)
    for row in rows:
        for damage in row.damages:
            say(f"damaged: {damage}")


def show_contents(path: Path, contents: Contents) -> None:
    """Show what a checkpoint is, how much of each it holds, and its facts."""
    say(f"{path}: {contents.kind}, step {contents.step}")
    table = _table("part", "tensors", "elements", "size")
    parts: dict[str, list[str]] = {}
    for name in contents.forms:
        parts.setdefault(name.partition("/")[0], []).append(name)
    for part, names in parts.items():
        forms = [contents.forms[name] for name in names]
        elements = sum(math.prod(form[1]) for form in forms)
        table.add_row(part, str(len(names)), f"{elements:,}", format_bytes_si(sum(map(bytes_of, forms))))
    _show(table)
    for name, value in contents.facts.items():
        say(f"{name}: {_fact(name, value)}")
    _list("not understood", contents.left_out)


def show_tensors(contents: Contents) -> None:
    """Show every tensor with dtype, shape and size."""
    table = _table("tensor", "dtype", "shape", "size")
    for name, form in contents.forms.items():
        table.add_row(name, form[0], " x ".join(map(str, form[1])) or "scalar", format_bytes_si(bytes_of(form)))
    _show(table)


def show_diff(report: DiffReport, left: Path, right: Path) -> None:
    """Show which tensors and facts differ, and by how much."""
    _list(f"only in {left}", report.only_left)
    _list(f"only in {right}", report.only_right)
    _list("other shape or dtype", report.other_form)
    if report.values:
        table = _table("tensor", "differing", "largest", "relative")
        # What is no number is worst of all.
        worst = sorted(report.values, key=lambda found: -math.inf if math.isnan(found.relative) else -found.relative)
        for found in worst[:MAX_ROWS]:
            share = f"{found.num_different:,} of {found.num_elements:,}"
            table.add_row(found.name, share, f"{found.largest:.3g}", f"{found.relative:.3g}")
        _show(table)
        if len(worst) > MAX_ROWS:
            say(f"and {len(worst) - MAX_ROWS} more tensors")
    for name, one, other in report.facts:
        say(f"{name}: {_fact(name, one)} | {_fact(name, other)}")
    words = "all tensors are equal" if report.are_tensors_equal else "the tensors differ"
    say(f"{words}: {report.num_equal} with the same bits, {len(report.values)} with other values")


def show_conversion(report: ConvertReport) -> None:
    """Show what was written, and what was not."""
    say(
        f"{report.source_kind} -> {report.target_kind}: {report.num_tensors} tensors,"
        f" {format_bytes_si(report.num_bytes)}, step {report.step}, in {report.path}"
    )
    _list("tied", [f"{alias} is {name}" for alias, name in report.tied.items()])
    _list("axes moved, as a convolution's", report.moved)
    _list("left out", report.left_out)


def _fact(name: str, value: Any) -> str:
    """Say one fact in a line, or a plan in its own lines."""
    if value is None:
        return "nothing"
    if name == "random" and isinstance(value, dict):
        return f"states of {len(value)} ranks"
    if isinstance(value, str):
        return "\n  " + value.strip().replace("\n", "\n  ") if "\n" in value else _cut(value)
    return _cut(msgspec.json.encode(value).decode())


def _cut(text: str) -> str:
    return text if len(text) <= 300 else f"{text[:300]}..."


def _list(title: str, words: Sequence[str]) -> None:
    for each in words:
        say(f"{title}: {each}")


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _show(table: Table) -> None:
    Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else 160).print(table)
