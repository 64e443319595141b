"""Faults of a drill: each is done to its rank from inside, after so many optimizer steps, and only once."""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import signal
import socket
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import msgspec

from shardwise.environment import identify

if TYPE_CHECKING:
    from collections.abc import Callable

Kind = Literal["kill", "freeze", "slow", "mismatch", "link", "checkpoint", "disk"]
KINDS: tuple[Kind, ...] = get_args(Kind)
OF_JOBS: tuple[Kind, ...] = ("checkpoint", "disk")
"""Drills that need checkpoints of ours."""
_PATIENCE_S = 60.0
"""How long a checkpoint may take before a fault that must come after it."""


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """What happens to which rank, and when."""

    kind: Kind
    rank: int
    step: int
    """Optimizer steps that every rank has done when it is injected, counted from its start."""
    mark: str
    """File written when it was injected: into the first processes, not to those of a restart."""
    checkpoints: str = ""
    """Folder of checkpoints; empty for a script."""
    saved: int = 0
    """Step of the checkpoint that is published before; 0 waits for none."""
    seconds: float = 0.0
    """Of sleep: after each step for a slow rank, once after a mismatch."""
    most_s: float = 0.0
    """Of sleep in all for a slow rank."""


class FaultMark(msgspec.Struct, frozen=True, kw_only=True):
    """That a fault came."""

    at: float
    """Seconds since the epoch."""
    rank: int
    pid: int
    step: int
    saved: int = 0
    """Step of the newest checkpoint then; 0 for none."""
    file: str = ""
    """Checkpoint that was damaged."""


def read_mark(path: Path) -> FaultMark | None:
    """Read when and where a fault came; None before it has."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=FaultMark)
    except FileNotFoundError:
        return None


def arm(fault: Fault, rank: int) -> None:
    """Inject the fault into this process, which is `rank`; imports torch. It is injected once."""
    from torch.optim import optimizer

    if Path(fault.mark).exists():
        return
    steps = _Steps(partial(_ACTIONS[fault.kind], fault, rank))
    optimizer.register_optimizer_step_pre_hook(steps.begin)
    optimizer.register_optimizer_step_post_hook(steps.end)


class _Steps:
    """Counts optimizer steps, those of an optimizer inside another as one, and reports each."""

    def __init__(self, on_step: Callable[[int], None]) -> None:
        self._on_step = on_step
        self._depth = self._count = 0

    def begin(self, *_: Any) -> None:
        self._depth += 1

    def end(self, *_: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._count += 1
            self._on_step(self._count)


def _kill(fault: Fault, rank: int, step: int) -> None:
    if (rank, step) == (fault.rank, fault.step):
        _leave_mark(fault, rank, step, saved=_wait_for_checkpoint(fault))
        os.kill(os.getpid(), signal.SIGKILL)


def _freeze(fault: Fault, rank: int, step: int) -> None:
    if (rank, step) == (fault.rank, fault.step):
        _leave_mark(fault, rank, step)
        os.kill(os.getpid(), signal.SIGSTOP)


def _slow(fault: Fault, rank: int, step: int) -> None:
    if rank == fault.rank and 0 <= (step - fault.step) * fault.seconds <= fault.most_s:
        _leave_mark(fault, rank, step)
        time.sleep(fault.seconds)


def _mismatch(fault: Fault, rank: int, step: int) -> None:
    """One more collective on all ranks, of which one has another dtype; communicates over the default group.

    Equal in bytes: gloo gives wrong numbers for it, and no error.
    """
    if step != fault.step:
        return
    import torch
    import torch.distributed as dist

    if rank == fault.rank:
        _leave_mark(fault, rank, step, saved=_wait_for_checkpoint(fault))
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    dist.all_reduce(torch.ones(4, dtype=torch.int32 if rank == fault.rank else torch.float32, device=device))
    time.sleep(fault.seconds)


def _link(fault: Fault, rank: int, step: int) -> None:
    if (rank, step) == (fault.rank, fault.step):
        _leave_mark(fault, rank, step, saved=_wait_for_checkpoint(fault))
        cut_links(identify().master_port)


def cut_links(store_port: int | None) -> int:
    """Shut this process's TCP connections to processes of this machine, save those to the store; returns how many."""
    closed = 0
    for entry in list(Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(OSError):  # closed meanwhile, or listens and has no peer
            if not str(entry.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as link:
                if link.family not in {socket.AF_INET, socket.AF_INET6} or link.type != socket.SOCK_STREAM:
                    continue
                (here, own_port, *_), (there, port, *_) = link.getsockname(), link.getpeername()
                if here == there and store_port not in {own_port, port}:
                    link.shutdown(socket.SHUT_RDWR)
                    closed += 1
    return closed


def _checkpoint(fault: Fault, rank: int, step: int) -> None:
    """Flip the last byte of the newest checkpoint's largest file, and end as by kill -9."""
    if (rank, step) != (fault.rank, fault.step):
        return
    from shardwise.checkpoint import CheckpointFolder

    saved = _wait_for_checkpoint(fault)
    newest = CheckpointFolder(fault.checkpoints).latest()
    if newest is not None:
        largest = max(newest.glob("*.safetensors"), key=lambda path: path.stat().st_size)
        with largest.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            last = file.read(1)
            file.seek(-1, os.SEEK_END)
            file.write(bytes([last[0] ^ 0xFF]))
        _leave_mark(fault, rank, step, saved=saved, file=newest.name)
    os.kill(os.getpid(), signal.SIGKILL)


def _disk(fault: Fault, rank: int, step: int) -> None:
    """Have the next shard that each rank writes end half way for want of space; then there is space again."""
    if step != fault.step:
        return
    saved = _wait_for_checkpoint(fault)
    saving = importlib.import_module("shardwise.checkpoint.write")
    real = saving.write_shard

    def full(path: Path, layout: Any, _pieces: Any) -> dict[str, str]:
        saving.write_shard = real  # type: ignore[attr-defined]
        path.write_bytes(layout.header)
        _leave_mark(fault, rank, step, saved=saved)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    saving.write_shard = full  # type: ignore[attr-defined]


_ACTIONS: dict[Kind, Callable[[Fault, int, int], None]] = {
    "kill": _kill,
    "freeze": _freeze,
    "slow": _slow,
    "mismatch": _mismatch,
    "link": _link,
    "checkpoint": _checkpoint,
    "disk": _disk,
}


def _wait_for_checkpoint(fault: Fault) -> int:
    """Wait until the checkpoint before the fault is published; returns the newest one's step, 0 for none."""
    if not fault.saved:
        return 0
    from shardwise.checkpoint import CheckpointFolder
    from shardwise.checkpoint.errors import parse_name

    deadline = time.monotonic() + _PATIENCE_S
    while True:
        latest = CheckpointFolder(fault.checkpoints).latest()
        step, _ = (latest and parse_name(latest.name)) or (0, 0)
        if step >= fault.saved or time.monotonic() > deadline:
            return step
        time.sleep(0.005)


def _leave_mark(fault: Fault, rank: int, step: int, *, saved: int = 0, file: str = "") -> None:
    """Record that the fault is injected now, unless it has been."""
    path = Path(fault.mark)
    if path.exists():
        return
    mark = FaultMark(at=time.time(), rank=rank, pid=os.getpid(), step=step, saved=saved, file=file)
    partial_ = path.with_suffix(f".{os.getpid()}")
    partial_.write_bytes(msgspec.json.encode(mark))
    partial_.rename(path)
