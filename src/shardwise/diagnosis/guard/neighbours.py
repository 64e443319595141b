"""Guards of several nodes: each reports its calls to node 0 in few bytes, and node 0 decides."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

from shardwise.diagnosis.guard.hang import RankStatus  # noqa: TC001 - read at run time by msgspec
from shardwise.diagnosis.guard.replicas import Links, look_at_links
from shardwise.runs.call_reader import Call
from shardwise.runs.calls import (
    GroupKey,  # noqa: TC001 - read at run time by msgspec
    Operation,  # noqa: TC001 - read at run time by msgspec
)

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping


# Calls in the few bytes in which nodes send them to node 0: a training makes the same few, over and over.


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
    """Chooses one rank of a node to report each channel: its peers here are compared with it here."""

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


_FRESH_LOOKS = 4
"""What another node sent expires after so many polls."""


class Exchange(Protocol):
    """By which guards talk: the link of a node to the hub."""

    node: int
    own_address: str

    def relay(self, body: str, *, to_all: bool = False) -> None:
        """Send a message to node 0, or from there to all others."""

    def take_relayed(self) -> list[str]:
        """Return the messages since the last poll."""


class NodeObservation(msgspec.Struct, frozen=True, tag="seen"):
    """How the ranks of a node are."""

    ranks: tuple[RankStatus, ...]


class Missed(msgspec.Struct, frozen=True, tag="missed"):
    """Other ranks wait for these: report what they do."""

    ranks: tuple[int, ...]


class RelayedVerdict(msgspec.Struct, frozen=True, tag="told"):
    """A verdict of node 0: keep the stacks."""

    text: str


_DECODER = msgspec.json.Decoder(NodeObservation | Missed | RelayedVerdict | CallRun | Links)


class Neighbours:
    """What the guard of one node knows of the others."""

    def __init__(self, exchange: Exchange, look_s: float) -> None:
        self._exchange = exchange
        self._fresh_s = _FRESH_LOOKS * look_s
        self._begin()

    def _begin(self) -> None:
        self._seen: dict[int, tuple[float, RankStatus]] = {}
        self._links: dict[int, tuple[float, Links]] = {}
        self._leads = Leads()
        self.calls: list[CallRun] = []
        """Of ranks of other nodes, that came since the last poll; for node 0."""
        self.missed: set[int] = set()
        """Ranks that node 0 has asked for since the last poll."""
        self.verdicts: list[str] = []
        """That node 0 has given since the last poll."""

    @property
    def decides(self) -> bool:
        """Whether this is node 0."""
        return self._exchange.node == 0

    def forget(self) -> None:
        """Drop messages about ranks that have ended, also those not read yet."""
        self._exchange.take_relayed()
        self._begin()

    def listen(self, now: float) -> None:
        """Receive messages."""
        self.missed, self.verdicts, self.calls = set(), [], []
        for body in self._exchange.take_relayed():
            match _DECODER.decode(body):
                case NodeObservation(ranks):
                    self._seen.update({status.rank: (now, status) for status in ranks})
                case Missed(missed):
                    self.missed.update(missed)
                case RelayedVerdict(text):
                    self.verdicts.append(text)
                case CallRun() as run:
                    self.calls.append(run)
                case Links() as links:
                    self._links[links.node] = now, links

    def ranks(self, now: float) -> dict[int, RankStatus]:
        """Return the ranks of other nodes of which something was heard just now."""
        return {rank: status for rank, (at, status) in self._seen.items() if now - at <= self._fresh_s}

    def share(self, own: Mapping[int, RankStatus], quiet_s: float) -> None:
        """Report our ranks to node 0, if any has given no sign for so long."""
        if not self.decides and any(status.quiet_s >= quiet_s for status in own.values()):
            self._say(NodeObservation(tuple(own.values())))

    def share_links(self, pids: Iterable[int], now: float) -> None:
        """Read the connections of our ranks, which wait in a call, and report them to node 0."""
        links = look_at_links(self._exchange.node, self._exchange.own_address, pids)
        self._links[links.node] = now, links
        if not self.decides:
            self._say(links)

    def links(self, now: float) -> list[Links]:
        """Return the connections of all nodes that were read just now."""
        return [links for at, links in self._links.values() if now - at <= self._fresh_s]

    def share_calls(self, news: Mapping[int, Iterable[Call]]) -> None:
        """Report to node 0 the new calls of our ranks that ranks of other nodes should make too."""
        if not self.decides:
            for run in self._leads.runs(news):
                self._say(run)

    def ask(self, ranks: Iterable[int]) -> None:
        """Ask other nodes what these ranks do; for node 0."""
        self._say(Missed(tuple(ranks)), to_all=True)

    def relay(self, text: str) -> None:
        """Send a verdict to the other nodes; for node 0."""
        self._say(RelayedVerdict(text), to_all=True)

    def _say(self, message: msgspec.Struct, *, to_all: bool = False) -> None:
        self._exchange.relay(msgspec.json.encode(message).decode(), to_all=to_all)
