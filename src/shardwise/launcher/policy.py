"""Decisions of the launcher as pure functions: which exit is the root cause, and whether to restart all ranks."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwise.runs.call_reader import LastCalls  # noqa: TC001 - read at run time by msgspec
from shardwise.runs.console import BAD_INPUT, PREEMPTED, describe_exit
from shardwise.runs.failure import Failure  # noqa: TC001 - read at run time by msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, kw_only=True)
class RankExit:
    """The exit of one rank: its exit code, recorded failure and last log lines."""

    rank: int
    returncode: int
    """The exit code, or the negated number of the signal that terminated the process."""
    failure: Failure | None = None
    stopped: bool = False
    """Whether the rank exited after the launcher requested a stop, so that it cannot be the root cause."""
    at: float = 0.0
    """Time at which the launcher observed the exit, in seconds of its monotonic clock."""
    node_name: str = ""
    """Node of the rank; empty in a run on one node."""
    log: tuple[str, ...] = ()
    """Last lines of standard error of a rank that failed without recording its exception."""
    calls: LastCalls | None = None
    """Last collectives of the rank; None if they were not recorded or no rank failed."""

    @property
    def left_at(self) -> float:
        """Time at which the rank destroyed its default process group, in seconds since the epoch; 0 if it did not."""
        return self.calls.left_at if self.calls is not None else 0.0

    @property
    def failed(self) -> bool:
        """Whether the rank exited with an error before the launcher requested a stop."""
        return self.returncode != 0 and not self.stopped

    @property
    def is_certain(self) -> bool:
        """Whether the rank was killed or raised an error that a failure of a different rank cannot have caused.

        An abort may be caused by a peer: gloo aborts the rank that receives more bytes than it expects, and NCCL's
        watchdog aborts a rank whose peer exited. The peer may still be writing its exception.
        """
        return self.failed and _kind(self) <= _RAISED and self.returncode != -signal.SIGABRT


@dataclass(frozen=True, kw_only=True)
class Finish:
    """The decision to end the launch with this exit code, because all ranks exited without a failure."""

    exit_code: int = 0


@dataclass(frozen=True, kw_only=True)
class Restart:
    """The decision to restart all ranks as attempt number `attempt`."""

    attempt: int
    cause: RankExit | None
    """Exit of the rank that failed first; None if an observer, such as the hang detector, stopped the ranks."""

    @property
    def why(self) -> str:
        """The reason for the restart."""
        if self.cause is None:
            return "the guard stopped the ranks"
        where = f" on {self.cause.node_name}" if self.cause.node_name else ""
        return f"rank {self.cause.rank}{where} {_what(self.cause)}"


def _what(cause: RankExit) -> str:
    """Return a short description of how the rank ended."""
    if cause.failed:
        return f"failed: {cause.failure.kind if cause.failure else describe_exit(cause.returncode).partition(' (')[0]}"
    what = "destroyed its process group" if cause.left_at else "exited"
    return f"{what} before the other ranks" + ("" if cause.left_at else ": exit code 0")


@dataclass(frozen=True, kw_only=True)
class GiveUp:
    """The decision to end the launch as failed; `cause` is None if no rank failed, as after a hang."""

    cause: RankExit | None


Decision = Finish | Restart | GiveUp


def decide(
    exits: Sequence[RankExit], *, max_restarts: int, restarts: int, stop_requested: bool, by_verdict: bool = False
) -> Decision:
    """Decide what to do after all ranks of an attempt exited; `by_verdict` means that an observer stopped the ranks."""
    num_preempted = sum(exit_.returncode == PREEMPTED for exit_ in exits)
    if stop_requested:  # exits after a requested stop are not failures
        return Finish(exit_code=PREEMPTED if num_preempted else 0)
    if exits and not by_verdict and num_preempted == len(exits):
        return Finish(exit_code=PREEMPTED)  # the stop signal was sent to the ranks directly
    # All ranks stop after the same step; the launcher ends those that have not exited when it sees the first exit.
    ends_first = any(exit_.returncode == PREEMPTED and not exit_.stopped for exit_ in exits)
    if ends_first and not by_verdict and all(exit_.returncode == PREEMPTED or exit_.stopped for exit_ in exits):
        return Finish(exit_code=PREEMPTED)
    cause = root_cause(exits)
    if cause is None and not any(exit_.stopped for exit_ in exits):
        return Finish()
    may_succeed = by_verdict if cause is None else not _is_bad_input(cause)
    if restarts < max_restarts and may_succeed:
        return Restart(attempt=restarts + 1, cause=cause)
    return GiveUp(cause=cause)


def root_cause(exits: Sequence[RankExit]) -> RankExit | None:
    """Return the exit that caused the other failures, ranked by kind and then by time; None if no rank failed."""
    failed = [exit_ for exit_ in exits if exit_.failed]
    cause = min(failed, key=lambda exit_: (_kind(exit_), _when(exit_), exit_.rank), default=None)
    if cause is None or _kind(cause) != _PEER_LOST:
        return cause
    # Every failed rank lost a peer, so the cause is the first rank that left before them: it closed its connections,
    # even if it ran on until the launcher stopped it, or it exited with code 0.
    left = [exit_ for exit_ in exits if not exit_.failed and 0.0 < exit_.left_at <= _when(cause)]
    if left:
        return min(left, key=lambda exit_: (exit_.left_at, exit_.rank))
    exited = [exit_ for exit_ in exits if exit_.returncode == 0 and not exit_.stopped and exit_.at <= cause.at]
    return min(exited, key=lambda exit_: (exit_.at, exit_.rank), default=cause)


def _is_bad_input(cause: RankExit) -> bool:
    """Return whether the failure is an input error, which a restart cannot fix."""
    return cause.failure is not None and cause.failure.exit_code == BAD_INPUT


_KILLED, _RAISED, _UNRECORDED, _PEER_LOST = range(4)
"""Kinds of failures, the most likely root cause first: terminated by a signal; an exception; an exit code without a
recorded exception; an error that only reports that a peer disconnected."""


def _kind(exit_: RankExit) -> int:
    if exit_.failure is None:
        return _KILLED if exit_.returncode < 0 else _UNRECORDED
    return _PEER_LOST if exit_.failure.peer_lost else _RAISED


def _when(exit_: RankExit) -> float:
    return exit_.failure.at if exit_.failure is not None else exit_.at
