"""What a mirror remembers, so that the next one goes on where it ended; one process at a time holds it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import zlib
from typing import TYPE_CHECKING

import msgspec

from shardwise.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from shardwise.runs import RunDirectory


class _Memory(msgspec.Struct, kw_only=True):
    sink: str
    tracker_id: str = ""
    told: dict[str, int] = {}


class HeldState:
    """The memory of one mirror, in a file of the run directory."""

    def __init__(self, path: Path, sink: str) -> None:
        self._path = path
        self._memory = _Memory(sink=sink)
        with contextlib.suppress(OSError, msgspec.DecodeError):
            self._memory = msgspec.json.decode(path.read_bytes(), type=_Memory)

    @property
    def tracker_id(self) -> str:
        """What the tracker calls this run; empty before it was told of it."""
        return self._memory.tracker_id

    @tracker_id.setter
    def tracker_id(self, value: str) -> None:
        self._memory.tracker_id = value
        self._write()

    @property
    def told(self) -> Mapping[str, int]:
        """The last step of each curve that the tracker has."""
        return self._memory.told

    @property
    def last_step(self) -> int:
        """The last step of any curve."""
        return max(self._memory.told.values(), default=0)

    def forget(self) -> None:
        """Begin again: the tracker has nothing."""
        self._memory.told = {}

    def remember(self, told: Mapping[str, int]) -> None:
        """Write down what the tracker has now."""
        self._memory.told = dict(told)
        self._write()

    def _write(self) -> None:
        new = self._path.with_suffix(".new")
        new.write_bytes(msgspec.json.encode(self._memory))
        new.replace(self._path)


@contextlib.contextmanager
def hold_state(run: RunDirectory, kind: str, sink: str) -> Iterator[HeldState]:
    """Hold the memory of the mirror into `sink`; refuse while another process holds it."""
    stem = run.sinks / f"{kind}-{zlib.crc32(sink.encode()):08x}"
    run.sinks.mkdir(exist_ok=True)
    lock = os.open(stem.with_suffix(".lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(
                f"{run.path} is mirrored to {sink} by another process already",
                code="watch.already-mirrored",
                fix="wait until it ends, or end it",
            ) from None
        yield HeldState(stem.with_suffix(".json"), sink)
    finally:
        os.close(lock)
