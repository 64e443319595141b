"""The phase recorder, a memory-mapped ring of a rank's last phases; the start-up timeline; and parsers of stacks."""

from __future__ import annotations

import mmap
import os
import re
import socket
import struct
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path
from time import time_ns
from typing import NamedTuple

import msgspec

PHASES = ("start", "data", "forward", "backward", "optimizer", "publish", "evaluate", "save", "end")
"""Phases of a rank; a mark records the phase that begins."""
_INSIDE = frozenset({"data", "forward", "backward", "optimizer"})
CAPACITY = 4096
"""Marks in a ring: about 1000 steps, in 64 KiB."""

_MAGIC = b"SWRING01"
_HEADER = struct.Struct("<8sQQ104s")  # magic, capacity, pid, host
_RECORD = struct.Struct("<QQ")  # nanoseconds since the epoch; lap, phase and step
_PHASE_BIT, _LAP_BIT = 48, 52  # the step has the lower bits: enough for 10^14 steps
_STEP, _PHASE = (1 << _PHASE_BIT) - 1, 15
_LAP = 1 << _LAP_BIT


class Mark(NamedTuple):
    """The start of a phase."""

    at: float
    """Seconds since the epoch, by the clock of the rank's host."""
    phase: str
    step: int
    """Number of completed optimizer steps."""

    @property
    def shown_step(self) -> int:
        """The step number for display, counted from 1: for a phase within a step, the step in progress."""
        return self.step + 1 if self.phase in _INSIDE else self.step


@dataclass(frozen=True)
class RecorderStatus:
    """The content of a recorder: its process, host and marks, oldest first."""

    pid: int
    host: str
    marks: tuple[Mark, ...]


class Recorder:
    """Writes the marks of one rank, from one thread, into a new ring at `path`.

    The kernel owns the pages, so every mark is in the file however the process ends, even by kill -9. A mark costs
    0.3 us, or 5 us if a step of 5 ms has evicted the ring from the processor's caches; hence the ring has no lock, no
    counter and no checksum. Every lap over the ring flips one bit, which shows a reader the newest mark.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        header = _HEADER.pack(_MAGIC, CAPACITY, os.getpid(), socket.gethostname().encode()[:104])
        with partial.open("w+b") as file:
            # Real data, not only a size: on a full disk, a page without a block would end the process by SIGBUS.
            file.write(header + bytes(CAPACITY * _RECORD.size))
            file.flush()
            self._map = mmap.mmap(file.fileno(), 0)
        partial.rename(path)  # processes that have mapped the ring of an earlier attempt can still read it
        self._words = memoryview(self._map).cast("Q")
        self._first, self._end = _HEADER.size // 8, len(self._words)
        self._next = self._first
        plain = {phase: code << _PHASE_BIT for code, phase in enumerate(PHASES, 1)}  # 0 is an empty record
        self._codes = {phase: code | _LAP for phase, code in plain.items()}
        self._codes_of_next_lap = plain

    def mark(self, phase: str, step: int) -> None:
        """Record that `phase` of `step` begins now."""
        place, words = self._next, self._words
        words[place] = time_ns()
        words[place + 1] = self._codes[phase] | step
        place += 2
        if place == self._end:
            place = self._first
            self._codes, self._codes_of_next_lap = self._codes_of_next_lap, self._codes
        self._next = place

    def close(self) -> None:
        """Unmap the ring; later marks are not allowed."""
        self._words.release()
        self._map.close()


def read_recorder(path: Path) -> RecorderStatus | None:
    """Read all complete marks of a ring, which a running process may be writing; None if the ring does not exist."""
    ring = _Ring.read(path)
    if ring is None:
        return None
    marks = []
    # The oldest mark, which follows the newest, may be half overwritten.
    second = ring.newest() + 2
    for number in range(second, second + ring.capacity - 1):
        mark = ring.mark(number % ring.capacity)
        if mark is not None:
            marks.append(mark)
    return RecorderStatus(ring.pid, ring.host, tuple(marks))


def last_mark(path: Path) -> Mark | None:
    """Read only the newest mark of a ring, in about 30 us; None if the ring has no mark."""
    ring = _Ring.read(path)
    return None if ring is None else ring.mark(ring.newest())


@dataclass(frozen=True)
class _Ring:
    """The content of a ring file, read from the first to the last byte, possibly during a write."""

    pid: int
    host: str
    capacity: int
    content: bytes

    @classmethod
    def read(cls, path: Path) -> _Ring | None:
        try:
            content = path.read_bytes()
        except OSError:
            return None
        if len(content) < _HEADER.size:
            return None
        magic, capacity, pid, host = _HEADER.unpack_from(content)
        if magic != _MAGIC or not capacity or len(content) != _HEADER.size + capacity * _RECORD.size:
            return None
        return cls(pid, host.rstrip(b"\0").decode(errors="replace"), capacity, content)

    def newest(self) -> int:
        """Return the last record of the lap to which record 0 belongs, by binary search."""
        lap = self._record(0)[1] & _LAP
        low, high = 0, self.capacity
        while high - low > 1:
            middle = (low + high) // 2
            if self._record(middle)[1] & _LAP == lap:
                low = middle
            else:
                high = middle
        return low

    def mark(self, number: int) -> Mark | None:
        """Return the mark of a record; None for an empty record."""
        at, packed = self._record(number)
        code = packed >> _PHASE_BIT & _PHASE
        if not 0 < code <= len(PHASES):
            return None
        return Mark(at / 1e9, PHASES[code - 1], packed & _STEP)

    def _record(self, number: int) -> tuple[int, int]:
        return _RECORD.unpack_from(self.content, _HEADER.size + number * _RECORD.size)


# The start-up timeline: the phases of a rank between its start and its first step.


class Phase(msgspec.Struct, frozen=True):
    """One phase of the start-up."""

    name: str
    seconds: float


class Timeline:
    """Measures the start-up phases of a rank; each phase ends when the next begins."""

    def __init__(self, started_at: float | None = None) -> None:
        """Begin the first phase at `started_at`, in seconds since the epoch; None means now."""
        self._last = time.time() if started_at is None else started_at
        self.phases: list[Phase] = []

    def mark(self, name: str) -> None:
        """End the phase `name` now."""
        now = time.time()
        self.phases.append(Phase(name, now - self._last))
        self._last = now

    def write(self, path: Path) -> None:
        """Write the phases as JSON."""
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self.phases), indent=1))


# Python stacks parsed from text: dumps of faulthandler at a signal or a fatal error, and printed tracebacks.


_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)")
_FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')
_PRINTED = re.compile(r'^ *File "(.*)", line (\d+), in (.*)$', re.MULTILINE)
"""A frame of a traceback as Python prints it."""
_FATAL = "Fatal Python error: "
"""The first line of faulthandler's dump when a fatal signal ends a process."""
_PACKAGE = str(Path(__file__).parents[1])
_STANDARD = (sysconfig.get_paths()["stdlib"], sys.base_prefix + "/lib/python", "<frozen")
_INSTALLED = re.compile(r"/site-packages/|/dist-packages/|/torchinductor_")


