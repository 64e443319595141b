"""The state machine of a run on several nodes, without sockets or clocks: events in, messages to nodes out.

A run is a sequence of rounds. In each round, node 0 opens a store, the ready nodes join it by torch's rendezvous, start
their ranks and report the exits; then `decide_round` ends the run or starts the next round. Every message about ranks
contains its round, and messages of earlier rounds are dropped, so that they cannot change the state.
"""

from __future__ import annotations

import math
import signal
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import msgspec

from shardwise.launcher.explain import find_mismatch
from shardwise.launcher.local.supervise import SETTLE_S
from shardwise.launcher.nodes.membership import EndRun, NodeLimits, RoundStatus, decide_round, place_node
from shardwise.launcher.nodes.messages import (
    Again,
    Failing,
    JoinRound,
    Leaving,
    NodeEnded,
    NodeReady,
    Note,
    Opened,
    Over,
    Refused,
    RoundJoined,
    Stop,
    Welcome,
)
from shardwise.runs.console import PREEMPTED

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardwise.launcher.nodes.messages import FromNode, Hello

GATHER_S = 2.0
"""Seconds to wait for more nodes before all ranks are stopped to let a new node join."""


@dataclass
class _Member:
    """A node that has joined the run."""

    node: int
    host: str
    is_ready: bool = False
    in_round: bool = False
    """Whether the node was sent a request to join the round, or has joined it."""
    ended: NodeEnded | None = None
    is_leaving: int = 0
    """Stop signal that its launcher received; 0 without one."""

    @property
    def name(self) -> str:
        return f"node {self.node} ({self.host})"


@dataclass
class _Round:
    """The state of one round."""

    number: int
    port: int = 0
    """Port of the round's store; 0 until it is open."""
    nodes: tuple[int, ...] = ()
    """Nodes that joined; empty until the rendezvous is complete."""
    is_settled: bool = False
    """Whether the nodes of the round are fixed, so that a new node waits for the next round."""
    is_stopping: bool = False
    """Whether the ranks were stopped because of a failure."""
    is_reshaping: bool = False
    """Whether the ranks were stopped because a node joins or leaves."""
    interrupted: int = 0
    """Signal that requested the end of the whole run; 0 without one."""
    stop_at: float = math.inf
    stop_reason: str = ""
    grow_at: float = math.inf
    gone: list[str] = field(default_factory=list)
    ends: list[tuple[str, NodeEnded]] = field(default_factory=list)
    """Name of each node whose ranks have exited, with its report."""

    @property
    def has_joined(self) -> bool:
        return bool(self.nodes)

    def stop(self, reason: str, at: float) -> None:
        """Schedule the stop of all ranks at this time, unless an earlier stop is scheduled."""
        if not self.is_stopping and at < self.stop_at:
            self.stop_at, self.stop_reason = at, reason

    def status(self, *, num_nodes: int, had_joined: bool) -> RoundStatus:
        """Return the status for `decide_round`."""
        return RoundStatus(
            exits=tuple(exit_ for _, ended in self.ends for exit_ in ended.exits),
            gone=tuple(self.gone),
            broken=self._first_loss(by_verdict=False),
            verdict=self._first_loss(by_verdict=True),
            num_nodes=num_nodes,
            had_joined=had_joined,
            interrupted=self.interrupted,
            reshaping=self.is_reshaping,
            # A node that was stopped before its rendezvous was complete has no exits.
            complete=self.has_joined and len(self.nodes) == sum(bool(ended.exits) for _, ended in self.ends),
        )

    def _first_loss(self, *, by_verdict: bool) -> str:
        for name, ended in self.ends:
            if ended.lost and ended.by_verdict == by_verdict:
                return f"{ended.lost} on {name}"
        return ""


