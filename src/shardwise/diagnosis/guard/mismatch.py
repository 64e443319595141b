"""The mismatch guard: the calls of all ranks, compared by their number in the group as they come in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.runs.call_reader import UNKNOWN
from shardwise.runs.calls import call_words, describe_difference, differ
from shardwise.runs.console import short

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shardwise.runs.call_reader import Call
    from shardwise.runs.calls import GroupKey


_KEPT, _KEPT_LATE = 512, 8192
"""Calls by channel that are kept for who comes late: behind by less than a look, or by the looks of two nodes."""


class CallComparison:
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
        """Return what is new, as sentences; `last` if no more will come.

        A difference is reported when all members have made that call, or one look later.
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
        """Report no more of a channel: what follows a difference is its consequence."""
        self._done.add(channel)
        self._suspects.pop(channel, None)
        self._odd.discard(channel)
        self._calls.pop(channel, None)


# Equal calls in another order: found by their source lines, where operations and shapes give nothing away.


_SHIFTED = 8
"""Calls in a row that must fit another rank's, one or more further, for a skipped call to be named."""
_FURTHEST = 4
_CROSSED = 3
"""Times that two ranks must have met crosswise, and never otherwise, for an exchange to be named."""


def describe_order(numbers: dict[int, dict[int, Call]]) -> str:
    """Return which rank skipped a call or exchanged two; empty where lines differ for a reason, as branches may.

    `numbers` holds the calls of one channel by number and rank.
    """
    ranks = sorted({rank for there in numbers.values() for rank in there})
    for other in ranks[1:]:
        pairs = [
            (n, there[ranks[0]], there[other])
            for n, there in sorted(numbers.items())
            if len({ranks[0], other} & set(there)) == 2
        ]
        found = _shift(pairs, ranks[0], other) or _exchange(pairs, ranks[0], other)
        if found:
            return found
    return ""


def _shift(pairs: list[tuple[int, Call, Call]], one: int, other: int) -> str:
    """A rank whose calls have been those of the other, some further, ever since the two first differed."""
    start = next((i for i, (_, mine, theirs) in enumerate(pairs) if mine.site != theirs.site), 0)
    if start == 0:
        return ""  # without a common past, nobody knows what was skipped
    mine = [call.site for _, call, _ in pairs]
    theirs = [call.site for _, _, call in pairs]
    usual = {mine[i + 1] for i in range(start - 1) if mine[i] == mine[start - 1]}
    for by in range(1, _FURTHEST + 1):
        if len(mine) - start < _SHIFTED + by or len(set(mine[start:])) == 1:
            return ""
        # Of two that take turns, each is the other one further: the one that broke with the past has skipped.
        if mine[start + by :] == theirs[start:-by] and theirs[start] not in usual:
            return _skipped(other, pairs[start][1], pairs[start][2], by)
        if theirs[start + by :] == mine[start:-by] and mine[start] not in usual:
            return _skipped(one, pairs[start][2], pairs[start][1], by)
    return ""


def _skipped(rank: int, skipped: Call, instead: Call, by: int) -> str:
    more = "" if by == 1 else f" and {by - 1} more"
    return (
        f"rank {rank} skipped {call_words(skipped)}{more}: it called {instead.what.name} at {short(instead.site)}"
        " instead, and since then its calls meet those of other lines: results are wrong"
    )


def _exchange(pairs: list[tuple[int, Call, Call]], one: int, other: int) -> str:
    """Two lines that the ranks reach in opposite order, always."""
    met: dict[tuple[str, str], list[tuple[Call, Call]]] = {}
    for _, mine, theirs in pairs:
        met.setdefault((mine.site, theirs.site), []).append((mine, theirs))
    for (here, there), found in met.items():
        if "root" in found[0][0].what.match:
            continue  # who is the root may take another branch
        back = met.get((there, here), [])
        alike = (here, here) in met or (there, there) in met
        if here != there and len(found) >= _CROSSED and len(back) >= _CROSSED and not alike:
            return (
                f"ranks {one} and {other} make two calls in opposite order: where rank {one} is in"
                f" {call_words(found[0][0])}, rank {other} is in {call_words(found[0][1])}: results are wrong"
            )
    return ""
