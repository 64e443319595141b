"""Asynchronous saving: the training loop waits for a copy on the host, a background thread writes it.

The invariant: a rank never raises alone. A copy that fails on one rank is handed to its thread, and the collective of
the write makes every rank raise the same error at the next call.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shardwise.checkpoint.shard import memory_of
from shardwise.checkpoint.write import Draft, SaveReport

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch.distributed as dist
    from torch import Tensor


_NICENESS = 10
"""The writing thread yields the processor to training; on Linux niceness is a thread's own."""


@dataclass(frozen=True)
class StallReport:
    """What a save in the background cost the training loop."""

    waited_s: float
    """For the save before it, which was not yet done."""
    planned_s: float
    copied_s: float
    bytes_here: int
    """Bytes this rank copied."""
    previous: SaveReport | None
    """What became of the save before it."""

    @property
    def stall_s(self) -> float:
        """Seconds for which training was blocked."""
        return self.waited_s + self.planned_s + self.copied_s


class AsyncSaver:
    """Saves one checkpoint after another in the background, never two at once.

    `group` must be a gloo group of its own: the thread communicates over it while training uses the others.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._staging = Staging()
        self._pending: Future[SaveReport] | None = None

    def save(
        self, folder: Path | str, step: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]
    ) -> StallReport:
        """Copy the state and begin to save it; called on every rank, communicates over the group.

        Returns once the tensors may change again. Waits for the save before; if that one failed, raises its
        CheckpointError on every rank and begins nothing: call again to try again.
        """
        clock = time.perf_counter()
        previous = self.finish()
        waited_s, clock = time.perf_counter() - clock, time.perf_counter()
        draft = Draft(Path(folder), step, tensors, facts, self._group)
        planned_s, clock = time.perf_counter() - clock, time.perf_counter()
        copies = self._stage(draft)
        copied_s = time.perf_counter() - clock
        self._pending = _in_background(lambda: draft.write(copies.result))
        return StallReport(waited_s, planned_s, copied_s, draft.bytes_here, previous)

    def finish(self) -> SaveReport | None:
        """Wait for the save under way and return its report, None if there is none; raises what it raised."""
        pending, self._pending = self._pending, None
        return pending.result() if pending is not None else None

    @property
    def is_busy(self) -> bool:
        """Whether a save is under way."""
        return self._pending is not None and not self._pending.done()

    def close(self) -> None:
        """Wait for the save under way, then release the staging memory; raises what that save raised."""
        try:
            self.finish()
        finally:
            self._staging.release()

    def _stage(self, draft: Draft) -> Future[dict[str, Tensor]]:
        """Copy this rank's pieces; a failure is kept for the thread, which reports it to all ranks."""
        copies: Future[dict[str, Tensor]] = Future()
        try:
            copies.set_result(self._staging.copy(draft.pieces))
        except Exception as error:  # noqa: BLE001 - it must not be raised here, on one rank only
            copies.set_exception(error)
        return copies


def _in_background(work: Callable[[], SaveReport]) -> Future[SaveReport]:
    """Run `work` in a thread of low priority that does not keep the process alive."""
    result: Future[SaveReport] = Future()

    def run() -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        try:
            result.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
            result.set_exception(error)

    threading.Thread(target=run, name="checkpoint", daemon=True).start()
    return result


# A copy of tensors on the host, in memory that is kept from one save to the next.


CHUNK = 1 << 30
"""Memory is taken in such chunks: torch rounds pinned memory up to a power of two, so one block could cost double."""


class Staging:
    """Host memory for one set of pieces; pinned when they live on CUDA.

    Pinning is slow (0.65 s a GiB on an H200's host), copying to pinned memory is not (55 GB/s): hence it is kept.
    """

    def __init__(self) -> None:
        self._chunks: list[Tensor] = []

    def copy(self, pieces: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a host copy of each piece, complete on return; the copies before this one are overwritten."""
        is_pinned = any(piece.is_cuda for piece in pieces.values())
        copies = {}
        for number, names in enumerate(_packed(pieces)):
            size = sum(pieces[name].nbytes for name in names)
            begin, chunk = 0, self._chunk(number, size, is_pinned=is_pinned)
            for name in names:
                piece = pieces[name]
                copies[name] = chunk[begin : begin + piece.nbytes].view(piece.dtype).view(piece.shape)
                _copy(copies[name], piece)
                begin += piece.nbytes
        for device in {piece.device for piece in pieces.values() if piece.is_cuda}:
            torch.cuda.synchronize(device)
        return copies

    def release(self) -> None:
        """Release the memory."""
        self._chunks.clear()

    def _chunk(self, number: int, size: int, *, is_pinned: bool) -> Tensor:
        if number == len(self._chunks):
            self._chunks.append(torch.empty(0, dtype=torch.uint8))
        kept = self._chunks[number]
        if len(kept) < size or (is_pinned and not kept.is_pinned()):
            self._chunks[number] = torch.empty(size, dtype=torch.uint8, pin_memory=is_pinned)
        return self._chunks[number]


def _packed(pieces: Mapping[str, Tensor]) -> list[list[str]]:
    """Assign the names to chunks, the widest dtypes first, so that all are aligned; a larger piece gets its own."""
    chunks: list[list[str]] = []
    free_bytes = 0
    for name in sorted(pieces, key=lambda name: -pieces[name].element_size()):
        if pieces[name].nbytes > free_bytes:
            chunks.append([])
            free_bytes = CHUNK
        chunks[-1].append(name)
        free_bytes -= pieces[name].nbytes
    return chunks


def _copy(target: Tensor, source: Tensor) -> None:
    """Copy to the host; what lives there already as one memcpy: 12 GB/s where torch's copy_ on two threads has 6."""
    if source.device.type == "cpu" and source.is_contiguous():
        memory_of(target)[:] = memory_of(source)
    else:
        target.copy_(source, non_blocking=True)
