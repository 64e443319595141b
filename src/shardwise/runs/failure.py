"""What a failing rank leaves behind: one JSON file with its own words."""

from __future__ import annotations

import re
import socket
import time
import traceback
from typing import TYPE_CHECKING

import msgspec

from shardwise.errors import ShardwiseError
from shardwise.runs.printable import printable

if TYPE_CHECKING:
    from pathlib import Path

# Words with which torch, gloo, NCCL, MPI and MLX say that somebody else went away: never a root cause. Anchored on the
# transport, since a user's own socket may be reset too.
PEER_LOST = re.compile(
    r"Connection closed by peer|Connection reset by peer|gloo.*(?:transport|Timed out|unbound_buffer)"
    r"|NCCL.*(?:remote process exited|unhandled system error|Abort)|Broken pipe.*store|recvValue failed"
    r"|DistNetworkError|DistStoreError|failed to recv|\[ring\] connection to a peer was lost"
    r"|waited \S+ s for the other ranks",
    re.DOTALL,
)
_PEER_ERRORS = (RuntimeError, ConnectionError)


NOT_SAVED = "and not saved"
"""In the words of a rank that was asked to stop when its state could not be written."""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's failure: who, where, what it said."""

    rank: int
    host: str
    at: float
    """Seconds since the epoch."""
    kind: str
    """Name of the exception's class."""
    message: str
    traceback: str
    exit_code: int
    peer_lost: bool
    """The error only says that another rank went away."""
    code: str = ""
    """The condition by name if the error is one of shardwise's own; empty for any other, and in files from before."""


def describe_failure(error: BaseException, rank: int) -> Failure:
    """Turn an exception that ends this rank into a Failure."""
    message = printable(str(error))
    return Failure(
        rank=rank,
        host=socket.gethostname(),
        at=time.time(),
        kind=type(error).__name__,
        message=message,
        traceback=printable("".join(traceback.format_exception(error))),
        exit_code=error.exit_code if isinstance(error, ShardwiseError) else 1,
        peer_lost=isinstance(error, _PEER_ERRORS) and PEER_LOST.search(message) is not None,
        code=error.code if isinstance(error, ShardwiseError) else "",
    )


def write_failure(path: Path, failure: Failure) -> None:
    """Write `failure` whole or not at all."""
    partial = path.with_suffix(".partial")
    try:
        partial.write_bytes(msgspec.json.encode(failure))
    except OSError:  # a full disk
        partial.unlink(missing_ok=True)
        raise
    partial.rename(path)


def read_failure(path: Path) -> Failure | None:
    """Read a failure back, None when the rank left none."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Failure)
    except FileNotFoundError:
        return None
