"""Pure decisions of the launcher: which exit was the root cause, and whether to try again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwise.run.exitcodes import BAD_INPUT, PREEMPTED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.run.failure import Failure


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

    @property
    def failed(self) -> bool:
        """Whether this rank ended badly by itself."""
        return self.returncode != 0 and not self.stopped

    @property
    def is_certain(self) -> bool:
        """Whether no other rank's exit could explain this one: it was killed, or raised an error of its own."""
        return self.failed and _kind(self) <= 1


@dataclass(frozen=True, kw_only=True)
class Finish:
    """All ranks are done; the launch ends with this exit code."""

    exit_code: int = 0


@dataclass(frozen=True, kw_only=True)
class Restart:
    """Start all ranks again, as attempt number `attempt`."""

    attempt: int
    cause: RankExit


@dataclass(frozen=True, kw_only=True)
class GiveUp:
    """The launch failed because of this exit."""

    cause: RankExit


Decision = Finish | Restart | GiveUp


def decide(exits: Sequence[RankExit], *, max_restarts: int, restarts: int, stop_requested: bool) -> Decision:
    """Say what follows when the last rank of an attempt has ended."""
    if stop_requested:
        # Ranks were asked to leave: those that saved say so, and how the others took it is not a failure.
        return Finish(exit_code=PREEMPTED if any(exit_.returncode == PREEMPTED for exit_ in exits) else 0)
    cause = root_cause(exits)
    if cause is None:
        lost = next((exit_ for exit_ in exits if exit_.stopped), None)
        return Finish() if lost is None else GiveUp(cause=lost)  # all were stopped, and no rank was to blame
    if restarts < max_restarts and not _is_hopeless(cause):
        return Restart(attempt=restarts + 1, cause=cause)
    return GiveUp(cause=cause)


def root_cause(exits: Sequence[RankExit]) -> RankExit | None:
    """Return the exit that explains the others: by kind first, then by time; None when all went well."""
    failed = [exit_ for exit_ in exits if exit_.failed]
    return min(failed, key=lambda exit_: (_kind(exit_), _when(exit_), exit_.rank), default=None)


def _is_hopeless(cause: RankExit) -> bool:
    """Bad input stays bad however often it is tried."""
    return cause.failure is not None and cause.failure.exit_code == BAD_INPUT


def _kind(exit_: RankExit) -> int:
    if exit_.returncode < 0 and exit_.failure is None:
        return 0  # killed by a signal, or out of memory
    if exit_.failure is None:
        return 2  # left early without a word
    return 3 if exit_.failure.peer_lost else 1


def _when(exit_: RankExit) -> float:
    return exit_.failure.at if exit_.failure is not None else exit_.at
