"""The rounds of one node: open the store, join the rendezvous, run the ranks, report their exits, and continue.

Each round has a new store on a new port of node 0, so that it cannot read keys of an earlier round. All nodes of a
round start and stop their ranks together. The hub decides (`roster.py`), and this file executes its decisions. torch's
rendezvous assigns the ranks; a separate process runs it because it imports torch.
"""

from __future__ import annotations

import contextlib
import socket
import time
from dataclasses import dataclass, field, replace
from functools import partial
from signal import Signals
from typing import TYPE_CHECKING

from shardwise.hardware import usable_cores
from shardwise.launcher.explain import gather_evidence
from shardwise.launcher.local.attempts import (
    Launched,
    LocalLaunch,
    NodeAssignment,
    describe_lost,
    find_failure,
    node_environment,
    start_ranks,
    starter_for,
    write_end,
    write_exit,
    write_start,
)
from shardwise.launcher.local.processes import RendezvousResult, StartRendezvous
from shardwise.launcher.local.supervise import Observer, Outcome, caught_signals, supervise
from shardwise.launcher.nodes.messages import (
    Admit,
    Again,
    Failing,
    JoinRound,
    Leaving,
    NodeEnded,
    NodeReady,
    Note,
    Opened,
    Over,
    RoundJoined,
    Stop,
    rebased,
    rendezvous_key,
)
from shardwise.launcher.nodes.network import StoreFilter, interface_of, listen, own_address
from shardwise.launcher.nodes.rendezvous import PRELOAD
from shardwise.launcher.policy import Finish, GiveUp, RankExit
from shardwise.launcher.transport import MessageStream
from shardwise.runs.console import counted
from shardwise.runs.events import LaunchLog, launch_log
from shardwise.runs.failure import write_variables

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from shardwise.launcher.local.processes import RankProcess
    from shardwise.launcher.local.starters import Starter
    from shardwise.launcher.nodes.node import HubLink, NodesSpec
    from shardwise.runs import RunDirectory

_POLL_S = 0.02
_HUB_FIRST_S = 60.0
"""Seconds by which torch's timeout exceeds that of the hub, which reports the missing nodes."""
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


class _RunOver(Exception):  # noqa: N818 - not an error
    """Raised when the run is over for this node, with the final message of the hub."""

    def __init__(self, over: Over) -> None:
        self.over = over


def launch_nodes(
    spec: LocalLaunch,
    nodes: NodesSpec,
    link: HubLink,
    run: RunDirectory,
    *,
    observers: Sequence[Observer] = (),
    on_assigned: Callable[[range], None] = lambda _: None,
    note: Callable[[str], None] = lambda _: None,
) -> Launched:
    """Run the target on this node's ranks, in rounds, until the hub ends the run or the connection to it is lost.

    `on_assigned` is called with the ranks of this node before each round starts them. No process outlives the call.
    """
    environ = node_environment(spec)
    if link.node == 0 or not run.environment.exists():  # nodes may share a file system
        write_variables(run, environ)
    address = own_address(nodes.local_addr) if nodes.local_addr else link.own_address
    spec = replace(spec, preload=(*spec.preload, PRELOAD) if spec.preload else ())
    signals: list[int] = []
    with (
        launch_log(run, link.node) as log,
        caught_signals(signals),
        starter_for(spec, environ, note) as starter,
    ):
        node = _Node(spec, nodes, link, run, starter, environ, interface_of(address), signals, note, log)
        try:
            while True:
                node.run_round(observers, on_assigned)
        except _RunOver as end:
            if link.lost and nodes.least < nodes.most:
                note("if node 0 still runs, start the same command again on this node to rejoin the run")
            launched = _launched(end.over, node.restarts)
            write_end(log, launched)
            return launched


def _launched(over: Over, restarts: int) -> Launched:
    exits = rebased(over.exits)
    outcome = Outcome(
        exits=exits,
        interrupted=over.interrupted,
        lost=over.lost,
        out_of_memory=over.out_of_memory,
        mismatch=over.mismatch,
    )
    decision = GiveUp(cause=over.cause) if over.failed else Finish(exit_code=over.exit_code)
    return Launched(decision=decision, outcome=outcome, restarts=restarts)


