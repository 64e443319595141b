"""Faults of a drill: each is injected once, from inside its rank, after a given number of optimizer steps."""

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

from shardwise import checkpoint
from shardwise.environment import identify

if TYPE_CHECKING:
    from collections.abc import Callable

Kind = Literal["kill", "freeze", "slow", "mismatch", "link", "checkpoint", "disk"]
KINDS: tuple[Kind, ...] = get_args(Kind)
JOB_KINDS: tuple[Kind, ...] = ("checkpoint", "disk")
"""Drills that need the checkpoints of a job."""
_CHECKPOINT_TIMEOUT_S = 60.0
"""Maximum wait for the checkpoint that must precede the fault."""


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """A fault: its kind, its rank and the step after which it is injected."""

    kind: Kind
    rank: int
    step: int
    """Number of optimizer steps in the process after which the fault is injected."""
    mark: str
    """File written when the fault is injected. Its existence disables the fault in restarted processes."""
    checkpoints: str = ""
    """Directory of checkpoints; empty for a script."""
    saved: int = 0
    """Step of the checkpoint that must be published before the fault; 0 for none."""
    seconds: float = 0.0
    """Sleep after each step of a slow rank, or once after a mismatch."""
    most_s: float = 0.0
    """Maximum total sleep of a slow rank."""


class FaultMark(msgspec.Struct, frozen=True, kw_only=True):
    """The record of an injected fault."""

    at: float
    """Seconds since the epoch."""
    rank: int
    pid: int
    step: int
    saved: int = 0
    """Step of the newest checkpoint when the fault was injected; 0 if there was none."""
    file: str = ""
    """Name of the damaged checkpoint; empty for other faults."""


def read_mark(path: Path) -> FaultMark | None:
    """Read the record of an injected fault; return None if the fault has not been injected."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=FaultMark)
    except FileNotFoundError:
        return None


def arm(fault: Fault, rank: int) -> None:
    """Register hooks that inject the fault once in this process, which runs `rank`; imports torch."""
    from torch.optim import optimizer

    if Path(fault.mark).exists():
        return
    steps = _StepCounter(partial(_ACTIONS[fault.kind], fault, rank))
    optimizer.register_optimizer_step_pre_hook(steps.begin)
    optimizer.register_optimizer_step_post_hook(steps.end)


class _StepCounter:
    """Count optimizer steps and call `on_step` after each; steps of wrapped optimizers count once."""

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
        _write_mark(fault, rank, step, saved=_wait_for_checkpoint(fault))
        os.kill(os.getpid(), signal.SIGKILL)


def _freeze(fault: Fault, rank: int, step: int) -> None:
    if (rank, step) == (fault.rank, fault.step):
        _write_mark(fault, rank, step)
        os.kill(os.getpid(), signal.SIGSTOP)


def _slow(fault: Fault, rank: int, step: int) -> None:
    if rank == fault.rank and 0 <= (step - fault.step) * fault.seconds <= fault.most_s:
        _write_mark(fault, rank, step)
        time.sleep(fault.seconds)


def _mismatch(fault: Fault, rank: int, step: int) -> None:
    """Run one more all-reduce, with a different dtype on one rank. Communicates over the default group.

    Both tensors have the same byte size, so gloo does not detect the mismatch and returns wrong values.
    """
    if step != fault.step:
        return
    import torch
    import torch.distributed as dist

    dtype = torch.float32
    if rank == fault.rank:
        _write_mark(fault, rank, step, saved=_wait_for_checkpoint(fault))
        dtype = torch.int32
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    dist.all_reduce(torch.ones(4, dtype=dtype, device=device))
    time.sleep(fault.seconds)


def _link(fault: Fault, rank: int, step: int) -> None:
    if (rank, step) == (fault.rank, fault.step):
        _write_mark(fault, rank, step, saved=_wait_for_checkpoint(fault))
        close_connections(identify().master_port)


def close_connections(store_port: int | None) -> int:
    """Shut down this process's TCP connections to local processes, except to the store; return their number."""
    closed = 0
    for entry in list(Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(OSError):  # the socket was closed meanwhile, or it listens and has no peer
            if not str(entry.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as link:
                if link.family not in {socket.AF_INET, socket.AF_INET6} or link.type != socket.SOCK_STREAM:
                    continue
                (address, local_port, *_), (peer, peer_port, *_) = link.getsockname(), link.getpeername()
                if address == peer and store_port not in {local_port, peer_port}:
                    link.shutdown(socket.SHUT_RDWR)
                    closed += 1
    return closed


def _checkpoint(fault: Fault, rank: int, step: int) -> None:
    """Flip the last byte of the newest checkpoint's largest file, then kill this process with SIGKILL."""
    if (rank, step) != (fault.rank, fault.step):
        return
    saved = _wait_for_checkpoint(fault)
    newest = checkpoint.CheckpointDirectory(fault.checkpoints).latest()
    if newest is not None:
        largest = max(newest.glob("*.safetensors"), key=lambda path: path.stat().st_size)
        with largest.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            last = file.read(1)
            file.seek(-1, os.SEEK_END)
            file.write(bytes([last[0] ^ 0xFF]))
        _write_mark(fault, rank, step, saved=saved, file=newest.name)
    os.kill(os.getpid(), signal.SIGKILL)


def _disk(fault: Fault, rank: int, step: int) -> None:
    """Make the next shard write of each rank fail with ENOSPC after the header; later writes succeed."""
    if step != fault.step:
        return
    saved = _wait_for_checkpoint(fault)
    writer = importlib.import_module("shardwise.checkpoint.write")
    write_shard = writer.write_shard

    def fail_once(path: Path, layout: Any, _pieces: Any) -> dict[str, str]:
        writer.write_shard = write_shard  # type: ignore[attr-defined]
        path.write_bytes(layout.header)
        _write_mark(fault, rank, step, saved=saved)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    writer.write_shard = fail_once  # type: ignore[attr-defined]


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
    """Wait for the checkpoint that must precede the fault; return the step of the newest checkpoint, 0 for none."""
    if not fault.saved:
        return 0
    deadline = time.monotonic() + _CHECKPOINT_TIMEOUT_S
    while True:
        latest = checkpoint.CheckpointDirectory(fault.checkpoints).latest()
        step = 0 if latest is None else checkpoint.read_manifest(latest).step
        if step >= fault.saved or time.monotonic() > deadline:
            return step
        time.sleep(0.005)


def _write_mark(fault: Fault, rank: int, step: int, *, saved: int = 0, file: str = "") -> None:
    """Record that the fault is injected now, unless a record exists."""
    path = Path(fault.mark)
    if path.exists():
        return
    mark = FaultMark(at=time.time(), rank=rank, pid=os.getpid(), step=step, saved=saved, file=file)
    partial_ = path.with_suffix(f".{os.getpid()}")
    partial_.write_bytes(msgspec.json.encode(mark))
    partial_.rename(path)
