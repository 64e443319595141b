"""The story of a run: which events are worth telling, and in which words."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from shardwise.monitor.ranks import Entry
from shardwise.runs.console import counted
from shardwise.units import format_duration

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_SHARED = frozenset({"note", "verdict", "finish"})
TOGETHER_S = 60.0
MOST = 500
"""Entries that are kept; older ones are in the events files."""


class Story:
    """The newest entries of a run, numbered in the order they were found."""

    def __init__(self) -> None:
        self.count = 0
        self._entries: deque[Entry] = deque(maxlen=MOST)
        self._told: deque[tuple[str, float]] = deque(maxlen=MOST)

    def tell(self, event: dict[str, Any], rank: int | None = None) -> None:
        """Add an event if it is worth telling; what ranks or launchers say together in the same words is told once."""
        telling = _TELLING.get(event["kind"])
        try:
            told = telling(event) if telling is not None else None
            at = float(event["at"])
        except (KeyError, TypeError, ValueError, AttributeError):
            return  # written by another version
        if told is None:
            return
        text, mood = told
        if event["kind"] in _SHARED:
            if any(words == text and abs(at - then) < TOGETHER_S for words, then in self._told):
                return
            self._told.append((text, at))
        self.count += 1
        entry = Entry(number=self.count, at=at, kind=event["kind"], text=text, mood=mood, rank=rank)
        self._entries.append(entry)

    def since(self, number: int) -> list[Entry]:
        """Return the entries after this number, oldest first."""
        return list(self._newer(number))[::-1]

    def _newer(self, number: int) -> Iterator[Entry]:
        for entry in reversed(self._entries):
            if entry.number <= number:
                return
            yield entry


Told = tuple[str, str] | None
"""Words and mood of an event; None for one that is not worth telling."""


def _start(event: dict[str, Any]) -> Told:
    ranks = event.get("ranks")
    if not isinstance(ranks, list):
        return "training starts", "plain"
    return f"training starts on {counted(len(ranks), 'rank')}", "plain"


def _evaluation(event: dict[str, Any]) -> Told:
    values = event.get("values") or {}
    shown = " · ".join(f"{name} {_number(value)}" for name, value in values.items())
    return f"evaluated at step {_whole(event.get('step'))}: {shown}", "plain"


def _note(event: dict[str, Any]) -> Told:
    return str(event.get("text", "")), "warn"


def _save(event: dict[str, Any]) -> Told:
    return (
        f"checkpoint at step {_whole(event.get('step'))}, training waited {format_duration(event.get('stall_s'))}",
        "plain",
    )


def _end(event: dict[str, Any]) -> Told:
    return f"training ends after {_whole(event.get('steps'))} steps, loss {_number(event.get('loss'))}", "good"


def _attempt(event: dict[str, Any]) -> Told:
    node = f"node {event.get('node')}, " if event.get("nodes", 1) > 1 else ""
    where = f" on {node}{event['host']}" if event.get("host") else ""
    again = f", restart {event['number']}" if event.get("number") else ""
    return f"{counted(event.get('nproc', 0), 'process', 'es')} started{where}{again}", "plain"


def _exit(event: dict[str, Any]) -> Told:
    if event.get("code") == 0 or event.get("stopped"):
        return None
    return f"rank {event.get('rank')} ended: {event.get('words')}", "bad"


def _restart(event: dict[str, Any]) -> Told:
    cause = f": {event['cause']}" if event.get("cause") else ""
    return f"restart {event.get('number')} of {event.get('most')}{cause}", "warn"


def _verdict(event: dict[str, Any]) -> Told:
    return str(event.get("text", "")), "bad"


def _finish(event: dict[str, Any]) -> Told:
    mood = {"finished": "good", "failed": "bad"}.get(str(event.get("state")), "warn")
    return f"the run {'was ' if event.get('state') == 'stopped' else 'has '}{event.get('state')}", mood


_TELLING: dict[str, Callable[[dict[str, Any]], Told]] = {
    "start": _start,
    "evaluation": _evaluation,
    "note": _note,
    "save": _save,
    "end": _end,
    "attempt": _attempt,
    "exit": _exit,
    "restart": _restart,
    "verdict": _verdict,
    "finish": _finish,
}


def _whole(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else "?"


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else "nan"
