"""Calls in the few bytes in which nodes tell them to node 0: a training makes the same few, over and over."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from shardwise.runs.call_reader import Call
from shardwise.runs.calls import GroupKey, Operation  # noqa: TC001 - read at run time by msgspec

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping


class CallRun(msgspec.Struct, frozen=True, tag="calls"):
    """Calls of one rank in one channel, with numbers that follow each other."""

    rank: int
    group: GroupKey
    first: int
    """Number of the first one."""
    kinds: tuple[tuple[Operation, str], ...]
    """What was called and at which line, each once."""
    order: tuple[int, ...]
    """Of which kind each call is."""

    def calls(self) -> list[Call]:
        """Return the calls, without their times."""
        return [
            Call(self.group, number, *self.kinds[kind], entered=0.0, waited=0.0, left=0.0, backward=False)
            for number, kind in enumerate(self.order, self.first)
        ]


class Leads:
    """Chooses one rank of a node to tell of each channel: its peers here are compared with it here."""

    def __init__(self) -> None:
        self._ranks: dict[tuple[GroupKey, str], int] = {}

    def runs(self, news: Mapping[int, Iterable[Call]]) -> list[CallRun]:
        """Return the new calls of this node's ranks, all of which are in `news`, that ranks of other nodes share."""
        found = []
        for rank, calls in sorted(news.items()):
            ours = [
                call for call in calls if _leaves(call, news) and self._ranks.setdefault(call.channel, rank) == rank
            ]
            found += pack(rank, ours)
        return found


def _leaves(call: Call, here: Container[int]) -> bool:
    """Whether a member of its group, or the other end of a message, is on another node."""
    members = (call.what.peer,) if call.what.peer >= 0 else call.group.members
    return any(member not in here for member in members)


def pack(rank: int, calls: Iterable[Call]) -> list[CallRun]:
    """Return calls of a rank as runs: a new one for each channel, and where numbers are missing."""
    runs: list[list[Call]] = []
    last: dict[tuple[GroupKey, str], list[Call]] = {}
    for call in calls:
        run = last.get(call.channel)
        if run is None or run[-1].sequence + 1 != call.sequence:
            run = last[call.channel] = []
            runs.append(run)
        run.append(call)
    return [_pack(rank, run) for run in runs]


def _pack(rank: int, run: list[Call]) -> CallRun:
    places: dict[tuple[Operation, str], int] = {}
    order = tuple(places.setdefault((call.what, call.site), len(places)) for call in run)
    return CallRun(rank, run[0].group, run[0].sequence, tuple(places), order)
