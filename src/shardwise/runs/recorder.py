"""The recorder: the last phases of one rank in a memory-mapped ring, the start-up timeline, and stacks as text."""

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
"""What a rank can be busy with; a mark names the phase that begins."""
CAPACITY = 4096
"""Places of a ring: about 1000 steps, in 64 KiB."""

_MAGIC = b"SWRING01"
_HEADER = struct.Struct("<8sQQ104s")  # magic, capacity, pid, host
_RECORD = struct.Struct("<QQ")  # nanoseconds since the epoch; lap, phase and step
_PHASE_BIT, _LAP_BIT = 48, 52  # the step keeps the lower bits: enough for 10^14 steps
_STEP, _PHASE = (1 << _PHASE_BIT) - 1, 15
_LAP = 1 << _LAP_BIT


class Mark(NamedTuple):
    """A phase that began."""

    at: float
    """Seconds since the epoch, by the clock of the rank's host."""
    phase: str
    step: int


@dataclass(frozen=True)
class RecorderStatus:
    """What a recorder holds: whose it is, and its marks, oldest first."""

    pid: int
    host: str
    marks: tuple[Mark, ...]


class Recorder:
    """Writes marks of one rank, by one thread, into a new ring at `path`.

    The pages belong to the kernel, so that whatever ends the process, even kill -9, leaves every mark in the file.
    A mark costs 0.3 us, and 5 us where a step of 5 ms has left nothing of it in the processor's caches; hence no lock,
    no counter and no checksum. Every lap over the ring flips one bit, so that a reader finds the newest mark.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        header = _HEADER.pack(_MAGIC, CAPACITY, os.getpid(), socket.gethostname().encode()[:104])
        with partial.open("w+b") as file:
            # Written, not only sized: a page without a block on a full disk would end the process by SIGBUS.
            file.write(header + bytes(CAPACITY * _RECORD.size))
            file.flush()
            self._map = mmap.mmap(file.fileno(), 0)
        partial.rename(path)  # a ring of an earlier process stays whole for whoever reads it now
        self._words = memoryview(self._map).cast("Q")
        self._first, self._end = _HEADER.size // 8, len(self._words)
        self._next = self._first
        plain = {phase: code << _PHASE_BIT for code, phase in enumerate(PHASES, 1)}  # 0 is a place without a mark
        self._codes, self._codes_of_next_lap = {phase: code | _LAP for phase, code in plain.items()}, plain

    def mark(self, phase: str, step: int) -> None:
        """Say that `phase` of `step` begins now."""
        place, words = self._next, self._words
        words[place] = time_ns()
        words[place + 1] = self._codes[phase] | step
        place += 2
        if place == self._end:
            place = self._first
            self._codes, self._codes_of_next_lap = self._codes_of_next_lap, self._codes
        self._next = place

    def close(self) -> None:
        """Unmap the ring; nothing may be marked after."""
        self._words.release()
        self._map.close()


def read_recorder(path: Path) -> RecorderStatus | None:
    """Read a ring, of a live process too; None where there is none. A mark that is just being written is left out."""
    ring = _Ring.read(path)
    if ring is None:
        return None
    # The oldest, which comes after the newest, may be half overwritten.
    second = ring.newest() + 2
    marks = (ring.mark(number % ring.capacity) for number in range(second, second + ring.capacity - 1))
    return RecorderStatus(ring.pid, ring.host, tuple(mark for mark in marks if mark is not None))


def last_mark(path: Path) -> Mark | None:
    """Read the newest mark alone, in about 30 us; None where there is none."""
    ring = _Ring.read(path)
    return None if ring is None else ring.mark(ring.newest())


@dataclass(frozen=True)
class _Ring:
    """A ring as it was when its file was read: from the first to the last byte, while it may have been written."""

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
        """Return the last place of the lap that place 0 belongs to, by halving."""
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
        """Return what is at a place, None where nothing is yet."""
        at, what = self._record(number)
        code = what >> _PHASE_BIT & _PHASE
        return Mark(at / 1e9, PHASES[code - 1], what & _STEP) if 0 < code <= len(PHASES) else None

    def _record(self, number: int) -> tuple[int, int]:
        return _RECORD.unpack_from(self.content, _HEADER.size + number * _RECORD.size)


# The start-up timeline: what a rank did between its start and its first step.


class Phase(msgspec.Struct, frozen=True):
    """One part of the start."""

    name: str
    seconds: float


class Timeline:
    """Collects phases; each ends where the next begins."""

    def __init__(self, started_at: float | None = None) -> None:
        """`started_at`: seconds since the epoch when the launcher began; None means now."""
        self._last = time.time() if started_at is None else started_at
        self.phases: list[Phase] = []

    def mark(self, name: str) -> None:
        """End the phase `name` here."""
        now = time.time()
        self.phases.append(Phase(name, now - self._last))
        self._last = now

    def write(self, path: Path) -> None:
        """Write the phases as JSON."""
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self.phases), indent=1))


# Python stacks read from text: what faulthandler writes at a signal or a fatal error, and printed tracebacks.


_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)")
_FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')
_PRINTED = re.compile(r'^ *File "(.*)", line (\d+), in (.*)$', re.MULTILINE)
"""A frame of a traceback as Python prints it."""
_FATAL = "Fatal Python error: "
"""By which faulthandler begins the stacks of a process that a fatal signal ends."""
_PACKAGE = str(Path(__file__).parents[1])
_STANDARD = (sysconfig.get_paths()["stdlib"], sys.base_prefix + "/lib/python", "<frozen")
_INSTALLED = re.compile(r"/site-packages/|/dist-packages/|/torchinductor_")


@dataclass(frozen=True)
class Frame:
    """One line of a stack."""

    file: str
    line: int
    function: str

    @property
    def is_users(self) -> bool:
        """Whether neither Python, an installed package nor shardwise wrote it."""
        return not (self.is_pythons or self.file.startswith((_PACKAGE, "<")) or _INSTALLED.search(self.file))

    @property
    def is_pythons(self) -> bool:
        """Whether it is in the standard library, outside of installed packages."""
        return self.file.startswith(_STANDARD) and not _INSTALLED.search(self.file)


Stack = tuple[Frame, ...]
"""Innermost first."""


def parse_stack(text: str, thread: int) -> Stack:
    """Return the stack of one thread from the last dump in `text`; empty if it does not exist."""
    stack: list[Frame] = []
    inside = False
    for line in text.splitlines():
        header = _THREAD.match(line)
        if header is not None:
            inside = int(header[1], 16) == thread
            stack = [] if inside else stack
        elif inside and (frame := _FRAME.match(line)) is not None:
            stack.append(Frame(frame[1], int(frame[2]) if frame[2].isdigit() else 0, frame[3]))
    return tuple(stack)


def parse_fatal_stack(text: str, thread: int) -> Stack:
    """Return the stack of one thread as a fatal signal found it; empty if no such signal came."""
    _, found, dump = text.rpartition(_FATAL)
    return parse_stack(dump, thread) if found else ()


def parse_traceback(text: str) -> Stack:
    """Return the frames of the last exception in a printed traceback, innermost first."""
    frames = [Frame(file, int(line), function) for file, line, function in _PRINTED.findall(text)]
    return tuple(reversed(frames))


def user_frame(stack: Stack) -> Frame | None:
    """Return the innermost frame that is the user's own, else the innermost outside the standard library."""
    named = [frame for frame in stack if not frame.is_pythons]
    return next((frame for frame in stack if frame.is_users), named[0] if named else None)
