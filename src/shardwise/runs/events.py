"""Events of a run: one JSON object per line and rank, written cheaply and readable while the run goes on."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from typing import IO, TYPE_CHECKING, Any

import msgspec

from shardwise.runs.console import PREEMPTED, describe_exit, printable_fields

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from shardwise.runs.directory import RunDirectory
    from shardwise.runs.failure import Failure


class EventLog:
    """Appends events of one rank to its file, and hands each to an optional listener.

    Each event is in the file when `write` returns; there is about one a second.
    """

    def __init__(self, path: Path | None, listener: Callable[[dict[str, Any]], None] | None = None) -> None:
        self._file: IO[bytes] | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab")
        self._listener = listener
        self._encoder = msgspec.json.Encoder()

    def write(self, kind: str, **fields: Any) -> None:
        """Append one event of `kind`; non-finite numbers become null."""
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
        """Flush and close; nothing may be written after."""
        if self._file is not None:
            self._file.close()
            self._file = None


class Tail:
    """Reads what was appended to a file since the last look; the file may not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._rest = b""

    def read(self) -> bytes:
        """Return what is new, whole lines or not."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                new = file.read()
        except FileNotFoundError:
            return b""
        self._offset += len(new)
        return new

    def lines(self) -> Iterator[bytes]:
        """Yield the whole lines that are new."""
        *whole, self._rest = (self._rest + self.read()).split(b"\n")
        yield from whole

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield the new events of an events file."""
        for line in self.lines():
            yield msgspec.json.decode(line)


# What a launcher writes down of a run: attempts, how ranks ended, restarts, the verdict; one file per node.


class LaunchLog:
    """The events of one launcher: `attempt`, `exit`, `restart`, `verdict`, `finish`."""

    def __init__(self, run: RunDirectory, node: int = 0) -> None:
        self._log = EventLog(run.launcher_events(node))
        self._node = node

    def _write(self, kind: str, **fields: object) -> None:
        with contextlib.suppress(OSError):  # a full disk must not end a launch
            self._log.write(kind, **fields)

    def attempt(self, number: int, pids: Mapping[int, int], *, target: str, world_size: int, nodes: int) -> None:
        """All ranks of this node were started: process ids by rank. `number` counts restarts before it."""
        self._write(
            "attempt",
            number=number,
            node=self._node,
            nodes=nodes,
            nproc=len(pids),
            world_size=world_size,
            ranks=pids,
            host=socket.gethostname(),
            launcher=os.getpid(),
            target=target,
        )

    def exit(self, rank: int, code: int, *, stopped: bool, failure: Failure | None) -> None:
        """A rank has ended, well or badly; `stopped` if it was asked to. A negative code is a signal."""
        said = (failure.message.splitlines() or [""])[0] if failure is not None else ""
        if failure is not None and failure.exit_code != PREEMPTED:  # one that stopped as asked tells of no error
            said = f"{failure.kind}: {said}"
        self._write("exit", rank=rank, code=code, stopped=stopped, words=said or describe_exit(code))

    def restart(self, number: int, most: int, cause: str) -> None:
        """All ranks are started again, for the `number`th time of at most `most`."""
        self._write("restart", number=number, most=most, cause=cause)

    def verdict(self, text: str) -> None:
        """The root cause, in one sentence."""
        self._write("verdict", text=text)

    def finish(self, state: str, *, restarts: int) -> None:
        """The launch is over: "finished", "failed" or "stopped"."""
        self._write("finish", state=state, restarts=restarts)

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):
            self._log.close()


@contextlib.contextmanager
def launch_log(run: RunDirectory, node: int = 0) -> Iterator[LaunchLog]:
    """Open the log of one node's launcher for the time of a launch."""
    log = LaunchLog(run, node)
    try:
        yield log
    finally:
        log.close()
