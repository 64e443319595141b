"""Verdicts: the results of the checks of `doctor`, and the report that lists them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from shardwise.runs.console import CHECK_FAILED
from shardwise.spec import Report

if TYPE_CHECKING:
    from collections.abc import Sequence

State = Literal["ok", "warn", "fail"]


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one check."""

    name: str
    """The component of the machine or the environment variable that was checked."""
    state: State
    """`fail`: training cannot work; `warn`: training may be slow or wrong."""
    fact: str
    fix: str = ""
    """The recommended fix; empty if the check passed."""


def ok(name: str, fact: str) -> Verdict:
    """Return the verdict of a check that passed."""
    return Verdict(name=name, state="ok", fact=fact)


def warn(name: str, fact: str, fix: str) -> Verdict:
    """Return a warning about a problem that may make training slow or wrong, with the fix."""
    return Verdict(name=name, state="warn", fact=fact, fix=fix)


def fail(name: str, fact: str, fix: str) -> Verdict:
    """Return a failure: a problem that prevents training, with the fix."""
    return Verdict(name=name, state="fail", fact=fact, fix=fix)


class VerdictReport(Report, frozen=True, kw_only=True):
    """A report of checks. The exit code is 3 if a check failed; warnings do not change it."""

    verdicts: tuple[Verdict, ...]

    def __post_init__(self) -> None:
        """Derive the exit code from the verdicts."""
        if any(verdict.state == "fail" for verdict in self.verdicts):
            msgspec.structs.force_setattr(self, "exit_code", CHECK_FAILED)

    def to_text(self) -> str:
        """Return one line per verdict, each followed by its fix, and the number of verdicts per state."""
        return "\n".join(verdict_lines(self.verdicts))


def verdict_lines(verdicts: Sequence[Verdict]) -> list[str]:
    """Return one line per verdict, each followed by its fix, and the number of verdicts per state."""
    width = max((len(verdict.name) for verdict in verdicts), default=0)
    lines = []
    counts = {"ok": 0, "warn": 0, "fail": 0}
    for verdict in verdicts:
        counts[verdict.state] += 1
        lines.append(f"{verdict.state:<4}  {verdict.name:<{width}}  {verdict.fact}")
        if verdict.fix:
            lines.append(f"{'':<4}  {'':<{width}}  -> {verdict.fix}")
    lines.append(f"{counts['ok']} ok, {counts['warn']} warnings, {counts['fail']} failed")
    return lines


def table_lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows of text as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return lines
