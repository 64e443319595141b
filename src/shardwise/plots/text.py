"""Figures in characters: a table with aligned columns, and a curve in braille dots or in ASCII."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.plots.figures import Table

    Row = tuple[int, float | None, float | None, float | None]
    """First step of a range, and the lowest, the highest and the mean value in it; None where no number is."""


def table_lines(table: Table, *, num_left: int = 1) -> list[str]:
    """Return the rows of a table under its header: the first `num_left` columns to the left, others to the right."""
    rows = [table.header, *table.rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(table.header))]
    lines = []
    for row in rows:
        cells = []
        for column, (text, width) in enumerate(zip(row, widths, strict=True)):
            cells.append(text.ljust(width) if column < num_left else text.rjust(width))
        lines.append("  ".join(cells).rstrip())
    return lines


# A curve in the characters of a terminal: two by four dots in each, where it can show them.


_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bits of a braille character by row and column."""


def bounds(rows: Sequence[Row], *, from_zero: bool = False) -> tuple[float, float]:
    """Return the lowest and the highest value of a curve; zero is one of them if asked."""
    low = min((row[1] for row in rows if row[1] is not None), default=0.0)
    high = max((row[2] for row in rows if row[2] is not None), default=0.0)
    return (min(0.0, low), max(0.0, high)) if from_zero else (low, high)


def draw_curve(
    rows: Sequence[Row], width: int, height: int, low: float, high: float, *, braille: bool = True
) -> list[str]:
    """Return `height` lines of `width` characters that reach from `low` to `high`.

    Each column is filled from its lowest value to its highest, so that a spike is seen.
    """
    across, down = (2 * width, 4 * height) if braille else (width, height)
    scale = (down - 1) / (high - low) if high > low else 0.0
    dots = [[False] * across for _ in range(down)]
    before: tuple[int, int] | None = None
    for x, column in enumerate(_columns(rows, across)):
        if column is None:
            continue
        top, bottom = (down - 1 - round((value - low) * scale) for value in (column[1], column[0]))
        reach = (top, bottom) if before is None else (min(top, before[1]), max(bottom, before[0]))
        for y in range(reach[0], reach[1] + 1):  # a line, not steps in the air
            dots[y][x] = True
        before = (top, bottom)
    if braille:
        return _braille(dots)
    return ["".join("#" if dot else " " for dot in line) for line in dots]


def _columns(rows: Sequence[Row], across: int) -> list[tuple[float, float] | None]:
    """Return the lowest and the highest value in each column of dots; columns between two points are on their line."""
    columns: list[tuple[float, float] | None] = [None] * across
    if not rows:
        return columns
    first, last = rows[0][0], max(rows[-1][0], rows[0][0] + 1)
    for step, low, high, _ in rows:
        if low is None or high is None:
            continue
        x = (step - first) * (across - 1) // (last - first)
        known = columns[x]
        columns[x] = (low, high) if known is None else (min(low, known[0]), max(high, known[1]))
    known_at = [x for x, column in enumerate(columns) if column is not None]
    for left, right in pairwise(known_at):
        start, end = sum(columns[left] or ()) / 2, sum(columns[right] or ()) / 2
        for x in range(left + 1, right):
            between = start + (end - start) * (x - left) / (right - left)
            columns[x] = (between, between)
    return columns


def _braille(dots: Sequence[Sequence[bool]]) -> list[str]:
    lines = []
    for top in range(0, len(dots), 4):
        characters = [_character(dots, top, left) for left in range(0, len(dots[0]), 2)]
        lines.append("".join(characters))
    return lines


def _character(dots: Sequence[Sequence[bool]], top: int, left: int) -> str:
    """Return the braille character of four rows and two columns of dots."""
    number = 0
    for y in range(4):
        for x in range(2):
            if dots[top + y][left + x]:
                number += _DOTS[y][x]
    return chr(0x2800 + number) if number else " "
