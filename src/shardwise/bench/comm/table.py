"""A sweep of collectives as a table: the columns of nccl-tests, on a terminal and as CSV."""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from shardwise.bench.comm.result import Row

COLUMNS = (
    ("collective", 14, ""),
    ("group", 9, ""),
    ("mode", 5, ""),
    ("size", 11, "(B)"),
    ("count", 11, "(elements)"),
    ("type", 8, ""),
    ("redop", 6, ""),
    ("root", 4, ""),
    ("time", 9, "(us)"),
    ("min", 9, "(us)"),
    ("p99", 9, "(us)"),
    ("algbw", 7, "(GB/s)"),
    ("busbw", 7, "(GB/s)"),
    ("#wrong", 6, ""),
)
"""Name, width and unit; those of nccl-tests keep its names."""
_LEFT = 3
"""Columns that are words."""
_OPTIONAL = {"group": "world", "mode": "sync"}
"""Columns that are not shown while they say nothing else than this."""


def cells(row: Row) -> tuple[str, ...]:
    """Return one line's cells, in the order of COLUMNS."""
    times = (f"{number:.1f}" for number in (row.time_us, row.min_us, row.p99_us))
    rates = (f"{number:.2f}" for number in (row.algbw, row.busbw))
    words = (row.collective, row.group, row.mode, str(row.size), str(row.count), row.type, row.redop, str(row.root))
    return (*words, *times, *rates, str(row.wrong))


def shown_columns(rows: Sequence[Row]) -> list[int]:
    """Return which columns say something about these rows."""
    return [
        index
        for index, (name, _, _) in enumerate(COLUMNS)
        if name not in _OPTIONAL or any(getattr(row, name) != _OPTIONAL[name] for row in rows)
    ]


def table_lines(rows: Sequence[Row]) -> list[str]:
    """Return the table for a terminal: names, units, then one line a row."""
    shown = shown_columns(rows)

    def line(texts: Sequence[str]) -> str:
        padded = (
            texts[index].ljust(COLUMNS[index][1]) if index < _LEFT else texts[index].rjust(COLUMNS[index][1])
            for index in shown
        )
        return " ".join(padded).rstrip()

    heads = [line([column[0] for column in COLUMNS]), line([column[2] for column in COLUMNS])]
    return [*heads, *(line(cells(row)) for row in rows)]


def csv_text(rows: Iterable[Row]) -> str:
    """Return all rows as CSV with a header; units are in the names."""
    names = ("collective", "group", "ranks", "mode", "size_bytes", "count", "type", "redop", "root")
    numbers = ("time_us", "min_us", "p99_us", "algbw_gbs", "busbw_gbs", "wrong", "repeats")
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*names, *numbers])
    for row in rows:
        writer.writerow(
            [row.collective, row.group, row.ranks, row.mode, row.size, row.count, row.type, row.redop, row.root]
            + [f"{number:.3f}" for number in (row.time_us, row.min_us, row.p99_us)]
            + [f"{number:.4f}" for number in (row.algbw, row.busbw)]
            + [row.wrong, row.repeats]
        )
    return out.getvalue()
