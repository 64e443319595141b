"""Equal calls in another order: told by their source lines, where operations and shapes give nothing away."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.runs.call_text import call_words
from shardwise.runs.places import short

if TYPE_CHECKING:
    from shardwise.runs.call_reader import Call

_SHIFTED = 8
"""Calls in a row that must fit another rank's, one or more further, for a skipped call to be named."""
_FURTHEST = 4
_CROSSED = 3
"""Times that two ranks must have met crosswise, and never otherwise, for an exchange to be named."""


def describe_order(numbers: dict[int, dict[int, Call]]) -> str:
    """Say which rank skipped a call or exchanged two; empty where lines differ for a reason, as branches may.

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
