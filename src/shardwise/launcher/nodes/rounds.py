"""The rounds of one node: open the store, meet the others, run the ranks, report, and hear what follows."""

from __future__ import annotations

import contextlib
import socket
import time
from dataclasses import dataclass, field, replace
from functools import partial
from signal import Signals
from typing import TYPE_CHECKING

from shardwise.launcher.explain import gather_evidence
from shardwise.launcher.local.attempts import (
    Launched,
    LocalLaunch,
    NodePlace,
    describe_lost,
    find_failure,
    node_environment,
    start_ranks,
    starter_for,
    write_end,
    write_exit,
    write_start,
)
from shardwise.launcher.local.orders import Assembly, StartMeeting
from shardwise.launcher.local.supervise import Observer, Outcome, caught_signals, supervise
from shardwise.launcher.nodes.authentication import rendezvous_key
from shardwise.launcher.nodes.meeting import PRELOAD
from shardwise.launcher.nodes.messages import (
    Admit,
    Again,
    Failing,
    Leaving,
    Meet,
    Met,
    NodeEnded,
    NodeReady,
    Opened,
    Over,
    Stop,
    rebased,
)
from shardwise.launcher.nodes.network import Door, interface_of, listen, own_address
from shardwise.launcher.policy import Finish, GiveUp, RankExit
from shardwise.launcher.transport import MessageStream
from shardwise.runs.events import LaunchLog, launch_log
from shardwise.runs.failure import write_variables

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from shardwise.launcher.local.processes import RankProcess
    from shardwise.launcher.local.starters import Starter
    from shardwise.launcher.nodes.link import HubLink
    from shardwise.launcher.nodes.node import NodesSpec
    from shardwise.runs import RunDirectory

_LOOK_S = 0.02
_HUB_FIRST_S = 60.0
"""By so much torch waits longer than the hub, which knows whom it missed."""
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


class _Ended(Exception):  # noqa: N818 - no error: the run is over for this node
    """How the run ended for this node."""

    def __init__(self, over: Over) -> None:
        self.over = over


def launch_nodes(
    spec: LocalLaunch,
    nodes: NodesSpec,
    link: HubLink,
    run: RunDirectory,
    *,
    observers: Sequence[Observer] = (),
    placed: Callable[[range], None] = lambda _: None,
    note: Callable[[str], None] = lambda _: None,
) -> Launched:
    """Run the target on this node's ranks, round after round, until the hub or its loss ends the run.

    `placed` hears which ranks are this node's, before each round starts them. Nothing is left running after.
    """
    environ = node_environment(spec)
    if link.node == 0 or not run.environment.exists():  # nodes may share a disk
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
                node.run_round(observers, placed)
        except _Ended as end:
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
    """This node's side of a run; also what its supervisor knows of the other nodes."""

    spec: LocalLaunch
    nodes: NodesSpec
    link: HubLink
    run: RunDirectory
    starter: Starter
    environ: Mapping[str, str]
    interface: str
    """By which ranks of other nodes reach those of this one."""
    signals: list[int]
    """That came while no rank was running."""
    note: Callable[[str], None]
    log: LaunchLog
    round: int = 0
    restarts: int = 0
    meet: Meet | None = None
    stop: Stop | None = None
    over: Over | None = None
    """The last of each that the hub said."""
    broken: str = ""
    """For which this node stopped its ranks of the last round by itself."""
    meeting: RankProcess | None = None
    door: Door = field(default_factory=Door)
    """Of the store, on node 0."""
    has_greeted: bool = False
    is_leaving: bool = False

    def run_round(self, observers: Sequence[Observer], placed: Callable[[range], None]) -> None:
        """Take part in one round, and return when the hub calls the next; _Ended when there is none."""
        with self._store() as store:
            meet = self._wait_for_meet(store)
            if meet.restarts > self.restarts and self.link.node == 0:
                reason = self.broken or (self.stop.reason if self.stop else "")
                self.log.restart(meet.restarts, self.nodes.max_restarts, reason)
            self.round, self.restarts = meet.round, meet.restarts
            try:
                self._take_part(meet, store, observers, placed)
            finally:
                if self.meeting is not None:
                    self.meeting.end()
            while self.round == meet.round:
                self._look()

    def _take_part(
        self,
        meet: Meet,
        store: RankProcess | None,
        observers: Sequence[Observer],
        placed: Callable[[range], None],
    ) -> None:
        assembly = self._assemble(meet)
        self.door.shut()
        if assembly is None:
            self.link.send(NodeEnded(meet.round, ()))
        elif assembly.refusal:
            self.link.send(NodeEnded(meet.round, (), lost=f"the nodes did not meet ({assembly.refusal})"))
        else:
            self.link.send(Met(meet.round, assembly.nodes))
            self._run_ranks(meet, assembly, store, observers, placed)

    @property
    def _stopped(self) -> Stop | None:
        """The hub's word to stop this round, None when there is none."""
        return self.stop if self.stop is not None and self.stop.round == self.round else None

    def asked(self) -> int:
        """Return the signal with which the other nodes want the ranks to stop."""
        return self._stopped.signal if self._stopped else 0

    def failing(self, exit_: RankExit) -> None:
        """Tell the hub of a rank that ended badly."""
        self.link.send(Failing(self.round, exit_.is_certain))

    def leaving(self, number: int) -> None:
        """Tell the hub of a signal to stop; the next that comes while no rank runs is the second."""
        self.is_leaving = True
        self.link.send(Leaving(Signals(number)))

    @contextlib.contextmanager
    def _store(self) -> Iterator[RankProcess | None]:
        """Serve the store of this round if this is node 0, and say so."""
        if self.link.node != 0:
            if not self.has_greeted:
                self.link.send(NodeReady())
                self.has_greeted = True
            yield None
            return
        # A fresh server on a fresh port for every round: keys of a dead round can mislead nobody.
        with self.door.opened(listen(self.link.hub_address, 0), self.note) as listener:
            store = self.starter.start_store(listener)
            try:
                self.link.send(Opened(self.round, listener.getsockname()[1]))
                yield store
            finally:
                store.end()

    def _wait_for_meet(self, store: RankProcess | None) -> Meet:
        while self.meet is None or self.meet.round < self.round:
            self._look()
            broken = describe_lost(self.starter, store)
            if broken:
                raise _Ended(Over(failed=True, lost=broken))
        meet, self.meet = self.meet, None
        return meet

    def _assemble(self, meet: Meet) -> Assembly | None:
        """Meet the other nodes by torch's rendezvous; None when the hub calls it off."""
        ours, theirs = socket.socketpair()
        order = _meeting_order(meet, self.link, self.nodes, self.spec.nproc, self.environ)
        answer: MessageStream[Assembly] = MessageStream(ours, Assembly)
        with theirs:
            self.meeting = self.starter.start_meeting(order, theirs)
        try:
            while self._stopped is None and self.round == meet.round:
                self._look()
                found = answer.receive()
                if found is None:
                    return Assembly(refusal="its process ended")
                if found:
                    return found[0]
        finally:
            answer.close()
        return None

    def _run_ranks(
        self,
        meet: Meet,
        assembly: Assembly,
        store: RankProcess | None,
        observers: Sequence[Observer],
        placed: Callable[[range], None],
    ) -> None:
        variables = {name: self.interface for name in _INTERFACES if self.interface and name not in self.environ}
        place = _place(self.link, meet, assembly, variables)
        ranks = range(place.first_rank, place.first_rank + self.spec.nproc)
        placed(ranks)
        self.note(_describe(self.link.node, place, ranks, self.interface))
        started = start_ranks(self.spec, self.run, self.starter, place)
        write_start(self.log, self.spec, place, started)
        outcome = supervise(
            started,
            failure_of=partial(find_failure, self.run),
            ended=partial(write_exit, self.log),
            observers=observers,
            lost=partial(self._lost, store),
            elsewhere=self,
            grace_s=self.spec.grace_s,
        )
        ended = _ended(self.round, outcome, self.run, is_stopped=self._stopped is not None)
        self.broken = ended.lost
        self.link.send(ended)

    def _lost(self, store: RankProcess | None) -> str:
        """Say what the ranks cannot go on without, here or elsewhere."""
        self._listen()
        if self._stopped and not self._stopped.signal:
            return self._stopped.reason
        return self.link.lost or describe_lost(self.starter, store)

    def _look(self) -> None:
        """Wait a little and take in what is new; _Ended when there is nothing to wait for any more."""
        time.sleep(_LOOK_S)
        if self.signals:
            if self.is_leaving:
                raise KeyboardInterrupt
            self.leaving(self.signals.pop())
        lost = self.link.lost  # before the look at what it said last
        self._listen()
        if self.over is not None:
            raise _Ended(self.over)
        if lost:
            raise _Ended(Over(failed=True, lost=lost))

    def _listen(self) -> None:
        """Take in what the hub said."""
        for message in self.link.take():
            match message:
                case Admit(addresses):
                    self.door.admit(addresses)
                case Meet():
                    self.meet = message
                case Stop():
                    self.stop = message
                case Again(round_):
                    self.round = round_
                case Over():
                    self.over = message


