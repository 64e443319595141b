"""Python stacks read from text: what faulthandler writes at a signal or a fatal error, and printed tracebacks."""

from __future__ import annotations

import re
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

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
    """Return the stack of one thread from the last dump in `text`; empty if it is not there."""
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