class Roster:
    """The state machine of a run: receives events in order and queues messages to nodes; node 0 runs the store."""

    def __init__(
        self, limits: NodeLimits, *, facts: Mapping[str, str], host: str, welcome: Welcome, now: float
    ) -> None:
        """Create an empty roster; `facts` must be the same on all nodes, `host` and `welcome` are of node 0."""
        self.is_over = False
        self._limits, self._facts, self._host, self._welcome = limits, facts, host, welcome
        self._members: dict[int, _Member] = {}
        self._dismissed: dict[int, str] = {}
        """Hosts of released nodes that are still connected, whose node numbers are not free yet."""
        self._out: list[tuple[int, msgspec.Struct]] = []
        self._round = _Round(0)
        self._restarts = 0
        self._join_by = now + limits.join_s
        self._was_whole = False
        """Whether the first round has joined; later rounds start with the connected nodes without waiting for more."""

    def take(self) -> list[tuple[int, msgspec.Struct]]:
        """Return and clear the queued (node, message) pairs."""
        out, self._out = self._out, []
        return out

    def join(self, hello: Hello) -> int | Refused:
        """Add a node to the run and return its node number, or the reason why it is rejected."""
        if self.is_over:
            return Refused("the run is over", "start the run again on all nodes", code="rendezvous.run-over")
        taken = {**self._dismissed, **{node: member.host for node, member in self._members.items()}}
        node = place_node(hello, self._facts, taken, self._limits.most, self._host)
        if isinstance(node, Refused):
            self._send(0, Note(f"rejected a node: {node.fact}"))
            return node
        self._members[node] = _Member(node, hello.host)
        self._send(node, msgspec.structs.replace(self._welcome, node=node))
        if self._was_whole:
            self._note(f"{self._members[node].name} has connected and will join")
        return node

    def receive(self, node: int, message: FromNode, now: float) -> None:
        """Process a message of a node; messages of earlier rounds are dropped."""
        member = self._members.get(node)
        if member is None or self.is_over or getattr(message, "round", self._round.number) != self._round.number:
            return
        match message:
            case NodeReady():
                member.is_ready = True
                self._invite(member, now)
            case Opened(_, port):
                self._round.port, member.is_ready = port, True
                for other in self._members.values():
                    self._invite(other, now)
                self._round.is_settled = self._was_whole
            case RoundJoined(_, nodes):
                self._take_round(nodes, now)
            case Failing(_, certain):
                self._round.stop(f"a rank of {member.name} failed", now if certain else now + SETTLE_S)
            case Leaving(number):
                self._release(member, number)
            case NodeEnded():
                self._take_end(member, message, now)

    def lose(self, node: int, how: str, now: float) -> None:
        """Process the loss of a node; `how` describes it, such as "its connection closed"."""
        self._dismissed.pop(node, None)
        member = self._members.pop(node, None)
        if member is None or self.is_over:
            return
        lost = f"{member.name} is lost: {how}"
        if node == 0:
            self._end(EndRun(failed=True, lost=lost))
            return
        if not member.is_leaving:
            self._note(lost)
        if member.in_round and not member.is_leaving:
            self._round.gone.append(lost)
            if member.ended is None:  # otherwise its ranks have exited
                self._round.stop(f"{member.name} is lost", now)
                self.tick(now)
        self._conclude_if_done()

    def tick(self, now: float) -> None:
        """Execute the stops and joins that are due at time `now`, and end the run after the join timeout."""
        if self.is_over:
            return
        if now >= self._round.stop_at:
            self._round.stop_at = math.inf
            self._request_stop(self._round.stop_reason, 0)
        if now >= self._round.grow_at:
            self._round.grow_at = math.inf
            self._grow()
        if not self._was_whole and now >= self._join_by:
            here = ", ".join(member.name for member in self._members.values())
            least = self._limits.least
            self._end(EndRun(failed=True, lost=f"fewer than {least} nodes joined in time: {here}"))

    def _grow(self) -> None:
        joining = [member.name for member in self._ready() if not member.in_round]
        if joining and not (self._round.ends or self._round.is_stopping or self._round.is_reshaping):
            self._round.is_reshaping = True
            self._note(f"{' and '.join(joining)} can join: all ranks save a checkpoint and stop")
            self._request_stop("a node joins", signal.SIGTERM)

    def _ready(self) -> list[_Member]:
        return [member for member in self._members.values() if member.is_ready and not member.is_leaving]

    def _invite(self, member: _Member, now: float) -> None:
        """Send a node the request to join this round if its rendezvous is open, else schedule a new round."""
        limits, now_round = self._limits, self._round
        if member.in_round or not member.is_ready or now_round.is_stopping:
            return
        if now_round.has_joined:
            now_round.grow_at = min(now_round.grow_at, now + GATHER_S)
            return
        if not now_round.port or now_round.is_settled:
            return  # the store is not open yet, or the nodes of this round are fixed
        least, most = (limits.least, limits.most) if not self._was_whole else (len(self._ready()),) * 2
        member.in_round = True
        join = JoinRound(now_round.number, now_round.port, least, most, limits.last_call_s, self._restarts)
        self._send(member.node, join)

    def _take_round(self, nodes: tuple[int, ...], now: float) -> None:
        if self._round.has_joined:
            return
        self._round.nodes = nodes
        for member in self._members.values():
            member.in_round = member.node in nodes
        missing = [node for node in nodes if node not in self._members]
        if missing:
            self._round.stop(f"node {missing[0]} was lost while it joined the round", now)
            return
        self._was_whole = True
        if any(not member.in_round for member in self._ready()) and len(nodes) < self._limits.most:
            self._round.grow_at = now + GATHER_S

    def _request_stop(self, reason: str, number: int) -> None:
        self._round.is_stopping = self._round.is_stopping or number == 0
        for member in self._members.values():
            if member.in_round and member.ended is None:
                self._send(member.node, Stop(self._round.number, reason, number))

    def _release(self, member: _Member, number: int) -> None:
        """Release a node whose launcher received a stop signal, or stop the run if too few nodes would remain."""
        member.is_leaving = number
        if member.node == 0 or len(self._ready()) < self._limits.least:
            self._round.interrupted = number
        elif not member.in_round:
            self._dismiss(member)
            return
        self._round.is_reshaping = True
        self._note(f"{member.name} received {signal.Signals(number).name}")
        self._request_stop(f"{member.name} received a stop signal", number)
        self._conclude_if_done()

    def _take_end(self, member: _Member, ended: NodeEnded, now: float) -> None:
        member.ended = ended
        exits = tuple(replace(exit_, node_name=member.name) for exit_ in ended.exits)
        self._round.ends.append((member.name, msgspec.structs.replace(ended, exits=exits)))
        if ended.lost or any(exit_.failed for exit_ in exits):
            self._round.stop(f"ranks of {member.name} ended", now if ended.lost else now + SETTLE_S)
        self._conclude_if_done()

    def _conclude_if_done(self) -> None:
        """End the run or start the next round if all nodes of this round have reported or are lost."""
        waiting = [member for member in self._members.values() if member.in_round and member.ended is None]
        if self.is_over or waiting or not (self._round.ends or self._round.gone or self._round.interrupted):
            return
        status = self._round.status(num_nodes=len(self._ready()), had_joined=self._was_whole)
        decision = decide_round(status, self._limits, self._restarts)
        if isinstance(decision, EndRun):
            self._end(decision)
            return
        self._note(decision.why, is_logged=decision.restarts == self._restarts)
        self._restarts = decision.restarts
        for member in [member for member in self._members.values() if member.is_leaving]:
            self._dismiss(member)
        self._round = _Round(self._round.number + 1)
        for member in self._members.values():
            member.in_round, member.ended = False, None
            self._send(member.node, Again(self._round.number))

    def _dismiss(self, member: _Member) -> None:
        """Send the final message to a node that leaves after a stop signal; the run continues on the other nodes."""
        exits = member.ended.exits if member.ended is not None else ()
        saved = any(exit_.returncode == PREEMPTED for exit_ in exits)
        self._send(member.node, Over(exit_code=PREEMPTED if saved else 0, interrupted=member.is_leaving))
        del self._members[member.node]
        self._dismissed[member.node] = member.host

    def _end(self, decision: EndRun) -> None:
        for node in self._members:
            self._send(node, _over(decision, self._round))
        self.is_over = True

    def _note(self, text: str, *, is_logged: bool = True) -> None:
        for node in self._members:
            self._send(node, Note(text, is_logged))

    def _send(self, node: int, message: msgspec.Struct) -> None:
        self._out.append((node, message))


def _over(decision: EndRun, last: _Round) -> Over:
    """Return the final message to every node, with the exits of failed ranks and the root cause."""
    ends = [exit_ for _, ended in last.ends for exit_ in ended.exits]
    # The recorded calls are compared here; only those of the cause explain the end on the nodes too.
    exits = [replace(exit_, calls=None) for exit_ in ends if exit_.failed and exit_ != decision.cause]
    if decision.cause is not None:
        exits.append(decision.cause)
    return Over(
        exit_code=decision.exit_code,
        failed=decision.failed,
        exits=tuple(exits),
        cause=decision.cause,
        lost=decision.lost,
        interrupted=last.interrupted,
        out_of_memory=any(ended.out_of_memory for _, ended in last.ends),
        mismatch=find_mismatch(ends) if decision.failed else "",
    )
