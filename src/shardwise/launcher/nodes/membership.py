"""Decisions about the nodes of a run as pure functions: which nodes may join, and what follows after a round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwise.launcher.nodes.messages import LOST_S, Refused
from shardwise.launcher.policy import GiveUp, RankExit, Restart, decide, root_cause
from shardwise.runs.console import PREEMPTED, counted

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from shardwise.launcher.nodes.messages import Hello


@dataclass(frozen=True, kw_only=True)
class NodeLimits:
    """The minimum and maximum number of nodes of a run, its restarts and its join timeouts."""

    least: int
    most: int
    """Maximum number of nodes; the run continues with any number from `least` to `most`."""
    max_restarts: int = 0
    join_s: float = 600.0
    """Seconds for the nodes of the first round to join."""
    last_call_s: float = 5.0
    """Seconds to wait for more nodes after `least` nodes have joined the first round."""
    lost_s: float = LOST_S
    """Seconds without a heartbeat after which a node is lost."""


@dataclass(frozen=True, kw_only=True)
class RoundStatus:
    """The status of a round after all of its ranks have exited or their nodes are lost."""

    exits: tuple[RankExit, ...]
    gone: tuple[str, ...] = ()
    """Descriptions of the nodes that were lost."""
    broken: str = ""
    """Description of a required process that exited; empty if none did."""
    verdict: str = ""
    """The verdict of the observer that stopped the ranks; empty if none did."""
    num_nodes: int
    """Number of nodes available for the next round."""
    had_joined: bool = True
    """Whether the nodes of the run have joined a round before."""
    interrupted: int = 0
    """Signal that requested the end of the whole run; 0 without one."""
    reshaping: bool = False
    """Whether the ranks were stopped because a node joins or leaves."""
    complete: bool = False
    """Whether every node of the round, including lost ones, has reported the exits of its ranks."""

    @property
    def is_done(self) -> bool:
        """Whether all ranks exited with code 0, so that lost, joining or leaving nodes no longer matter."""
        return self.complete and all(exit_.returncode == 0 and not exit_.stopped for exit_ in self.exits)


@dataclass(frozen=True, kw_only=True)
class NextRound:
    """The decision to start all ranks again on the available nodes."""

    restarts: int
    """Number of restarts after failures; a change of nodes is not counted."""
    why: str


@dataclass(frozen=True, kw_only=True)
class EndRun:
    """The decision to end the run."""

    exit_code: int = 0
    failed: bool = False
    cause: RankExit | None = None
    lost: str = ""


def decide_round(status: RoundStatus, limits: NodeLimits, restarts: int) -> NextRound | EndRun:
    """Decide whether the run ends after a round or starts the next one."""
    if status.interrupted or status.is_done:
        saved = any(exit_.returncode == PREEMPTED for exit_ in status.exits)
        return EndRun(exit_code=PREEMPTED if saved else 0)
    if status.gone or status.broken:
        return _after_loss(status, limits, restarts)
    cause = root_cause(status.exits)
    # Ranks that stop slightly later than their peers may fail because the peers disconnect.
    if status.reshaping and status.num_nodes >= limits.least and not (cause and cause.is_certain):
        return NextRound(restarts=restarts, why=f"continuing with {counted(status.num_nodes, 'node')}")
    decision = decide(
        status.exits,
        max_restarts=limits.max_restarts,
        restarts=restarts,
        stop_requested=False,
        by_verdict=bool(status.verdict),
    )
    if isinstance(decision, Restart):
        why = f"{decision.why}; restart {decision.attempt} of {limits.max_restarts}"
        return NextRound(restarts=decision.attempt, why=why)
    if isinstance(decision, GiveUp):
        return EndRun(failed=True, cause=decision.cause, lost=status.verdict)
    return EndRun(exit_code=decision.exit_code)


def _after_loss(status: RoundStatus, limits: NodeLimits, restarts: int) -> NextRound | EndRun:
    """Decide what follows a lost node or process; a lost node explains other failures without counting as a restart."""
    if not status.gone:
        return EndRun(failed=True, lost=status.broken)
    if not status.had_joined:
        return NextRound(restarts=restarts, why="waiting for nodes again")
    if status.num_nodes >= limits.least:
        return NextRound(restarts=restarts, why=f"continuing with {counted(status.num_nodes, 'node')}")
    few = f"; the run requires {counted(limits.least, 'node')}, got {status.num_nodes}"
    return EndRun(failed=True, lost=" and ".join(status.gone) + few)


def place_node(hello: Hello, facts: Mapping[str, str], taken: Mapping[int, str], most: int, host: str) -> int | Refused:
    """Return the node number of a host that joins, or the reason why it is rejected.

    `facts` are the versions and the command of node 0 on `host`, which must be the same on every node. `taken` maps
    assigned node numbers to hosts.
    """
    for what, ours in facts.items():
        theirs = hello.facts.get(what, "nothing")
        if theirs != ours:
            return Refused(
                f"{hello.host} has {what} {theirs!r}, but node 0 ({host}) has {ours!r}",
                f"make {what} the same on all nodes",
                code="rendezvous.nodes-differ",
            )
    if hello.is_host and 0 not in taken:
        return 0
    node = hello.node_rank if hello.node_rank is not None else _first_free(taken, most)
    if node is None:
        return Refused(
            f"{hello.host} cannot join: all {most} nodes of the run have joined",
            "pass a larger --nnodes on all nodes",
            code="rendezvous.too-many-nodes",
        )
    if node >= most:
        return Refused(
            f"--node-rank on {hello.host} must be below --nnodes {most}, got {node}",
            f"pass --node-rank 0 to {most - 1}",
            code="launch.node-rank-invalid",
        )
    if node in taken or node == 0:
        return Refused(
            f"{hello.host} has --node-rank {node}, which {taken.get(node, host)} already uses",
            "pass a different --node-rank on every node",
            code="rendezvous.node-rank-taken",
        )
    return node


def _first_free(taken: Collection[int], most: int) -> int | None:
    return next((node for node in range(1, most) if node not in taken), None)
