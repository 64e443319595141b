"""Mismatch detection: the calls of all ranks of a group, compared by sequence number as they arrive."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.runs.call_reader import UNKNOWN
from shardwise.runs.calls import describe_call, describe_difference, differ
from shardwise.runs.console import short

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shardwise.runs.call_reader import Call
    from shardwise.runs.calls import GroupKey


_MAX_CALLS, _MAX_CALLS_NODES = 512, 8192
"""Maximum calls stored per channel, on one node and on several: ranks lag by one poll, or by the polls of two nodes."""


class CallComparison:
    """Detects calls that differ between members of a group; reports the first difference of each channel."""

    def __init__(self, *, late: bool = False) -> None:
        """Start without calls; `late` is True if calls of other nodes arrive with a delay."""
        self._max_calls = _MAX_CALLS_NODES if late else _MAX_CALLS
        self._calls: dict[tuple[GroupKey, str], dict[int, dict[int, Call]]] = {}
        self._suspects: dict[tuple[GroupKey, str], int] = {}
        """The first sequence number at which a channel differs."""
        self._site_differences: set[tuple[GroupKey, str]] = set()
        """Channels in which ranks issued equal calls from different source lines."""
        self._done: set[tuple[GroupKey, str]] = set()
        self._polled_once: set[tuple[GroupKey, str]] = set()

    def feed(self, rank: int, calls: Iterable[Call]) -> None:
        """Add new calls of a rank."""
        for call in calls:
            channel = call.channel
            if channel in self._done or call.what == UNKNOWN:
                continue
            numbers = self._calls.setdefault(channel, {})
            by_rank = numbers.setdefault(call.sequence, {})
            for other in by_rank.values():
                if differ(call, other):
                    first = self._suspects.get(channel, call.sequence)
                    self._suspects[channel] = min(first, call.sequence)
                elif call.site != other.site and not call.what.is_message:
                    self._site_differences.add(channel)
            by_rank[rank] = call
            if len(numbers) > self._max_calls:
                del numbers[next(iter(numbers))]  # the oldest

    def findings(self, *, last: bool = False) -> list[str]:
        """Return new mismatches as sentences; `last` is True if no more calls will arrive.

        A difference is reported once all members have issued the call, at the latest one poll after it was found.
        """
        found = []
        for channel, number in list(self._suspects.items()):
            by_rank = self._calls[channel].get(number, {})
            if len(by_rank) >= len(channel[0].members) or last or channel in self._polled_once:
                found.append(describe_difference(by_rank))
                self._finish(channel)
            self._polled_once.add(channel)
        for channel in list(self._site_differences - self._done):
            text = describe_order(self._calls[channel])
            if text:
                found.append(text)
                self._finish(channel)
        return found

    def _finish(self, channel: tuple[GroupKey, str]) -> None:
        """Stop checking a channel: later differences follow from the first one."""
        self._done.add(channel)
        self._suspects.pop(channel, None)
        self._site_differences.discard(channel)
        self._calls.pop(channel, None)


# Equal calls in a different order: detected by their source lines if operations and shapes are the same.


_MIN_SHIFTED = 8
"""Number of consecutive calls that must match the shifted calls of another rank before a skipped call is reported."""
_MAX_SHIFT = 4
_MIN_CROSSED = 3
"""Number of times, without exception, that two ranks must issue two calls in opposite order before it is reported."""


def describe_order(numbers: dict[int, dict[int, Call]]) -> str:
    """Return which rank skipped a call or swapped two calls; empty if different source lines are legitimate.

    `numbers` contains the calls of one channel by sequence number and rank.
    """
    ranks: set[int] = set()
    for calls in numbers.values():
        ranks.update(calls)
    first, *others = sorted(ranks)
    for other in others:
        pairs = []
        for number, calls in sorted(numbers.items()):
            if first in calls and other in calls:
                pairs.append((number, calls[first], calls[other]))
        found = _find_skipped(pairs, first, other) or _find_swapped(pairs, first, other)
        if found:
            return found
    return ""


def _find_skipped(pairs: list[tuple[int, Call, Call]], one: int, other: int) -> str:
    """Detect a rank whose calls equal those of the other rank, shifted by a constant since the first difference."""
    start = next((i for i, (_, mine, theirs) in enumerate(pairs) if mine.site != theirs.site), 0)
    if start == 0:
        return ""  # without common calls before, the skipped call is unknown
    mine = [call.site for _, call, _ in pairs]
    theirs = [call.site for _, _, call in pairs]
    usual = {mine[i + 1] for i in range(start - 1) if mine[i] == mine[start - 1]}
    for by in range(1, _MAX_SHIFT + 1):
        if len(mine) - start < _MIN_SHIFTED + by or len(set(mine[start:])) == 1:
            return ""
        # If two calls alternate, both shifts match: the rank that deviates from the earlier order has skipped a call.
        if mine[start + by :] == theirs[start:-by] and theirs[start] not in usual:
            return _describe_skipped(other, pairs[start][1], pairs[start][2], by)
        if theirs[start + by :] == mine[start:-by] and mine[start] not in usual:
            return _describe_skipped(one, pairs[start][2], pairs[start][1], by)
    return ""


def _describe_skipped(rank: int, skipped: Call, instead: Call, by: int) -> str:
    more = "" if by == 1 else f" and {by - 1} more"
    return (
        f"rank {rank} skipped {describe_call(skipped)}{more}: it called {instead.what.name} at {short(instead.site)}"
        " instead, and since then its calls match calls from other lines, so results are wrong"
    )


def _find_swapped(pairs: list[tuple[int, Call, Call]], one: int, other: int) -> str:
    """Detect two source lines that the ranks always reach in opposite order."""
    by_sites: dict[tuple[str, str], list[tuple[Call, Call]]] = {}
    for _, mine, theirs in pairs:
        by_sites.setdefault((mine.site, theirs.site), []).append((mine, theirs))
    for (site, their_site), found in by_sites.items():
        if "root" in found[0][0].what.match:
            continue  # the root may take a different branch
        swapped = by_sites.get((their_site, site), [])
        is_sometimes_equal = (site, site) in by_sites or (their_site, their_site) in by_sites
        if site != their_site and min(len(found), len(swapped)) >= _MIN_CROSSED and not is_sometimes_equal:
            return (
                f"ranks {one} and {other} make two calls in opposite order: while rank {one} is in"
                f" {describe_call(found[0][0])}, rank {other} is in {describe_call(found[0][1])}, so results are wrong"
            )
    return ""
