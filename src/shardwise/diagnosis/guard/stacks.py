"""The activity of a rank, from the thread stacks that it writes on a signal."""

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
"""Patterns of file names in a stack, and the activity that they indicate."""
_FUNCTIONS = (
    (r"_*(run_|do_)?(eval|evaluate|evaluation|validate|validation)(_\w+)?", "evaluates"),
    (r"_*(run_|do_)?(save|upload|export)(_\w+)?", _SAVES),
)
"""Patterns of the user's function names that indicate an activity in which a long pause is expected."""
_CLOCK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Sample:
    """The stack of a rank's main thread, and the CPU time and I/O of the rank and its children so far."""

    stack: Stack
    cpu_s: float
    at: float
    io_bytes: int = 0
    """Bytes read from and written to files, pipes and terminals, but not sockets."""


@dataclass(frozen=True)
class Activity:
    """The activity of a rank over several samples."""

    function: str
    place: str
    """FILE:LINE of the user's innermost frame."""
    inside: str
    """Library function that this line called; empty if the innermost frame is the user's."""
    kind: str = ""
    """A known activity, such as "compiles", "saves or loads a checkpoint", "waits for data" or "evaluates"."""
    is_moving: bool = False
    """Whether the samples have different stacks."""
    cores: float = 0.0
    """CPU cores used by the rank and its children."""
    bytes_per_s: float = 0.0
    """Bytes per second that the rank and its children read and wrote."""


def send_stacks_signal(pid: int, number: int) -> bool:
    """Signal a process to write its stacks; return False if it has no handler, because the signal would end it."""
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
    """Return the activity of a rank from samples in chronological order; None if no sample contains a stack."""
    samples = [sample for sample in samples if sample.stack]
    if not samples:
        return None
    first, last = samples[0], samples[-1]
    stack = last.stack
    user = user_frame(stack) or stack[0]
    kinds = {_kind(sample.stack) for sample in samples}
    positions = {_position(sample.stack) for sample in samples}
    elapsed_s = last.at - first.at
    cores = bytes_per_s = 0.0
    if elapsed_s > 0:
        cores = (last.cpu_s - first.cpu_s) / elapsed_s
        bytes_per_s = (last.io_bytes - first.io_bytes) / elapsed_s
    return Activity(
        function=user.function,
        place=f"{user.file}:{user.line}",
        inside=stack[0].function if stack[0] is not user else "",
        kind=kinds.pop() if len(kinds) == 1 else "",
        is_moving=len(positions) > 1,
        cores=cores,
        bytes_per_s=bytes_per_s,
    )


def _kind(stack: Stack) -> str:
    for pattern, kind in _FILES:
        if any(re.search(pattern, frame.file) for frame in stack):
            return kind
    for pattern, kind in _FUNCTIONS:
        if any(frame.is_users and re.fullmatch(pattern, frame.function) for frame in stack):
            return kind
    return ""


def _position(stack: Stack) -> tuple[object, ...]:
    """Return the part of a stack that changes with progress, without the innermost line, which changes in any loop."""
    return (stack[0].file, stack[0].function, *stack[1:])


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds used by a process and its running descendants; inaccessible processes count as 0."""
    return sum(map(_process_cpu, _descendants(pid)))


def io_bytes(pid: int) -> int:
    """Return the bytes read and written by a process and its running descendants; inaccessible processes count as 0."""
    return sum(map(_process_io, _descendants(pid)))


def _descendants(pid: int) -> Iterable[int]:
    """Yield the process and all its descendants."""
    pending = [pid]
    while pending:
        process = pending.pop()
        yield process
        try:
            for task in Path(f"/proc/{process}/task").iterdir():
                pending += map(int, (task / "children").read_text().split())
        except OSError:
            continue


def _process_cpu(pid: int) -> float:
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) * _CLOCK_S if fields else 0.0


def _process_io(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/io").read_text()
    except OSError:  # the process belongs to another user, or has ended
        return 0
    return sum(map(int, re.findall(r"^[rw]char: (\d+)", text, re.MULTILINE)))


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
