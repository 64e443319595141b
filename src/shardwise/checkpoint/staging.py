"""A copy of tensors on the host, in memory that is kept from one save to the next."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shardwise.checkpoint.shard import memory_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

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
        """Give the memory back."""
        self._chunks.clear()

    def _chunk(self, number: int, size: int, *, is_pinned: bool) -> Tensor:
        if number == len(self._chunks):
            self._chunks.append(torch.empty(0, dtype=torch.uint8))
        kept = self._chunks[number]
        if len(kept) < size or (is_pinned and not kept.is_pinned()):
            self._chunks[number] = torch.empty(size, dtype=torch.uint8, pin_memory=is_pinned)
        return self._chunks[number]


def _packed(pieces: Mapping[str, Tensor]) -> list[list[str]]:
    """Deal the names into chunks, the widest dtypes first, so that every piece is aligned; a giant gets its own."""
    chunks: list[list[str]] = []
    room = 0
    for name in sorted(pieces, key=lambda name: -pieces[name].element_size()):
        if pieces[name].nbytes > room:
            chunks.append([])
            room = CHUNK
        chunks[-1].append(name)
        room -= pieces[name].nbytes
    return chunks


def _copy(target: Tensor, source: Tensor) -> None:
    """Copy to the host; what lives there already as one memcpy: 12 GB/s where torch's copy_ on two threads has 6."""
    if source.device.type == "cpu" and source.is_contiguous():
        memory_of(target)[:] = memory_of(source)
    else:
        target.copy_(source, non_blocking=True)
