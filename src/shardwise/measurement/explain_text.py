"""Prints explanations of collectives and strategies on a terminal: the values of all ranks, side by side."""

from __future__ import annotations

import sys
import textwrap
from typing import TYPE_CHECKING

from rich.console import Console

from shardwise.environment import identify
from shardwise.hardware import probe_gpus
from shardwise.measurement.explain import check_names, default_nproc, explain_on_ranks
from shardwise.measurement.specs import rank_zero
from shardwise.runs.console import DONE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardwise.measurement.explain import Column, ExplainedPart, Explanation

WIDTH = 110
"""Maximum width of columns side by side and of sentences, in characters."""
_GAP = 4


def explain(
    name: str, nproc: int | None, *, ops: str | None = None, device: str | None = None, backend: str | None = None
) -> int:
    """Run the collective or strategy `name`, or "all", on real ranks, and print their values; return the exit code.

    Use the ranks of the current world; without a world, start `nproc` ranks (None: the default of `name`). `ops` is
    the reduce operation.
    """
    size = identify().world_size
    if size == 1:
        size = nproc = nproc or default_nproc(name)
        if device is None and backend is None and size > len(probe_gpus()):
            device = "cpu"  # the explanation is the same there, and NCCL needs a GPU per rank
    op = ops.upper() if ops else None
    names = check_names(name, op, size)
    found: list[Explanation] | None = rank_zero(
        explain_on_ranks, nproc, names, op or "SUM", device, backend, backend=backend
    )
    console = Console(file=sys.stdout, highlight=False, markup=False, soft_wrap=True)
    for number, explanation in enumerate(found or []):
        if number:
            console.print()
        for line, is_title in draw(explanation):
            console.print(line, style="bold" if is_title else None)
    return DONE


def draw(explanation: Explanation) -> Iterator[tuple[str, bool]]:
    """Yield the lines of an explanation, and whether each is a title."""
    yield f"{explanation.name}: {explanation.description}", True
    yield f"  {explanation.call}", False
    for part in explanation.parts:
        yield "", False
        if part.title:
            yield part.title, True
        yield from ((line, False) for line in _draw_part(part))
    if explanation.corrected:
        yield "", False
        yield from ((line, False) for line in textwrap.wrap(f"Corrected: {explanation.corrected}", WIDTH))


def _draw_part(part: ExplainedPart) -> Iterator[str]:
    columns = [list(_draw_column(column)) for column in part.columns]
    widths = [max(len(line) for line in column) for column in columns]
    indent = sum(widths[:-1]) + _GAP * (len(widths) - 1)
    if indent + widths[-1] <= WIDTH:
        columns = [[line.ljust(width + _GAP) for line in column] for column, width in zip(columns, widths, strict=True)]
        yield from ("".join(row).rstrip() for row in zip(*columns, strict=True))
    else:
        indent = 0
        for column in columns:
            yield from column
    if indent + len(part.note) <= WIDTH:
        if part.note:
            yield " " * indent + part.note
    else:
        yield from textwrap.wrap(part.note, WIDTH)


def _draw_column(column: Column) -> Iterator[str]:
    if column.title:
        yield f"{column.title}:"
    for rank, value in enumerate(column.values):
        yield f"Rank {rank}: {value}"
