"""Pure decisions of the launcher: which exit was the root cause, and whether to try again."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwise.runs.call_reader import LastCalls  # noqa: TC001 - read at run time by msgspec
from shardwise.runs.console import BAD_INPUT, PREEMPTED
from shardwise.runs.failure import Failure  # noqa: TC001 - read at run time by msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, kw_only=True)
class RankExit:
    """How one rank ended."""

    rank: int
    returncode: int
    """Negative: ended by that signal."""
    failure: Failure | None = None
    stopped: bool = False
    """It ended after the launcher had asked it to stop, so its end explains nothing."""
    at: float = 0.0
    """Seconds on the launcher's clock when the end was seen."""
    node_name: str = ""
    """Node that it ran on; empty when there is one node."""
    log: tuple[str, ...] = ()
    """Last lines of its standard error, if it could not write its failure down."""
    calls: LastCalls | None = None
    """Its last collectives, where they were recorded and a failure is to be explained."""

    @property
    def failed(self) -> bool:
        """Whether this rank ended badly by itself."""
        return self.returncode != 0 and not self.stopped

    @property
    def is_certain(self) -> bool:
        """Whether no other rank's exit could explain this one: it was killed, or raised an error of its own.

        An abort may follow from a peer: gloo aborts the rank that receives more than it expects, NCCL's watchdog one
        whose peer is gone. Where that peer was shows in its exception, which it needs time to write.
        """
        return self.failed and _kind(self) <= _RAISED and self.returncode != -signal.SIGABRT


@dataclass(frozen=True, kw_only=True)
class Finish:
    """All ranks are done; the launch ends with this exit code."""

    exit_code: int = 0


@dataclass(frozen=True, kw_only=True)
class Restart:
    """Start all ranks again, as attempt number `attempt`."""

    attempt: int
    cause: RankExit | None
    """None when a verdict stopped the ranks, such as one on a hang."""

    @property
    def why(self) -> str:
        """What happened, as a sentence."""
        if self.cause is None:
            return "a verdict stopped the ranks"
        where = f" on {self.cause.node_name}" if self.cause.node_name else ""
        return f"rank {self.cause.rank}{where} failed"


@dataclass(frozen=True, kw_only=True)
class GiveUp:
    """The launch failed because of this exit; None when no rank was to blame."""

    cause: RankExit | None


Decision = Finish | Restart | GiveUp


def decide(
    exits: Sequence[RankExit], *, max_restarts: int, restarts: int, stop_requested: bool, by_verdict: bool = False
) -> Decision:
    """Return what follows when the last rank of an attempt has ended; `by_verdict` if an observer stopped the ranks."""
    if stop_requested:
        # Ranks were asked to stop: those that saved report it by their exit code, and the others did not fail.
        return Finish(exit_code=PREEMPTED if any(exit_.returncode == PREEMPTED for exit_ in exits) else 0)
    if exits and not by_verdict and all(exit_.returncode == PREEMPTED for exit_ in exits):
        return Finish(exit_code=PREEMPTED)  # somebody asked the ranks themselves
    cause = root_cause(exits)
    if cause is None and not any(exit_.stopped for exit_ in exits):
        return Finish()
    is_worth_it = by_verdict if cause is None else not _is_hopeless(cause)
    if restarts < max_restarts and is_worth_it:
        return Restart(attempt=restarts + 1, cause=cause)
    return GiveUp(cause=cause)


def root_cause(exits: Sequence[RankExit]) -> RankExit | None:
    """Return the exit that explains the others: by kind first, then by time; None when all went well."""
    failed = [exit_ for exit_ in exits if exit_.failed]
    cause = min(failed, key=lambda exit_: (_kind(exit_), _when(exit_), exit_.rank), default=None)
    if cause is None or _kind(cause) != _PEER_LOST:
        return cause
    # All that failed report that a peer went away: the first that left before them, with exit code 0, is the one.
    left = [exit_ for exit_ in exits if exit_.returncode == 0 and not exit_.stopped and exit_.at <= cause.at]
    return min(left, key=lambda exit_: (exit_.at, exit_.rank), default=cause)


def _is_hopeless(cause: RankExit) -> bool:
    """Bad input stays bad however often it is tried."""
    return cause.failure is not None and cause.failure.exit_code == BAD_INPUT


_KILLED, _RAISED, _LEFT, _PEER_LOST = range(4)
"""Kinds of ends, those that explain the others first: by a signal or for lack of memory; by an exception of its own;
without a record; by an error that only reports that a peer went away."""


def _kind(exit_: RankExit) -> int:
    if exit_.failure is None:
        return _KILLED if exit_.returncode < 0 else _LEFT
    return _PEER_LOST if exit_.failure.peer_lost else _RAISED


def _when(exit_: RankExit) -> float:
    return exit_.failure.at if exit_.failure is not None else exit_.at
