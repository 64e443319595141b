"""What ranks that failed leave behind beside their exceptions: the end of their logs, and their last collectives."""

from __future__ import annotations

import re
import signal
from dataclasses import replace
from typing import TYPE_CHECKING

from shardwise.runs.last_calls import describe_mismatch, read_last_calls

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.launcher.policy import RankExit
    from shardwise.runs import RunDirectory
    from shardwise.runs.last_calls import LastCalls

_LOG_LINES = 20
_SIZES_DIFFER = re.compile(r"Received data size doesn't match expected size|gloo::EnforceNotMet|op\.preamble")
"""What gloo prints of a message that is longer than the buffer of the collective that receives it."""


def gather_evidence(exits: Sequence[RankExit], run: RunDirectory) -> tuple[RankExit, ...]:
    """Return the exits with logs and last collectives, if any rank ended badly; to be called once all have ended.

    Ranks that were stopped count too: the one that failed may be on another node.
    """
    if all(exit_.returncode == 0 for exit_ in exits):
        return tuple(exits)
    return tuple(replace(exit_, log=end_of_log(exit_, run), calls=_last_calls(exit_, run)) for exit_ in exits)


def end_of_log(exit_: RankExit, run: RunDirectory) -> tuple[str, ...]:
    """Return the last lines of a failed rank's standard error, for one that could not write its failure down."""
    log = run.stderr(exit_.rank)
    if exit_.failure is not None or not exit_.failed or not log.exists():
        return ()
    return tuple(log.read_text(errors="replace").splitlines()[-_LOG_LINES:])


def _last_calls(exit_: RankExit, run: RunDirectory) -> LastCalls | None:
    if exit_.failure is not None:
        return read_last_calls(run, exit_.rank, exit_.failure.traceback)
    return read_last_calls(run, exit_.rank, None if exit_.returncode == -signal.SIGABRT else "")


def find_mismatch(exits: Sequence[RankExit]) -> str:
    """Name the collectives that did not match; empty unless gloo ended a rank because sizes differ.

    Any other abort leaves peers in a collective that the rank did not reach, and that is then a consequence.
    """
    if not any(_has_seen_sizes_differ(exit_) for exit_ in exits):
        return ""
    return describe_mismatch({exit_.rank: exit_.calls for exit_ in exits if exit_.calls is not None})


def _has_seen_sizes_differ(exit_: RankExit) -> bool:
    said = (exit_.failure.message,) if exit_.failure is not None else exit_.log
    return exit_.failed and _SIZES_DIFFER.search("\n".join(said)) is not None
