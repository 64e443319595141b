"""Events of a run: one file per rank and launcher with one JSON object per line, readable while the run trains."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec

from shardwise.runs.console import PREEMPTED, describe_exit, printable_fields

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from shardwise.runs.directory import RunDirectory
    from shardwise.runs.failure import Failure


class EventLog:
    """Appends the events of one rank or launcher to a file and passes each event to an optional listener.

    Each event is in the file when `write` returns. A rank writes about one event per second.
    """

    def __init__(self, path: Path | None, listener: Callable[[dict[str, Any]], None] | None = None) -> None:
        self._file: IO[bytes] | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab")
        self._listener = listener
        self._encoder = msgspec.json.Encoder()

    def write(self, kind: str, **fields: Any) -> None:
        """Append one event of `kind`; numbers that are not finite become null."""
        event = {"at": time.time(), "kind": kind, **fields}
        if self._file is not None:
            self._file.write(self._encode(event))
            self._file.write(b"\n")
            self._file.flush()
        if self._listener is not None:
            self._listener(event)

    def _encode(self, event: dict[str, Any]) -> bytes:
        try:
            return self._encoder.encode(event)
        except UnicodeEncodeError:  # a path or an argument that is not UTF-8
            return self._encoder.encode(printable_fields(event))

    def close(self) -> None:
        """Flush and close the file; later writes are not allowed."""
        if self._file is not None:
            self._file.close()
            self._file = None


class Tail:
    """Reads the data that other processes have appended to a file since the last read; a missing file counts as empty.

    An incomplete line is returned once it is complete. A file that was replaced or truncated is read again from its
    start, and `was_replaced` is True until the next read.
    """

    def __init__(self, path: Path, *, last: int | None = None, chunk: int | None = None) -> None:
        """Start `last` bytes before the end of the file, if set; read at most `chunk` bytes at a time."""
        self._path = path
        self._last = last
        self._chunk = chunk
        self._offset = 0
        self._inode = 0
        self._rest = b""
        self._skips_line = False
        self.was_replaced = False
        self.behind = 0
        """Bytes at the end of the file that have not been read yet."""

    @property
    def size(self) -> int:
        """Size of the file in bytes at the last read."""
        return self._offset + self.behind

    def read(self) -> bytes:
        """Return the new bytes, which may end in an incomplete line."""
        self.was_replaced = False
        try:
            with self._path.open("rb", buffering=0) as file:
                status = os.fstat(file.fileno())
                self._find_start(status)
                num_bytes = self._chunk
                if num_bytes is None:
                    num_bytes = status.st_size - self._offset
                new = os.pread(file.fileno(), num_bytes, self._offset)
        except OSError:
            return b""
        self._offset += len(new)
        self.behind = max(0, status.st_size - self._offset)
        return new

    def lines(self) -> list[bytes]:
        """Return the new complete lines."""
        new = self.read()
        *whole, self._rest = (self._rest + new).split(b"\n")
        if self._skips_line and whole:
            self._skips_line = False
            del whole[0]
        return whole

    def events(self) -> list[dict[str, Any]]:
        """Return the new events of an events file; a line that is not an event is skipped."""
        found = []
        for line in self.lines():
            event = _decode_event(line)
            if event is not None:
                found.append(event)
        return found

    def _find_start(self, status: os.stat_result) -> None:
        """Set the offset at which to start in a new, replaced or truncated file."""
        if self._inode == status.st_ino and status.st_size >= self._offset:
            return
        self.was_replaced = self._inode != 0
        self._inode = status.st_ino
        self._rest = b""
        self._offset = 0
        if self._last is not None:
            self._offset = max(0, status.st_size - self._last)
        self._skips_line = self._offset > 0


def _decode_event(line: bytes) -> dict[str, Any] | None:
    """Return the event of a line; None if the line is not an event."""
    try:
        event = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return event if isinstance(event, dict) and isinstance(event.get("kind"), str) else None


def end_of_file(path: Path, num_bytes: int) -> str:
    """Return the complete lines in the last `num_bytes` of a file; empty for a file that does not exist."""
    tail = Tail(path, last=num_bytes)
    content = tail.read()
    if tail.size > num_bytes:
        content = content.partition(b"\n")[2]
    return content.decode(errors="replace")


# Events of launchers: attempts, exits of ranks, restarts and the verdict, in one file per node.


class LaunchLog:
    """The events of one launcher: `attempt`, `exit`, `restart`, `verdict`, `note`, `finish`."""

    def __init__(self, run: RunDirectory, node: int = 0) -> None:
        self._log = EventLog(run.launcher_events(node))
        self._node = node

    def _write(self, kind: str, **fields: object) -> None:
        with contextlib.suppress(OSError):  # a full disk must not end a launch
            self._log.write(kind, **fields)

    def attempt(self, number: int, pids: Mapping[int, int], *, target: str, world_size: int, nodes: int) -> None:
        """Record that all ranks of this node were started, with process ids by rank; `number` counts restarts."""
        self._write(
            "attempt",
            number=number,
            node=self._node,
            nodes=nodes,
            nproc=len(pids),
            world_size=world_size,
            ranks=pids,
            host=socket.gethostname(),
            boot=boot_id(),
            machine=machine_id(),
            launcher=os.getpid(),
            target=target,
        )

    def exit(self, rank: int, code: int, *, stopped: bool, failure: Failure | None) -> None:
        """Record the exit of a rank; `stopped` is True if the launcher stopped it. A negative code is a signal."""
        message = ""
        if failure is not None:
            message = failure.first_line
            if failure.exit_code != PREEMPTED:  # a rank that stopped on request had no error
                message = f"{failure.kind}: {message}"
        self._write("exit", rank=rank, code=code, stopped=stopped, words=message or describe_exit(code))

    def restart(self, number: int, most: int, cause: str) -> None:
        """Record restart number `number` of all ranks, of at most `most` restarts."""
        self._write("restart", number=number, most=most, cause=cause)

    def verdict(self, text: str) -> None:
        """Record the root cause of a failure, in one sentence."""
        self._write("verdict", text=text)

    def note(self, text: str) -> None:
        """Record a change in the set of nodes of the run."""
        self._write("note", text=text)

    def finish(self, state: str, *, restarts: int) -> None:
        """Record the end of the launch: "finished", "failed" or "stopped"."""
        self._write("finish", state=state, restarts=restarts)

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):
            self._log.close()


def boot_id() -> str:
    """Return the id of this machine's last boot, which tells machines with equal host names apart; "" if unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def launch_log(run: RunDirectory, node: int = 0) -> contextlib.closing[LaunchLog]:
    """Return a context manager for the log of one node's launcher."""
    return contextlib.closing(LaunchLog(run, node))


def machine_id() -> str:
    """Return the id of this machine's installation, which a reboot does not change; "" if unknown."""
    try:
        return Path("/etc/machine-id").read_text().strip()
    except OSError:
        return ""
