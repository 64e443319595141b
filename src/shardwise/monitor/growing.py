"""Reading files that somebody else still writes: in pieces, from where the last look ended, and never with an error."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from pathlib import Path

PIECE = 1 << 20
"""Bytes that one look takes in at most: between two of them others may have the view."""


class GrowingFile:
    """The events of a file, read as they are appended; a missing file is an empty one.

    A line that is not whole yet waits for its end, one that is no event is passed over. A file that was replaced or cut
    is read again from its start, and `was_replaced` says so until the next look.
    """

    def __init__(self, path: Path, *, last: int | None = None) -> None:
        """`last`: begin with so many bytes before the end, for files of which only the newest matters."""
        self._path = path
        self._last = last
        self._offset = 0
        self._inode = 0
        self._rest = b""
        self._skips_line = False
        self.was_replaced = False
        self.behind = 0
        """Bytes that the last look left for the next."""

    @property
    def size(self) -> int:
        """Bytes that the file had at the last look."""
        return self._offset + self.behind

    def read(self) -> list[dict[str, Any]]:
        """Return the events of the next piece; empty when there is nothing new."""
        self.was_replaced = False
        try:
            with self._path.open("rb", buffering=0) as file:
                status = os.fstat(file.fileno())
                self._place(status)
                new = os.pread(file.fileno(), PIECE, self._offset)
        except OSError:
            return []
        self._offset += len(new)
        self.behind = max(0, status.st_size - self._offset)
        *whole, self._rest = (self._rest + new).split(b"\n")
        if self._skips_line and whole:
            self._skips_line = False
            del whole[0]
        return [event for line in whole if (event := _event(line)) is not None]

    def _place(self, status: os.stat_result) -> None:
        """Begin at the right place of a file that is new, or is not the one that was read so far."""
        if self._inode == status.st_ino and status.st_size >= self._offset:
            return
        self.was_replaced = self._inode != 0
        self._inode = status.st_ino
        self._rest = b""
        self._offset = max(0, status.st_size - self._last) if self._last is not None else 0
        self._skips_line = self._offset > 0


def _event(line: bytes) -> dict[str, Any] | None:
    """Return the event of a line; None for anything else."""
    try:
        event = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return event if isinstance(event, dict) and isinstance(event.get("kind"), str) else None


def end_of_file(path: Path, num_bytes: int) -> str:
    """Return the text at the end of a file, empty where there is none; a line that was cut is left out."""
    try:
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            content = os.pread(file.fileno(), num_bytes, max(0, size - num_bytes))
    except OSError:
        return ""
    if size > num_bytes:
        content = content.partition(b"\n")[2]
    return content.decode(errors="replace")
