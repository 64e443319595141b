"""A copy of tensors on the host, in memory that is kept from one save to the next."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shardwise.checkpoint.dtypes import CODES
from shardwise.checkpoint.shard import ShardLayout, memory_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


class Staging:
    """Host memory for one set of pieces, laid out as their shard file; pinned when the pieces live on CUDA.

    Memory is registered with CUDA rather than taken from torch's pinned allocator, which rounds up to a power of
    two. Pinning is slow (0.65 s a GiB), copying to pinned memory is not (55 GB/s on an H200): hence kept.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._is_pinned = False

    def copy(self, pieces: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a host copy of each piece, complete on return; the copies before this one are overwritten."""
        layout = ShardLayout.of({name: (CODES[piece.dtype], tuple(piece.shape)) for name, piece in pieces.items()})
        start = len(layout.header)
        self._make_room(layout.size - start, pinned=any(piece.is_cuda for piece in pieces.values()))
        copies = {}
        for name, place in layout.places.items():
            flat = self._buffer[place.begin - start : place.end - start]
            copies[name] = flat.view(place.dtype).view(place.shape)
            _copy(copies[name], pieces[name])
        for device in {piece.device for piece in pieces.values() if piece.is_cuda}:
            torch.cuda.synchronize(device)
        return copies

    def release(self) -> None:
        """Give the memory back."""
        if self._is_pinned:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(self._buffer.data_ptr()))
        self._buffer, self._is_pinned = torch.empty(0, dtype=torch.uint8), False

    def _make_room(self, num_bytes: int, *, pinned: bool) -> None:
        if len(self._buffer) >= num_bytes and self._is_pinned >= pinned:
            return
        self.release()
        self._buffer = torch.empty(num_bytes, dtype=torch.uint8)
        if pinned:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(self._buffer.data_ptr(), num_bytes, 0))
            self._is_pinned = True


def _copy(target: Tensor, source: Tensor) -> None:
    """Copy to the host; what lives there already as one memcpy: 12 GB/s where torch's copy_ on two threads has 6."""
    if source.device.type == "cpu" and source.is_contiguous():
        memory_of(target)[:] = memory_of(source)
    else:
        target.copy_(source, non_blocking=True)
