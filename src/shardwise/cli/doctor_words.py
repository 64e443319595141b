"""How `doctor` shows what it found: one line for each verdict, the fix below, or JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from shardwise.runs.console import say

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.doctor.check import Verdict


def say_verdicts(verdicts: Sequence[Verdict]) -> None:
    """Show each verdict on a line, what to do about it below, and how many there were of each kind."""
    width = max((len(verdict.name) for verdict in verdicts), default=0)
    for verdict in verdicts:
        say(f"{verdict.state:<4}  {verdict.name:<{width}}  {verdict.fact}")
        if verdict.fix:
            say(f"{'':<4}  {'':<{width}}  -> {verdict.fix}")
    counts = {state: sum(verdict.state == state for verdict in verdicts) for state in ("ok", "warn", "fail")}
    say(f"{counts['ok']} ok, {counts['warn']} to look at, {counts['fail']} failed")


def say_json(value: Any) -> None:
    """Show a value as JSON."""
    say(msgspec.json.format(msgspec.json.encode(value), indent=1).decode())
