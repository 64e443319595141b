"""The failure report of a launch: tracebacks and logs of failed ranks, then the root cause with its rank and fix."""

from __future__ import annotations

import re
import signal
import socket
import time
from dataclasses import replace
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING

from shardwise.errors import with_code
from shardwise.launcher.policy import RankExit, root_cause
from shardwise.runs.call_reader import describe_mismatch, read_last_calls
from shardwise.runs.console import BAD_INPUT, describe_exit
from shardwise.runs.directory import describe_kept, write_error
from shardwise.runs.failure import DISK_FULL, HOST_MEMORY_FIX, HOST_MEMORY_SPENT, PEER_LOST, Failure, translate
from shardwise.runs.recorder import parse_traceback, user_frame

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from shardwise.launcher.local.supervise import Outcome
    from shardwise.runs import RunDirectory
    from shardwise.runs.call_reader import LastCalls


EARLY_EXIT_FIX = "run the same number of steps on every rank, for example with DistributedSampler"
_MAX_MESSAGE_CHARS = 200
"""Maximum length of an error message in the last line; the traceback above it has the whole message."""


def explain_outcome(outcome: Outcome, run: RunDirectory, *, shown: Container[int] = ()) -> str:
    """Return the report of a failed launch, with the root cause at its end; empty if no cause is known.

    `shown` contains the ranks whose standard error was already copied to the terminal and is not printed again.
    """
    cause = root_cause(outcome.exits)
    if cause is None:
        return verdict(outcome)
    others = [exit_ for exit_ in outcome.exits if exit_.failed and exit_.rank != cause.rank]
    parts = [f"{_name(exit_)} failed later: {_summary(exit_)}" for exit_ in others]
    parts.append(_evidence(cause, run, is_shown=cause.rank in shown))
    if _is_disk_full(cause):
        parts.append(describe_kept(run))
    parts.append(verdict(outcome))
    return "\n".join(part for part in parts if part)


def verdict(outcome: Outcome) -> str:
    """Return the root cause of a failed launch in one sentence, with a fix if one is known; empty without a cause."""
    cause = root_cause(outcome.exits)
    if cause is None:
        return f"{outcome.lost}, so all ranks were stopped" if outcome.lost else ""
    if cause.returncode == -signal.SIGKILL and outcome.out_of_memory:
        return f"{_name(cause)} failed first: SIGKILL by the kernel, {HOST_MEMORY_SPENT}: {HOST_MEMORY_FIX}"
    if outcome.mismatch:  # gloo aborts the rank that receives too many bytes, not the rank with the wrong call
        return f"{outcome.mismatch}; so {_name(cause)} failed first: {_summary(cause)}"
    if cause.failed:
        known = translate("\n".join(_recorded_error(cause)), cause.returncode)
        return f"{_name(cause)} failed first: {_summary(cause)}" + (f": {known}" if known else "")
    what = "left first: it destroyed its process group" if cause.left_at else "exited first: exit code 0"
    return f"{_name(cause)} {what} while other ranks waited for it; they lost their connection: {EARLY_EXIT_FIX}"


def _name(exit_: RankExit) -> str:
    return f"rank {exit_.rank} on {exit_.node_name}" if exit_.node_name else f"rank {exit_.rank}"


def _summary(exit_: RankExit) -> str:
    if exit_.failure is None:
        return describe_exit(exit_.returncode)
    first_line = exit_.failure.first_line
    if exit_.failure.exit_code != BAD_INPUT:
        first_line = shorten(first_line, _MAX_MESSAGE_CHARS, placeholder=" ...")
    where = "" if exit_.node_name else f" (on {exit_.failure.host})"
    return f"{exit_.failure.kind}: {with_code(first_line, exit_.failure.code)}{where}"


def _is_disk_full(cause: RankExit) -> bool:
    known = translate("\n".join(_recorded_error(cause)), cause.returncode)
    return known is not None and known.name == DISK_FULL


def _recorded_error(exit_: RankExit) -> tuple[str, ...]:
    """Return the class name and message of the exception that a rank recorded, or else the end of its log."""
    if exit_.failure is None:
        return exit_.log
    return exit_.failure.kind, exit_.failure.message