def _meeting_order(meet: Meet, link: HubLink, nodes: NodesSpec, nproc: int, environ: Mapping[str, str]) -> StartMeeting:
    """Return the order to join the rendezvous of a round, at the store of node 0."""
    run_id = f"{nodes.run_id}.{meet.round}"
    return StartMeeting(
        host=link.hub_address,
        port=meet.port,
        run_id=run_id,
        node=link.node,
        nproc=nproc,
        least=meet.least,
        most=meet.most,
        join_s=nodes.join_s + _HUB_FIRST_S,
        last_call_s=meet.last_call_s,
        environ=dict(environ),
        key=rendezvous_key(nodes.shared_secret, run_id),
    )


def _ended(round_: int, outcome: Outcome, run: RunDirectory, *, is_stopped: bool) -> NodeEnded:
    """Return what the hub hears of the ranks of this node; if it stopped them itself, not why they were stopped."""
    return NodeEnded(
        round_,
        rebased(gather_evidence(outcome.exits, run)),
        lost="" if is_stopped else outcome.lost,
        by_verdict=outcome.by_verdict and not is_stopped,
        out_of_memory=outcome.out_of_memory,
    )


def _place(link: HubLink, meet: Meet, assembly: Assembly, variables: Mapping[str, str]) -> NodePlace:
    """Say where this node's ranks stand in the world that the nodes have agreed on."""
    index = assembly.nodes.index(link.node)
    return NodePlace(
        world_size=sum(assembly.nprocs),
        store_host=link.hub_address,
        store_port=meet.port,
        restarts=meet.restarts,
        first_rank=sum(assembly.nprocs[:index]),
        node=index,
        num_nodes=len(assembly.nodes),
        variables=variables,
    )


def _describe(node: int, place: NodePlace, ranks: range, interface: str) -> str:
    which = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}-{ranks[-1]}"
    nodes = "alone" if place.num_nodes == 1 else f"one of {place.num_nodes}"
    return (
        f"shardwise: node {node}, {nodes}: {which} of {place.world_size};"
        f" store at {place.store_host}:{place.store_port}; gloo and nccl on {interface or 'any interface'}"
    )
