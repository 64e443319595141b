"""What a rank is busy with, from the stacks that it writes down when a signal asks for them."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.runs.recorder import user_frame

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from shardwise.runs.recorder import Stack

DATA = "waits for data"
_SAVES = "saves or loads a checkpoint"
_FILES = (
    (
        r"/torch/_inductor/(?!runtime)|/torch/_dynamo/(convert_frame|symbolic_convert|output_graph)|/triton/compiler",
        "compiles",
    ),
    (r"/torch/serialization\.py|/torch/distributed/checkpoint/|/safetensors/|/shardwise/checkpoint/", _SAVES),
    (r"/numpy/lib/_?npyio|/joblib/numpy_pickle|/h5py/|/zarr/", _SAVES),
    (r"/torch/utils/data/", DATA),
    (r"/(shutil|tarfile|zipfile)\.py$|/(fsspec|s3fs|gcsfs|botocore|boto3|huggingface_hub)/", "copies files"),
    (r"/subprocess\.py$", "waits for a program it started"),
)
"""Files that show what a stack is about."""
_FUNCTIONS = (
    (r"_*(run_|do_)?(eval|evaluate|evaluation|validate|validation)(_\w+)?", "evaluates"),
    (r"_*(run_|do_)?(save|upload|export)(_\w+)?", _SAVES),
)
"""Names of the user's functions that do: a pause inside of them is meant to be there."""
_CLOCK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Sample:
    """One sample of a rank: the stack of its main thread, and what it has used so far, its children included."""

    stack: Stack
    cpu_s: float
    at: float
    io_bytes: int = 0
    """Read and written: files, pipes and terminals, not sockets."""


@dataclass(frozen=True)
class Activity:
    """What a rank was seen to be doing, over some samples."""

    function: str
    place: str
    """FILE:LINE of the user's innermost frame."""
    inside: str
    """Function that this line called, if that is not the user's own; else empty."""
    kind: str = ""
    """Of a known kind: "compiles", "saves or loads a checkpoint", "waits for data", "evaluates" and the like."""
    is_moving: bool = False
    """It was found in different places."""
    cores: float = 0.0
    """Processors that it and its children kept busy."""
    bytes_per_s: float = 0.0
    """That it and its children read and wrote."""


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


def describe_activity(samples: Sequence[Sample]) -> Activity | None:
    """Return what a rank does, from samples in the order they were taken; None where no stack was seen."""
    seen = [sample for sample in samples if sample.stack]
    if not seen:
        return None
    stack = seen[-1].stack
    user = user_frame(stack) or stack[0]
    elapsed = seen[-1].at - seen[0].at
    kinds = [_kind(sample.stack) for sample in seen]
    return Activity(
        function=user.function,
        place=f"{user.file}:{user.line}",
        inside=stack[0].function if stack[0] is not user else "",
        kind=kinds[-1] if len(set(kinds)) == 1 else "",
        is_moving=len({_shape(sample.stack) for sample in seen}) > 1,
        cores=(seen[-1].cpu_s - seen[0].cpu_s) / elapsed if elapsed > 0 else 0.0,
        bytes_per_s=(seen[-1].io_bytes - seen[0].io_bytes) / elapsed if elapsed > 0 else 0.0,
    )


def _kind(stack: Stack) -> str:
    for pattern, kind in _FILES:
        if any(re.search(pattern, frame.file) for frame in stack):
            return kind
    own = [frame.function for frame in stack if frame.is_users]
    for pattern, kind in _FUNCTIONS:
        if any(re.fullmatch(pattern, name) for name in own):
            return kind
    return ""


def _shape(stack: Stack) -> tuple[object, ...]:
    """What must change for a stack to have moved: a loop that spins in one function stays where it is."""
    return (stack[0].file, stack[0].function, *stack[1:])


def cpu_seconds(pid: int) -> float:
    """Return the processor time that a process and its living descendants have used; 0 where it cannot be seen."""
    return sum(_own_cpu(one) for one in _family(pid))


def io_bytes(pid: int) -> int:
    """Return the bytes that a process and its living descendants have read and written; 0 where it cannot be seen."""
    return sum(_own_io(one) for one in _family(pid))


def _family(pid: int) -> Iterable[int]:
    waiting = [pid]
    while waiting:
        one = waiting.pop()
        yield one
        try:
            for task in Path(f"/proc/{one}/task").iterdir():
                waiting += [int(pid) for pid in (task / "children").read_text().split()]
        except OSError:
            continue


def _own_cpu(pid: int) -> float:
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) * _CLOCK_S if fields else 0.0


def _own_io(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/io").read_text()
    except OSError:  # another user's, or gone
        return 0
    return sum(int(count) for count in re.findall(r"^[rw]char: (\d+)", text, re.MULTILINE))


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