def _evidence(cause: RankExit, run: RunDirectory, *, is_shown: bool) -> str:
    """Return the rank's traceback, or its location if it was already shown; without a traceback, the end of the log."""
    log = run.stderr(cause.rank)
    if cause.failure is not None and not cause.failure.traceback:
        return ""
    if cause.failure is not None and cause.failure.exit_code == BAD_INPUT:
        frame = user_frame(parse_traceback(cause.failure.traceback))
        at = f" at {Path(frame.file).name}:{frame.line}" if frame is not None else ""
        return f"rank {cause.rank} raised an error{at}; its traceback is in {run.error(cause.rank)}"
    if cause.failure is not None and is_shown:
        kept = f", and in {log}" if log.exists() else ""
        return f"rank {cause.rank}: its traceback is above{kept}"
    if cause.failure is not None:
        return f"rank {cause.rank}:\n{cause.failure.traceback.rstrip()}"
    if not cause.log:
        return ""
    where = str(log) if log.exists() else "its standard error"  # the log is on a different node
    return "\n".join([f"{_name(cause)}, end of {where}:", *cause.log])


# Evidence of failed ranks besides their exceptions: the end of their logs and their last collectives.


_LOG_LINES = 20
_SIZES_DIFFER = re.compile(r"Received data size doesn't match expected size|gloo::EnforceNotMet|op\.preamble")
"""gloo's error when a received message is larger than the buffer of the receiving collective."""


def gather_evidence(exits: Sequence[RankExit], run: RunDirectory) -> tuple[RankExit, ...]:
    """Return the exits, with logs and last collectives if a rank failed or was stopped; call after all ranks exited.

    Ranks that the launcher stopped are included, because the rank that failed may be on a different node.
    """
    if all(exit_.returncode == 0 and not exit_.stopped for exit_ in exits):
        return tuple(exits)
    return tuple(replace(exit_, log=end_of_log(exit_, run), calls=_last_calls(exit_, run)) for exit_ in exits)


def end_of_log(exit_: RankExit, run: RunDirectory) -> tuple[str, ...]:
    """Return the last lines of a failed rank's standard error; empty if the rank recorded its exception."""
    log = run.stderr(exit_.rank)
    if exit_.failure is not None or not exit_.failed or not log.exists():
        return ()
    return tuple(log.read_text(errors="replace").splitlines()[-_LOG_LINES:])


def _last_calls(exit_: RankExit, run: RunDirectory) -> LastCalls | None:
    if exit_.failure is not None:
        return read_last_calls(run, exit_.rank, exit_.failure.traceback)
    return read_last_calls(run, exit_.rank, None if exit_.returncode == -signal.SIGABRT else "")


def find_mismatch(exits: Sequence[RankExit]) -> str:
    """Return a description of the mismatched collectives; empty unless gloo aborted a rank because sizes differ.

    After any other abort, peers wait in a collective that the aborted rank did not reach: a consequence, not a cause.
    """
    if not any(_failed_by_size_mismatch(exit_) for exit_ in exits):
        return ""
    return describe_mismatch({exit_.rank: exit_.calls for exit_ in exits if exit_.calls is not None})


def _failed_by_size_mismatch(exit_: RankExit) -> bool:
    return exit_.failed and _SIZES_DIFFER.search("\n".join(_recorded_error(exit_))) is not None


# The uncaught exception of a rank that was started as a new interpreter, parsed from its standard error.


UNCAUGHT = (1, 120)
"""Python's exit codes after an uncaught exception, and after a failed flush of standard streams at exit."""
_MAX_LOG_BYTES = 1 << 16
_PEER_ERRORS = ("RuntimeError", "DistNetworkError", "DistStoreError", "DistBackendError", "ConnectionResetError")
_TRACEBACK = "Traceback (most recent call last):\n"
_PREFIX = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)
"""The prefix that torch adds to each traceback line after a process group is initialized."""
_LAST = re.compile(r"^([A-Za-z_][\w.]*)(?:: |$)(.*)\Z", re.DOTALL | re.MULTILINE)
"""The text from the unindented line with the exception's class to the end of the traceback."""


def read_exception(log: Path, rank: int) -> Failure | None:
    """Return the uncaught exception at the end of a rank's standard error; None if it has no traceback."""
    try:
        text = log.read_bytes()[-_MAX_LOG_BYTES:].decode(errors="replace")
    except FileNotFoundError:  # the rank wrote to the terminal
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
    """Return a Failure stating that the run directory is not writable, so no exception was recorded; else None."""
    error = write_error(run.path)
    if error is None:
        return None
    return Failure(
        rank=rank,
        host=socket.gethostname(),
        at=time.time(),
        kind="OSError",
        message=f"{error.strerror}: run directory {run.path} is not writable, so the rank's traceback was not recorded",
        traceback="",
        exit_code=returncode,
        peer_lost=False,
    )