@dataclass
class _Node:
    """The state of this node in a run; its supervisor uses it as `OtherNodes`."""

    spec: LocalLaunch
    nodes: NodesSpec
    link: HubLink
    run: RunDirectory
    starter: Starter
    environ: Mapping[str, str]
    interface: str
    """Network interface at which ranks of other nodes reach the ranks of this node."""
    signals: list[int]
    """Stop signals that arrived while no rank was running."""
    note: Callable[[str], None]
    log: LaunchLog
    round: int = 0
    restarts: int = 0
    join: JoinRound | None = None
    stop: Stop | None = None
    over: Over | None = None
    """The hub's final message; like `join` and `stop`, the latest of its type."""
    broken: str = ""
    """Reason for which this node stopped its ranks in the last round; empty if the hub stopped them."""
    rendezvous: RankProcess | None = None
    store_filter: StoreFilter = field(default_factory=StoreFilter)
    """Filter of the round's store; used on node 0."""
    has_reported_ready: bool = False
    is_leaving: bool = False

    def run_round(self, observers: Sequence[Observer], on_assigned: Callable[[range], None]) -> None:
        """Run one round and return when the hub announces the next; raise _RunOver if the run is over."""
        with self._store() as store:
            join = self._wait_for_round(store)
            if join.restarts > self.restarts and self.link.node == 0:
                reason = self.broken or (self.stop.reason if self.stop else "")
                self.log.restart(join.restarts, self.nodes.max_restarts, reason)
            self.round, self.restarts = join.round, join.restarts
            try:
                self._join_and_run(join, store, observers, on_assigned)
            finally:
                if self.rendezvous is not None:
                    self.rendezvous.end()
            while self.round == join.round:
                self._poll()

    def _join_and_run(
        self,
        join: JoinRound,
        store: RankProcess | None,
        observers: Sequence[Observer],
        on_assigned: Callable[[range], None],
    ) -> None:
        members = self._join_others(join)
        self.store_filter.close()
        if members is None:
            self.link.send(NodeEnded(join.round, ()))
        elif members.refusal:
            self.link.send(NodeEnded(join.round, (), lost=f"the nodes did not join ({members.refusal})"))
        else:
            self.link.send(RoundJoined(join.round, members.nodes))
            self._run_ranks(join, members, store, observers, on_assigned)

    @property
    def _stopped(self) -> Stop | None:
        """The hub's request to stop the ranks of this round, or None."""
        return self.stop if self.stop is not None and self.stop.round == self.round else None

    def requested_stop(self) -> int:
        """Return the signal of a graceful stop that the hub requested; 0 without a request."""
        return self._stopped.signal if self._stopped else 0

    def report_failure(self, exit_: RankExit) -> None:
        """Report a failed rank to the hub."""
        self.link.send(Failing(self.round, exit_.is_certain))

    def report_signal(self, number: int) -> None:
        """Report a stop signal to the hub; a second one while no rank runs raises KeyboardInterrupt."""
        self.is_leaving = True
        self.link.send(Leaving(Signals(number)))

    @contextlib.contextmanager
    def _store(self) -> Iterator[RankProcess | None]:
        """Start the store of this round and report its port if this is node 0; else report that this node is ready."""
        if self.link.node != 0:
            if not self.has_reported_ready:
                self.link.send(NodeReady())
                self.has_reported_ready = True
            yield None
            return
        with self.store_filter.opened(listen(self.link.hub_address, 0), self.note) as listener:
            store = self.starter.start_store(listener)
            try:
                self.link.send(Opened(self.round, listener.getsockname()[1]))
                yield store
            finally:
                store.end()

    def _wait_for_round(self, store: RankProcess | None) -> JoinRound:
        while self.join is None or self.join.round < self.round:
            self._poll()
            broken = describe_lost(self.starter, store)
            if broken:
                raise _RunOver(Over(failed=True, lost=broken))
        join, self.join = self.join, None
        return join

    def _join_others(self, join: JoinRound) -> RendezvousResult | None:
        """Join the other nodes by torch's rendezvous; return None if the hub cancels the round."""
        ours, theirs = socket.socketpair()
        order = _rendezvous_request(join, self.link, self.nodes, self.spec.nproc, self.environ)
        answer: MessageStream[RendezvousResult] = MessageStream(ours, RendezvousResult)
        with theirs:
            self.rendezvous = self.starter.start_rendezvous(order, theirs)
        try:
            while self._stopped is None and self.round == join.round:
                self._poll()
                found = answer.receive()
                if found is None:
                    return RendezvousResult(refusal="the rendezvous process exited")
                if found:
                    return found[0]
        finally:
            answer.close()
        return None

    def _run_ranks(
        self,
        join: JoinRound,
        members: RendezvousResult,
        store: RankProcess | None,
        observers: Sequence[Observer],
        on_assigned: Callable[[range], None],
    ) -> None:
        variables = {name: self.interface for name in _INTERFACES if self.interface and name not in self.environ}
        assignment = _assign(self.link, join, members, variables)
        ranks = range(assignment.first_rank, assignment.first_rank + self.spec.nproc)
        on_assigned(ranks)
        self.note(_describe(self.link.node, assignment, ranks, self.interface))
        started = start_ranks(self.spec, self.run, self.starter, assignment)
        write_start(self.log, self.spec, assignment, started)
        outcome = supervise(
            started,
            failure_of=partial(find_failure, self.run),
            ended=partial(write_exit, self.log),
            observers=observers,
            lost=partial(self._lost, store),
            other_nodes=self,
            grace_s=self.spec.grace_s,
        )
        ended = _ended(self.round, outcome, self.run, is_stopped=self._stopped is not None)
        self.broken = ended.lost
        self.link.send(ended)

    def _lost(self, store: RankProcess | None) -> str:
        """Return why the ranks cannot continue: the hub's stop request or a lost connection or process; else empty."""
        self._receive()
        if self._stopped and not self._stopped.signal:
            return self._stopped.reason
        return self.link.lost or describe_lost(self.starter, store)

    def _poll(self) -> None:
        """Wait for _POLL_S and process signals and messages; raise _RunOver if the run is over."""
        time.sleep(_POLL_S)
        if self.signals:
            if self.is_leaving:
                raise KeyboardInterrupt
            self.report_signal(self.signals.pop())
        lost = self.link.lost  # read first, because messages that arrived before the loss are processed below
        self._receive()
        if self.over is not None:
            raise _RunOver(self.over)
        if lost:
            raise _RunOver(Over(failed=True, lost=lost))

    def _receive(self) -> None:
        """Process the messages of the hub."""
        for message in self.link.take():
            match message:
                case Admit(addresses):
                    self.store_filter.admit(addresses)
                case Note(text, is_logged):
                    self.note(text)
                    if is_logged:
                        self.log.note(text)
                case JoinRound():
                    self.join = message
                case Stop():
                    self.stop = message
                case Again(round_):
                    self.round = round_
                case Over():
                    self.over = message


