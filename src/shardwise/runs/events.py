"""Events of a run: one JSON object per line and rank, written cheaply and readable while the run goes on."""

from __future__ import annotations

import time
from typing import IO, TYPE_CHECKING, Any

import msgspec

from shardwise.runs.printable import printable_fields

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


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
