"""Communication between the guards of several nodes: each sends compact call records to node 0, which decides."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

from shardwise.diagnosis.guard.hang import RankStatus  # noqa: TC001 - read at run time by msgspec
from shardwise.diagnosis.guard.replicas import Links, read_links
from shardwise.runs.call_reader import Call
from shardwise.runs.calls import (
    GroupKey,  # noqa: TC001 - read at run time by msgspec
    Operation,  # noqa: TC001 - read at run time by msgspec
)

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping


# Compact call records: a training loop repeats the same few calls.


class CallRun(msgspec.Struct, frozen=True, tag="calls"):
    """Consecutive calls of one rank on one channel."""

    rank: int
    group: GroupKey
    first: int
    """Sequence number of the first call."""
    kinds: tuple[tuple[Operation, str], ...]
    """The distinct operations with their source lines."""
    order: tuple[int, ...]
    """Index into `kinds` of each call."""

    def calls(self) -> list[Call]:
        """Return the calls, without their times."""
        calls = []
        for number, kind in enumerate(self.order, self.first):
            operation, site = self.kinds[kind]
            call = Call(self.group, number, operation, site, entered=0.0, waited=0.0, left=0.0, backward=False)
            calls.append(call)
        return calls


class CallReporters:
    """Selects one rank per node to report each channel; the node compares its other ranks with this rank."""

    def __init__(self) -> None:
        self._ranks: dict[tuple[GroupKey, str], int] = {}

    def runs(self, news: Mapping[int, Iterable[Call]]) -> list[CallRun]:
        """Return the new calls that involve ranks of other nodes; `news` contains all ranks of this node."""
        found = []
        for rank, calls in sorted(news.items()):
            reported = []
            for call in calls:
                if not _is_remote(call, news):
                    continue
                if self._ranks.setdefault(call.channel, rank) == rank:
                    reported.append(call)
            found += pack(rank, reported)
        return found


def _is_remote(call: Call, local_ranks: Container[int]) -> bool:
    """Return whether a member of the group, or the peer of a point-to-point call, is on a different node."""
    members = (call.what.peer,) if call.what.peer >= 0 else call.group.members
    return any(member not in local_ranks for member in members)


def pack(rank: int, calls: Iterable[Call]) -> list[CallRun]:
    """Return the calls of a rank as runs; each channel and each gap in sequence numbers starts a new run."""
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


_FRESH_POLLS = 4
"""Number of polls after which a status from another node expires."""


class Exchange(Protocol):
    """The connection of a node's guard to the hub."""

    node: int
    own_address: str

    def relay(self, body: str, *, to_all: bool = False) -> None:
        """Send a message to node 0 or, with `to_all` on node 0, to all other nodes."""

    def take_relayed(self) -> list[str]:
        """Return the messages received since the previous call."""


class NodeObservation(msgspec.Struct, frozen=True, tag="seen"):
    """The status of the ranks of a node."""

    ranks: tuple[RankStatus, ...]


class ActivityRequest(msgspec.Struct, frozen=True, tag="missed"):
    """A request of node 0 for the stacks of ranks that other ranks wait for."""

    ranks: tuple[int, ...]


class RelayedVerdict(msgspec.Struct, frozen=True, tag="told"):
    """A verdict of node 0; a node that receives it stores the stacks of its ranks."""

    text: str


_DECODER = msgspec.json.Decoder(NodeObservation | ActivityRequest | RelayedVerdict | CallRun | Links)


class PeerGuards:
    """The connection of one node's guard to the guards of other nodes, and their latest messages."""

    def __init__(self, exchange: Exchange, poll_s: float) -> None:
        self._exchange = exchange
        self._fresh_s = _FRESH_POLLS * poll_s
        self._begin()

    def _begin(self) -> None:
        self._observed: dict[int, tuple[float, RankStatus]] = {}
        self._links: dict[int, tuple[float, Links]] = {}
        self._reporters = CallReporters()
        self.calls: list[CallRun] = []
        """Calls of other nodes received in the latest poll; used by node 0."""
        self.missed: set[int] = set()
        """Ranks whose stacks node 0 requested in the latest poll."""
        self.verdicts: list[str] = []
        """Verdicts of node 0 received in the latest poll."""

    @property
    def decides(self) -> bool:
        """Whether this is node 0."""
        return self._exchange.node == 0

    def forget(self) -> None:
        """Discard all messages about ranks that have ended, including unread ones."""
        self._exchange.take_relayed()
        self._begin()

    def receive(self, now: float) -> None:
        """Read the messages received since the previous poll."""
        self.missed, self.verdicts, self.calls = set(), [], []
        for body in self._exchange.take_relayed():
            match _DECODER.decode(body):
                case NodeObservation(ranks):
                    self._observed.update({status.rank: (now, status) for status in ranks})
                case ActivityRequest(missed):
                    self.missed.update(missed)
                case RelayedVerdict(text):
                    self.verdicts.append(text)
                case CallRun() as run:
                    self.calls.append(run)
                case Links() as links:
                    self._links[links.node] = now, links

    def ranks(self, now: float) -> dict[int, RankStatus]:
        """Return the ranks of other nodes whose status is recent."""
        return {rank: status for rank, (at, status) in self._observed.items() if now - at <= self._fresh_s}

    def share(self, local: Mapping[int, RankStatus], quiet_s: float) -> None:
        """Send the status of this node's ranks to node 0 if one of them made no progress for `quiet_s`."""
        if not self.decides and any(status.quiet_s >= quiet_s for status in local.values()):
            self._send(NodeObservation(tuple(local.values())))

    def share_links(self, pids: Iterable[int], now: float) -> None:
        """Read the TCP connections of this node's waiting ranks and send them to node 0."""
        links = read_links(self._exchange.node, self._exchange.own_address, pids)
        self._links[links.node] = now, links
        if not self.decides:
            self._send(links)

    def links(self, now: float) -> list[Links]:
        """Return the recent connection states of all nodes."""
        return [links for at, links in self._links.values() if now - at <= self._fresh_s]

    def share_calls(self, news: Mapping[int, Iterable[Call]]) -> None:
        """Send node 0 the new calls of this node's ranks that involve other nodes."""
        if not self.decides:
            for run in self._reporters.runs(news):
                self._send(run)

    def request_activity(self, ranks: Iterable[int]) -> None:
        """Request the stacks of these ranks from other nodes; called on node 0."""
        self._send(ActivityRequest(tuple(ranks)), to_all=True)

    def relay(self, text: str) -> None:
        """Send a verdict to all other nodes; called on node 0."""
        self._send(RelayedVerdict(text), to_all=True)

    def _send(self, message: msgspec.Struct, *, to_all: bool = False) -> None:
        self._exchange.relay(msgspec.json.encode(message).decode(), to_all=to_all)
