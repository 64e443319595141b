"""Pure decisions of the launcher: which exit was the root cause."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

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


def root_cause(exits: Sequence[RankExit]) -> RankExit | None:
    """Return the exit that explains the others: by kind first, then by time; None when all went well."""
    failed = [exit_ for exit_ in exits if exit_.failed]
    return min(failed, key=lambda exit_: (_kind(exit_), _when(exit_), exit_.rank), default=None)


def _kind(exit_: RankExit) -> int:
    if exit_.returncode < 0 and exit_.failure is None:
        return 0  # killed by a signal, or out of memory
    if exit_.failure is None:
        return 2  # left early without a word
    return 3 if exit_.failure.peer_lost else 1


def _when(exit_: RankExit) -> float:
    return exit_.failure.at if exit_.failure is not None else exit_.at
