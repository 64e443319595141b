"""Pure decisions about the nodes of a run: who may join, and what follows when a round of all ranks has ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwise.launcher.nodes.messages import Refused
from shardwise.launcher.policy import GiveUp, RankExit, Restart, decide, root_cause
from shardwise.runs.console import PREEMPTED, counted

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from shardwise.launcher.nodes.messages import Hello


@dataclass(frozen=True, kw_only=True)
class NodeLimits:
    """Between which bounds a run changes its nodes, and how long it waits for them."""

    least: int
    most: int
    """Nodes: the run continues with any number between the two."""
    max_restarts: int = 0
    join_s: float = 600.0
    """For the first round to have its nodes."""
    last_call_s: float = 5.0
    """For more nodes, once the first round has enough."""


@dataclass(frozen=True, kw_only=True)
class RoundStatus:
    """What is known when all ranks of a round have ended, or their node is gone."""

    exits: tuple[RankExit, ...]
    gone: tuple[str, ...] = ()
    """Nodes that were lost, one sentence each."""
    broken: str = ""
    """What else the ranks could not continue without, and how it ended."""
    verdict: str = ""
    """The verdict for which the ranks were stopped."""
    num_nodes: int
    """That could make the next round."""
    had_joined: bool = True
    """Whether the run ever had its nodes together."""
    interrupted: int = 0
    """Signal by which somebody asked the whole run to stop."""
    reshaping: bool = False
    """The ranks were asked to stop because a node joins or leaves."""
    complete: bool = False
    """Every node of the round has reported how its ranks ended, also those that are gone."""

    @property
    def is_done(self) -> bool:
        """Whether the script ran to its end on all ranks: then no loss, and no node that joins or leaves, matters."""
        return self.complete and all(exit_.returncode == 0 and not exit_.stopped for exit_ in self.exits)


@dataclass(frozen=True, kw_only=True)
class NextRound:
    """All ranks start again on the nodes that are there."""

    restarts: int
    """Failures so far; a change of nodes is none."""
    why: str


@dataclass(frozen=True, kw_only=True)
class EndRun:
    """No further round."""

    exit_code: int = 0
    failed: bool = False
    cause: RankExit | None = None
    lost: str = ""


def decide_round(status: RoundStatus, limits: NodeLimits, restarts: int) -> NextRound | EndRun:
    """Return what follows a round."""
    if status.interrupted or status.is_done:
        saved = any(exit_.returncode == PREEMPTED for exit_ in status.exits)
        return EndRun(exit_code=PREEMPTED if saved else 0)
    if status.gone or status.broken:
        return _after_loss(status, limits, restarts)
    cause = root_cause(status.exits)
    # Ranks that stop a moment later than their peers see them go away.
    if status.reshaping and status.num_nodes >= limits.least and not (cause and cause.is_certain):
        return NextRound(restarts=restarts, why=f"continuing with {_count(status.num_nodes)}")
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
    """A lost node explains whatever else went wrong, and is not a failure of the job."""
    if not status.gone:
        return EndRun(failed=True, lost=status.broken)
    if not status.had_joined:
        return NextRound(restarts=restarts, why="waiting for nodes again")
    if status.num_nodes >= limits.least:
        return NextRound(restarts=restarts, why=f"continuing with {_count(status.num_nodes)}")
    few = f", and {_count(status.num_nodes)} left of at least {limits.least}"
    return EndRun(failed=True, lost=" and ".join(status.gone) + few)


def _count(nodes: int) -> str:
    return counted(nodes, "node")


def place_node(hello: Hello, facts: Mapping[str, str], taken: Mapping[int, str], most: int, host: str) -> int | Refused:
    """Return which node of the run a newcomer is, or why it cannot be one; `taken` are hosts by node.

    `facts` are those of node 0, on `host`: versions and command, which every node must share.
    """
    for what, ours in facts.items():
        theirs = hello.facts.get(what, "nothing")
        if theirs != ours:
            return Refused(
                f"{hello.host} has {what} {theirs!r}, node 0 ({host}) has {ours!r}",
                f"make {what} the same on all nodes",
                code="rendezvous.nodes-differ",
            )
    if hello.is_host and 0 not in taken:
        return 0
    node = hello.node_rank if hello.node_rank is not None else _first_free(taken, most)
    if node is None:
        return Refused(
            f"all {most} nodes of the run are here, and {hello.host} is one more",
            "raise --nnodes",
            code="rendezvous.too-many-nodes",
        )
    if node >= most:
        return Refused(
            f"--node-rank {node} on {hello.host} is not below --nnodes {most}",
            f"use 0 to {most - 1}",
            code="launch.node-rank-invalid",
        )
    if node in taken or node == 0:
        return Refused(
            f"{hello.host} joins as --node-rank {node}, which {taken.get(node, host)} has already",
            "give every node its own --node-rank",
            code="rendezvous.node-rank-taken",
        )
    return node


def _first_free(taken: Collection[int], most: int) -> int | None:
    return next((node for node in range(1, most) if node not in taken), None)
