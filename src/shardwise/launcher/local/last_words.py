"""What a rank that is a fresh process said last: its uncaught exception, read from its standard error."""

from __future__ import annotations

import re
import socket
import time
from typing import TYPE_CHECKING

from shardwise.runs.disk import write_error
from shardwise.runs.failure import PEER_LOST, Failure

if TYPE_CHECKING:
    from pathlib import Path

    from shardwise.runs import RunDirectory

UNCAUGHT = (1, 120)
"""Python's exit codes after an uncaught exception, and after buffers that could not be flushed at its end."""
_MOST_BYTES = 1 << 16
_PEER_ERRORS = ("RuntimeError", "DistNetworkError", "DistStoreError", "DistBackendError", "ConnectionResetError")
_TRACEBACK = "Traceback (most recent call last):\n"
_PREFIX = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)
"""What torch puts before each line of a traceback once a process group is there."""
_LAST = re.compile(r"^([A-Za-z_][\w.]*)(?:: |$)(.*)\Z", re.DOTALL | re.MULTILINE)
"""From the line that is not indented, which names the exception, to the end."""


def last_words(log: Path, rank: int) -> Failure | None:
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
