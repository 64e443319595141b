"""What a check says: its name, whether all is well, the fact, and what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from shardwise.runs.exitcodes import CHECK_FAILED, DONE

if TYPE_CHECKING:
    from collections.abc import Iterable

State = Literal["ok", "warn", "fail"]


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What one check found."""

    name: str
    """What was looked at: a part of the machine, or a variable."""
    state: State
    """fail: it cannot work; warn: it may be slow or wrong."""
    fact: str
    fix: str = ""
    """What to do, empty when all is well."""


def ok(name: str, fact: str) -> Verdict:
    """Say that all is well."""
    return Verdict(name=name, state="ok", fact=fact)


def warn(name: str, fact: str, fix: str) -> Verdict:
    """Say that it may be slow or wrong, and what to do."""
    return Verdict(name=name, state="warn", fact=fact, fix=fix)


def fail(name: str, fact: str, fix: str) -> Verdict:
    """Say that it cannot work, and what to do."""
    return Verdict(name=name, state="fail", fact=fact, fix=fix)


def exit_code(verdicts: Iterable[Verdict]) -> int:
    """Return 3 when a check failed, else 0: warnings do not stop a job."""
    return CHECK_FAILED if any(verdict.state == "fail" for verdict in verdicts) else DONE
