"""What a rank is busy with, from the stacks that it writes down when a signal asks for them."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)")
_FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')
_PACKAGE = str(Path(__file__).parents[1])
_STANDARD = (sysconfig.get_paths()["stdlib"], sys.base_prefix + "/lib/python", "<frozen")
_INSTALLED = re.compile(r"/site-packages/|/dist-packages/|/torchinductor_")
_KNOWN = (
    (
        r"/torch/_inductor/(?!runtime)|/torch/_dynamo/(convert_frame|symbolic_convert|output_graph)|/triton/compiler",
        "compiles",
    ),
    (
        r"/torch/serialization\.py|/torch/distributed/checkpoint/|/safetensors/|/shardwise/checkpoint/",
        "saves or loads a checkpoint",
    ),
    (r"/torch/utils/data/", "waits for data"),
)
"""Files that tell what a stack is about."""
DATA = "waits for data"
_CLOCK_S = 1 / os.sysconf("SC_CLK_TCK")


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


@dataclass(frozen=True)
class Sample:
    """One look at a rank: the stack of its main thread, and the seconds of processor time it has used so far."""

    stack: Stack
    cpu_s: float
    at: float


@dataclass(frozen=True)
class Activity:
    """What a rank was seen to be doing, over some samples."""

    function: str
    place: str
    """FILE:LINE of the user's innermost frame."""
    inside: str
    """Function that this line called, if that is not the user's own; else empty."""
    kind: str = ""
    """Of a known kind: "compiles", "saves or loads a checkpoint", "waits for data", "evaluates"."""
    is_moving: bool = False
    """It was found in different places."""
    cores: float = 0.0
    """Processors that it and its children kept busy."""


def request_stacks(pid: int, number: int) -> bool:
    """Ask a process for its stacks; False if it has no handler for the signal, which would end it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        found = re.search(r"^SigCgt:\s*([0-9a-f]+)", status, re.MULTILINE)
        if not number or found is None or not int(found[1], 16) >> (number - 1) & 1:
            return False
        os.kill(pid, number)
    except (OSError, ValueError):
        return False
    return True


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


def describe_activity(samples: Sequence[Sample]) -> Activity | None:
    """Say what a rank does, from samples in the order they were taken; None where no stack was seen."""
    seen = [sample for sample in samples if sample.stack]
    if not seen:
        return None
    stack = seen[-1].stack
    named = [frame for frame in stack if not frame.is_pythons]  # where none is the user's, the library that waits
    user = next((frame for frame in stack if frame.is_users), named[0] if named else stack[0])
    elapsed = seen[-1].at - seen[0].at
    kinds = [_kind(sample.stack) for sample in seen]
    return Activity(
        function=user.function,
        place=f"{user.file}:{user.line}",
        inside=stack[0].function if stack[0] is not user else "",
        kind=kinds[-1] if len(set(kinds)) == 1 else "",
        is_moving=len({_shape(sample.stack) for sample in seen}) > 1,
        cores=(seen[-1].cpu_s - seen[0].cpu_s) / elapsed if elapsed > 0 else 0.0,
    )


def _kind(stack: Stack) -> str:
    return next((kind for pattern, kind in _KNOWN if any(re.search(pattern, frame.file) for frame in stack)), "")


def _shape(stack: Stack) -> tuple[object, ...]:
    """What must change for a stack to have moved: a loop that spins in one function stays where it is."""
    return (stack[0].file, stack[0].function, *stack[1:])


def cpu_seconds(pid: int) -> float:
    """Return the processor time that a process and its living descendants have used; 0 where it cannot be seen."""
    return sum(_own_cpu(one) for one in _family(pid))


def _family(pid: int) -> Iterable[int]:
    waiting = [pid]
    while waiting:
        one = waiting.pop()
        yield one
        try:
            for task in Path(f"/proc/{one}/task").iterdir():
                waiting += [int(word) for word in (task / "children").read_text().split()]
        except OSError:
            continue


def _own_cpu(pid: int) -> float:
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) * _CLOCK_S if fields else 0.0


def process_state(pid: int) -> str:
    """Return "running", "stopped" (by a signal or a debugger) or "gone"."""
    fields = _stat(pid)
    if not fields or fields[0] in "ZX":
        return "gone"
    return "stopped" if fields[0] in "Tt" else "running"


def _stat(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
