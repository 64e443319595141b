"""Asynchronous checkpointing: training blocks only for the copy to host memory, and a thread writes the copy to disk.

Invariant: no rank raises alone. If the copy fails on one rank, its thread reports the error in the collective
write, and every rank raises the same error at the next call.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shardwise.checkpoint.disk import run_in_background
from shardwise.checkpoint.shard import byte_view
from shardwise.checkpoint.write import PlannedSave, SaveReport

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch.distributed as dist
    from torch import Tensor


NICENESS = 10
"""Niceness of the threads that save and upload, so that training has priority."""


@dataclass(frozen=True)
class StallReport:
    """Time for which an asynchronous save blocked the training loop."""

    waited_s: float
    """Time spent waiting for the previous save."""
    planned_s: float
    copied_s: float
    bytes_here: int
    """Number of bytes that this rank copied to host memory."""
    previous: SaveReport | None
    """The report of the previous save, if it was still running."""

    @property
    def stall_s(self) -> float:
        """Total time in seconds for which training was blocked."""
        return self.waited_s + self.planned_s + self.copied_s


class AsyncSaver:
    """Saves checkpoints in a background thread, one at a time.

    `group` must be a gloo process group that no other code uses, because the thread communicates while training does.
    `on_saved` is called by the thread with each published checkpoint, and must not raise.
    """

    def __init__(self, group: dist.ProcessGroup | None, on_saved: Callable[[SaveReport], None] | None = None) -> None:
        self._group, self._on_saved = group, on_saved
        self._staging = Staging()
        self._pending: Future[SaveReport] | None = None

    def save(
        self, directory: Path | str, step: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]
    ) -> StallReport:
        """Copy the tensors to host memory and start saving them. Communicates over the group; call on every rank.

        Training may modify the tensors when this method returns. It first waits for the previous save: if that save
        failed, every rank raises its CheckpointError and no new save starts. Call again to retry.
        """
        clock = time.perf_counter()
        previous = self.finish()
        waited_s, clock = time.perf_counter() - clock, time.perf_counter()
        planned = PlannedSave(Path(directory), step, tensors, facts, self._group)
        planned_s, clock = time.perf_counter() - clock, time.perf_counter()
        copies = self._stage(planned)
        copied_s = time.perf_counter() - clock

        def write() -> SaveReport:
            report = planned.write(copies.result)
            if self._on_saved is not None:
                self._on_saved(report)
            return report

        self._pending = run_in_background(write, "checkpoint", niceness=NICENESS)
        return StallReport(waited_s, planned_s, copied_s, planned.bytes_here, previous)

    def finish(self) -> SaveReport | None:
        """Wait for the running save and return its report, or None if no save is running; re-raise its error."""
        pending, self._pending = self._pending, None
        return None if pending is None else pending.result()

    @property
    def is_busy(self) -> bool:
        """Whether a save is running."""
        return self._pending is not None and not self._pending.done()

    def close(self) -> None:
        """Wait for the running save, then release the staging memory; re-raise the error of that save."""
        try:
            self.finish()
        finally:
            self._staging.release()

    def _stage(self, planned: PlannedSave) -> Future[dict[str, Tensor]]:
        """Copy the shards of this rank; store an error in the Future for the thread, which reports it to all ranks."""
        copies: Future[dict[str, Tensor]] = Future()
        try:
            copies.set_result(self._staging.copy(planned.pieces))
        except Exception as error:  # noqa: BLE001 - raising here would raise on one rank only
            copies.set_exception(error)
        return copies


CHUNK = 1 << 30
"""Size of one allocation of staging memory. torch rounds pinned allocations up to a power of two, so one large
allocation could take twice the memory."""


class Staging:
    """Host memory for copies of the shards of one rank, reused by every save; pinned if the shards are on CUDA.

    Pinning takes 0.65 s per GiB on the host of an H200, whereas copying to pinned memory runs at 55 GB/s.
    """

    def __init__(self) -> None:
        self._chunks: list[Tensor] = []

    def copy(self, pieces: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a host copy of each shard, synchronized with the device; overwrite the copies of the previous call."""
        devices = {piece.device for piece in pieces.values() if piece.is_cuda}
        copies = {}
        for number, names in enumerate(_pack(pieces)):
            size = sum(pieces[name].nbytes for name in names)
            begin, chunk = 0, self._chunk(number, size, is_pinned=bool(devices))
            for name in names:
                piece = pieces[name]
                copies[name] = chunk[begin : begin + piece.nbytes].view(piece.dtype).view(piece.shape)
                _copy(copies[name], piece)
                begin += piece.nbytes
        for device in devices:
            torch.cuda.synchronize(device)
        return copies

    def release(self) -> None:
        """Free the host memory."""
        self._chunks.clear()

    def _chunk(self, number: int, size: int, *, is_pinned: bool) -> Tensor:
        if number == len(self._chunks):
            self._chunks.append(torch.empty(0, dtype=torch.uint8))
        chunk = self._chunks[number]
        if len(chunk) < size or (is_pinned and not chunk.is_pinned()):
            self._chunks[number] = torch.empty(size, dtype=torch.uint8, pin_memory=is_pinned)
        return self._chunks[number]


def _pack(pieces: Mapping[str, Tensor]) -> list[list[str]]:
    """Assign tensor names to chunks, widest dtypes first for alignment; a tensor above CHUNK has its own chunk."""
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
    """Copy to host memory. For host tensors memcpy runs at 12 GB/s, whereas copy_ on two threads runs at 6 GB/s."""
    if source.device.type == "cpu" and source.is_contiguous():
        byte_view(target)[:] = byte_view(source)
    else:
        target.copy_(source, non_blocking=True)