def _rendezvous_request(
    join: JoinRound, link: HubLink, nodes: NodesSpec, nproc: int, environ: Mapping[str, str]
) -> StartRendezvous:
    """Return the request to join the rendezvous of a round at the store of node 0."""
    run_id = f"{nodes.run_id}.{join.round}"
    return StartRendezvous(
        host=link.hub_address,
        port=join.port,
        run_id=run_id,
        node=link.node,
        nproc=nproc,
        least=join.least,
        most=join.most,
        join_s=nodes.join_s + _HUB_FIRST_S,
        last_call_s=join.last_call_s,
        environ=dict(environ),
        key=rendezvous_key(nodes.shared_secret, run_id),
    )


def _ended(round_: int, outcome: Outcome, run: RunDirectory, *, is_stopped: bool) -> NodeEnded:
    """Return the report of this node's exits to the hub; without a reason if the hub requested the stop."""
    return NodeEnded(
        round_,
        rebased(gather_evidence(outcome.exits, run)),
        lost="" if is_stopped else outcome.lost,
        by_verdict=outcome.by_verdict and not is_stopped,
        out_of_memory=outcome.out_of_memory,
    )


def _assign(link: HubLink, join: JoinRound, members: RendezvousResult, variables: Mapping[str, str]) -> NodeAssignment:
    """Return the ranks of this node in the world of the nodes that joined."""
    index = members.nodes.index(link.node)
    return NodeAssignment(
        world_size=sum(members.nprocs),
        store_host=link.hub_address,
        store_port=join.port,
        restarts=join.restarts,
        first_rank=sum(members.nprocs[:index]),
        node=index,
        num_nodes=len(members.nodes),
        cores=max(1, usable_cores() * members.nprocs[index] // max(1, members.num_local)),
        variables=variables,
    )


def _describe(node: int, assignment: NodeAssignment, ranks: range, interface: str) -> str:
    which = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}-{ranks[-1]}"
    return (
        f"shardwise: node {node}, {counted(assignment.num_nodes, 'node')} in total: {which} of {assignment.world_size};"
        f" store at {assignment.store_host}:{assignment.store_port}; gloo and nccl on {interface or 'any interface'}"
    )
