"""The explanation of a failed run: the root cause last, with its rank, traceback, last output and fix."""

from __future__ import annotations

import re
import signal
import socket
import time
from dataclasses import replace
from textwrap import shorten
from typing import TYPE_CHECKING

from shardwise.errors import with_code
from shardwise.launcher.policy import RankExit, root_cause
from shardwise.runs.call_reader import describe_mismatch, read_last_calls
from shardwise.runs.console import describe_exit
from shardwise.runs.directory import describe_kept, write_error
from shardwise.runs.failure import DISK_FULL, PEER_LOST, Failure, translate

if TYPE_CHECKING:
    from collections.abc import Container, Sequence
    from pathlib import Path

    from shardwise.launcher.local.supervise import Outcome
    from shardwise.runs import RunDirectory
    from shardwise.runs.call_reader import LastCalls


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
        known = translate("\n".join(_own_report(cause)), cause.returncode)
        return f"{_name(cause)} failed first: {_summary(cause)}" + (f": {known}" if known else "")
    return f"{_name(cause)} left first: exit code 0 while its peers still needed it; they lost their connection"


def _name(exit_: RankExit) -> str:
    return f"rank {exit_.rank} on {exit_.node_name}" if exit_.node_name else f"rank {exit_.rank}"


def _summary(exit_: RankExit) -> str:
    if exit_.failure is None:
        return describe_exit(exit_.returncode)
    first_line = shorten((exit_.failure.message.splitlines() or [""])[0], _MOST_LETTERS, placeholder=" ...")
    where = "" if exit_.node_name else f" (on {exit_.failure.host})"
    return f"{exit_.failure.kind}: {with_code(first_line, exit_.failure.code)}{where}"


def _is_full(cause: RankExit) -> bool:
    known = translate("\n".join(_own_report(cause)), cause.returncode)
    return known is not None and known.name == DISK_FULL


def _own_report(exit_: RankExit) -> tuple[str, ...]:
    """What a rank recorded of its end: its exception, else the end of its log."""
    return (exit_.failure.kind, exit_.failure.message) if exit_.failure is not None else exit_.log


def _evidence(cause: RankExit, run: RunDirectory, *, is_shown: bool) -> str:
    """The rank's own traceback, or where it is if it was shown; the end of its log when it could not write one."""
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


# What ranks that failed leave behind beside their exceptions: the end of their logs, and their last collectives.


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
    """Return the last lines of a failed rank's standard error, for one that could not record its failure."""
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
    lines = (exit_.failure.message,) if exit_.failure is not None else exit_.log
    return exit_.failed and _SIZES_DIFFER.search("\n".join(lines)) is not None


# The uncaught exception of a rank that is a fresh process, read from its standard error.


UNCAUGHT = (1, 120)
"""Python's exit codes after an uncaught exception, and after buffers that could not be flushed at its end."""
_MOST_BYTES = 1 << 16
_PEER_ERRORS = ("RuntimeError", "DistNetworkError", "DistStoreError", "DistBackendError", "ConnectionResetError")
_TRACEBACK = "Traceback (most recent call last):\n"
_PREFIX = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)
"""What torch puts before each line of a traceback once a process group is there."""
_LAST = re.compile(r"^([A-Za-z_][\w.]*)(?:: |$)(.*)\Z", re.DOTALL | re.MULTILINE)
"""From the line that is not indented, which names the exception, to the end."""


def read_exception(log: Path, rank: int) -> Failure | None:
    """Return the uncaught exception at the end of a rank's standard error, None when there is no traceback."""
    try:
        text = log.read_bytes()[-_MOST_BYTES:].decode(errors="replace")
    except FileNotFoundError:  # it kept the terminal
        return None
    _, found, traceback = _PREFIX.sub("", text).rpartition(_TRACEBACK)
    match = _LAST.search(traceback) if found else None
    if match is None:
        return None
    kind, message = match[1].rpartition(".")[2], match[2].strip()
    return Failure(
        rank=rank,
        host=socket.gethostname(),
        at=time.time(),
        kind=kind,
        message=message,
        traceback=found + traceback,
        exit_code=UNCAUGHT[0],
        peer_lost=kind in _PEER_ERRORS and PEER_LOST.search(message) is not None,
    )


def unwritable(run: RunDirectory, rank: int, returncode: int) -> Failure | None:
    """Return the failure of a rank that left none since nothing can be written there; None where something can."""
    error = write_error(run.path)
    if error is None:
        return None
    return Failure(
        rank=rank,
        host=socket.gethostname(),
        at=time.time(),
        kind="OSError",
        message=f"{error.strerror}: nothing can be written to {run.path}, not even the traceback of this rank",
        traceback="",
        exit_code=returncode,
        peer_lost=False,
    )
