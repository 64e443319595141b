"""The mismatch guard: the calls of all ranks, compared by their number in the group as they come in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.doctor.guard.order import describe_order
from shardwise.runs.call_reader import UNKNOWN
from shardwise.runs.call_text import describe_difference, differ

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shardwise.runs.call_reader import Call
    from shardwise.runs.calls import GroupKey

_KEPT, _KEPT_LATE = 512, 8192
"""Calls by channel that are kept for who comes late: behind by less than a look, or by the looks of two nodes."""


class Comparison:
    """Finds calls that should be the same on all members of their group, and are not; each channel's first."""

    def __init__(self, *, late: bool = False) -> None:
        """Begin with no calls; `late` if those of other nodes will come too."""
        self._kept = _KEPT_LATE if late else _KEPT
        self._calls: dict[tuple[GroupKey, str], dict[int, dict[int, Call]]] = {}
        self._suspects: dict[tuple[GroupKey, str], int] = {}
        """The first number at which a channel differs."""
        self._odd: set[tuple[GroupKey, str]] = set()
        """Channels in which ranks made equal calls from different lines."""
        self._done: set[tuple[GroupKey, str]] = set()
        self._seen_once: set[tuple[GroupKey, str]] = set()

    def feed(self, rank: int, calls: Iterable[Call]) -> None:
        """Take in new calls of a rank."""
        for call in calls:
            channel = call.channel
            if channel in self._done or call.what == UNKNOWN:
                continue
            numbers = self._calls.setdefault(channel, {})
            there = numbers.setdefault(call.sequence, {})
            for other in there.values():
                if differ(call, other):
                    first = self._suspects.get(channel, call.sequence)
                    self._suspects[channel] = min(first, call.sequence)
                elif call.site != other.site and not call.what.is_message:
                    self._odd.add(channel)
            there[rank] = call
            if len(numbers) > self._kept:
                del numbers[next(iter(numbers))]  # the one that came first

    def findings(self, *, last: bool = False) -> list[str]:
        """Return what is new, in words; `last` if no more will come.

        What differs is told when all members have made that call, or one look later.
        """
        found = []
        for channel, number in list(self._suspects.items()):
            there = self._calls[channel].get(number, {})
            if len(there) >= len(channel[0].members) or last or channel in self._seen_once:
                found.append(describe_difference(there))
                self._finish(channel)
            self._seen_once.add(channel)
        for channel in list(self._odd - self._done):
            text = describe_order(self._calls[channel])
            if text:
                found.append(text)
                self._finish(channel)
        return found

    def _finish(self, channel: tuple[GroupKey, str]) -> None:
        """Say no more of a channel: what follows a difference is its consequence."""
        self._done.add(channel)
        self._suspects.pop(channel, None)
        self._odd.discard(channel)
        self._calls.pop(channel, None)
