"""What a measurement found, as values that can be shown: plots, tables, heat maps, and how it was measured."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Series:
    """One line of a plot."""

    name: str
    points: tuple[tuple[float, float], ...]
    dashed: bool = False
    """For what was predicted or fitted, beside what was measured."""


@dataclass(frozen=True, kw_only=True)
class Plot:
    """Lines over a common axis; points that are not above 0 have no place on a logarithmic one."""

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    log_x: bool = False
    log_y: bool = False
    x_is_bytes: bool = False
    """Whether ticks are written as 4 KiB, 1 MiB."""


@dataclass(frozen=True, kw_only=True)
class Bars:
    """Bars made of parts, one a row: (label, value of each part)."""

    title: str
    unit: str
    parts: tuple[str, ...]
    rows: tuple[tuple[str, tuple[float, ...]], ...]


@dataclass(frozen=True, kw_only=True)
class Heat:
    """A matrix as colours, with each value written in its cell; None is an empty cell."""

    title: str
    unit: str
    row_labels: tuple[str, ...]
    column_labels: tuple[str, ...]
    values: tuple[tuple[float | None, ...], ...]
    marked: tuple[tuple[int, int], ...] = ()
    """Cells (row, column) that the text speaks of."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of words under a header."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of a report: what was found in words, then what shows it."""

    title: str
    text: str = ""
    parts: tuple[Plot | Bars | Heat | Table, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Findings:
    """All that one measurement has to say."""

    title: str
    verdict: str
    """The one sentence to read if only one is read."""
    facts: tuple[tuple[str, str], ...]
    """Of the machine and the software: (name, value)."""
    method: tuple[str, ...]
    """How it was measured, in sentences."""
    sections: tuple[Section, ...] = field(default=())
