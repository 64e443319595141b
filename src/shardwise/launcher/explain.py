"""The words in which a failed run ends: the root cause last, with its rank, its traceback and the fix."""

from __future__ import annotations

import signal
from textwrap import shorten
from typing import TYPE_CHECKING

from shardwise.errors import with_code
from shardwise.launcher.policy import RankExit, root_cause
from shardwise.runs.disk import describe_kept
from shardwise.runs.exitcodes import describe_exit
from shardwise.runs.known_errors import DISK_FULL, translate

if TYPE_CHECKING:
    from collections.abc import Container

    from shardwise.launcher.local.supervise import Outcome
    from shardwise.runs import RunDirectory

_MOST_LETTERS = 200
"""Of a message in the last line: the whole is in the traceback above."""


def explain_outcome(outcome: Outcome, run: RunDirectory, *, shown: Container[int] = ()) -> str:
    """Return the closing report of a failed launch, its last line the root cause; empty when all went well.

    `shown` are ranks whose standard error the user has seen already: it is not quoted again.
    """
    cause = root_cause(outcome.exits)
    if cause is None:
        return verdict(outcome)
    others = [exit_ for exit_ in outcome.exits if exit_.failed and exit_.rank != cause.rank]
    parts = [f"{_name(exit_)} then failed too: {_summary(exit_)}" for exit_ in others]
    parts.append(_evidence(cause, run, is_shown=cause.rank in shown))
    if _is_full(cause):
        parts.append(describe_kept(run))
    parts.append(verdict(outcome))
    return "\n".join(part for part in parts if part)


def verdict(outcome: Outcome) -> str:
    """Return the root cause of a failed launch in one sentence, with what to do if known; empty when all went well."""
    cause = root_cause(outcome.exits)
    if cause is None:
        return f"{outcome.lost}, so all ranks were stopped" if outcome.lost else ""
    if cause.returncode == -signal.SIGKILL and outcome.out_of_memory:
        return (
            f"{_name(cause)} failed first: SIGKILL by the kernel, host memory ran out:"
            " use fewer ranks, fewer DataLoader workers, smaller batches, or a larger memory limit"
        )
    if outcome.mismatch:  # the rank that failed first is then the one that received more than it had asked for
        return f"{outcome.mismatch}; so {_name(cause)} failed first: {_summary(cause)}"
    if cause.failed:
        known = translate("\n".join(_said(cause)), cause.returncode)
        return f"{_name(cause)} failed first: {_summary(cause)}" + (f": {known}" if known else "")
    return f"{_name(cause)} left first: exit code 0 while its peers still needed it; they lost their connection"


def _name(exit_: RankExit) -> str:
    return f"rank {exit_.rank} on {exit_.place}" if exit_.place else f"rank {exit_.rank}"


def _summary(exit_: RankExit) -> str:
    if exit_.failure is None:
        return describe_exit(exit_.returncode)
    first_line = shorten((exit_.failure.message.splitlines() or [""])[0], _MOST_LETTERS, placeholder=" ...")
    where = "" if exit_.place else f" (on {exit_.failure.host})"
    return f"{exit_.failure.kind}: {with_code(first_line, exit_.failure.code)}{where}"


def _is_full(cause: RankExit) -> bool:
    known = translate("\n".join(_said(cause)), cause.returncode)
    return known is not None and known.name == DISK_FULL


def _said(exit_: RankExit) -> tuple[str, ...]:
    """What a rank said of its end: its exception, else the end of its log."""
    return (exit_.failure.kind, exit_.failure.message) if exit_.failure is not None else exit_.log


def _evidence(cause: RankExit, run: RunDirectory, *, is_shown: bool) -> str:
    """The rank's own traceback, or where it stands if it was shown; the end of its log when it could not write one."""
    log = run.stderr(cause.rank)
    if cause.failure is not None and not cause.failure.traceback:
        return ""
    if cause.failure is not None and is_shown:
        kept = f", and in {log}" if log.exists() else ""
        return f"rank {cause.rank}: its traceback is above{kept}"
    if cause.failure is not None:
        return f"rank {cause.rank}:\n{cause.failure.traceback.rstrip()}"
    if not cause.log:
        return ""
    where = str(log) if log.exists() else "its standard error"  # the log of another node
    return "\n".join([f"{_name(cause)}, end of {where}:", *cause.log])