@dataclass(frozen=True)
class Frame:
    """One frame of a stack."""

    file: str
    line: int
    function: str

    @property
    def is_users(self) -> bool:
        """Whether the frame is user code, outside the standard library, installed packages and shardwise."""
        return not (self.is_pythons or self.file.startswith((_PACKAGE, "<")) or _INSTALLED.search(self.file))

    @property
    def is_pythons(self) -> bool:
        """Whether the frame is in the standard library, outside installed packages."""
        return self.file.startswith(_STANDARD) and not _INSTALLED.search(self.file)


Stack = tuple[Frame, ...]
"""The frames of one thread, innermost first."""


def parse_stack(text: str, thread: int) -> Stack:
    """Return the stack of one thread from the last dump in `text`; empty if no dump contains the thread."""
    stack: list[Frame] = []
    inside = False
    for line in text.splitlines():
        header = _THREAD.match(line)
        if header is not None:
            inside = int(header[1], 16) == thread
            if inside:
                stack = []
        elif inside:
            frame = _FRAME.match(line)
            if frame is not None:
                number = int(frame[2]) if frame[2].isdigit() else 0
                stack.append(Frame(frame[1], number, frame[3]))
    return tuple(stack)


def parse_fatal_stack(text: str, thread: int) -> Stack:
    """Return the stack of one thread at a fatal signal; empty if `text` reports no fatal signal."""
    _, found, dump = text.rpartition(_FATAL)
    return parse_stack(dump, thread) if found else ()


def parse_traceback(text: str) -> Stack:
    """Return the frames of the last exception in a printed traceback, innermost first."""
    frames = [Frame(file, int(line), function) for file, line, function in _PRINTED.findall(text)]
    return tuple(reversed(frames))


def user_frame(stack: Stack) -> Frame | None:
    """Return the innermost frame of user code, otherwise the innermost frame outside of the standard library."""
    for frame in stack:
        if frame.is_users:
            return frame
    return next((frame for frame in stack if not frame.is_pythons), None)
