"""Collectives on plain tensors along any dimension, and buckets of many small tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


def gather_flat(everyone: Tensor, mine: Tensor, group: dist.ProcessGroup) -> None:
    """Fill `everyone` with the tensors of all ranks, one after the other; communicates over `group`."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(everyone, mine, group=group)


def all_reduced(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of all ranks' `x`; communicates over `group`."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def all_gathered(x: Tensor, dim: int, group: dist.ProcessGroup, length: int | None = None) -> Tensor:
    """Join the parts of all ranks along `dim`, of which the last may be shorter; communicates over `group`.

    `length` is that of the whole, where parts differ.
    """
    size = dist.get_world_size(group)
    longest = x.shape[dim] if length is None else -(-length // size)
    moved = x.movedim(dim, 0)
    padded = functional.pad(moved, (*(0, 0) * (moved.ndim - 1), 0, longest - moved.shape[0])).contiguous()
    everyone = padded.new_empty((size * longest, *padded.shape[1:]))
    gather_flat(everyone, padded, group)
    return everyone[: length or len(everyone)].movedim(0, dim).contiguous()


def sum_scattered(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Sum all ranks' `x` and return this rank's part along `dim`, which they divide; communicates over `group`."""
    moved = x.movedim(dim, 0).contiguous()
    part = moved.new_empty((moved.shape[0] // dist.get_world_size(group), *moved.shape[1:]))
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(part, moved, group=group)
    return part.movedim(0, dim).contiguous()


def exchanged(tensors: Sequence[Tensor], cut: int, join: int, group: dist.ProcessGroup) -> list[Tensor]:
    """Cut each tensor by rank along `cut` and join what all ranks hand over along `join`; communicates over `group`.

    One all-to-all for all tensors, which share a dtype; ranks divide `cut`.
    """
    size = dist.get_world_size(group)
    parts = [x.unflatten(cut, (size, -1)).movedim(cut, 0) for x in tensors]
    given = torch.cat([part.flatten(1) for part in parts], dim=1)
    taken = torch.empty_like(given)
    dist.all_to_all_single(taken, given, group=group)
    pieces = taken.split([part[0].numel() for part in parts], dim=1)
    return [
        piece.unflatten(1, part.shape[1:]).movedim(0, join).flatten(join, join + 1)
        for piece, part in zip(pieces, parts, strict=True)
    ]


def own_part(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's part of a whole along `dim`, cut as torch.chunk does; no communication."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    longest = -(-x.shape[dim] // size)
    first = min(x.shape[dim], rank * longest)
    return x.narrow(dim, first, min(longest, x.shape[dim] - first)).contiguous()


# Buckets: many small tensors in few collectives.


BUCKET_BYTES = 25 << 20
"""DDP's own size: large enough for bandwidth, small enough that the copy beside it does not matter."""


def in_buckets(tensors: Iterable[Tensor], most_bytes: int = BUCKET_BYTES) -> Iterator[list[Tensor]]:
    """Yield runs of tensors of one dtype that together stay below `most_bytes`; a larger one stands alone."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        num_bytes = tensor.numel() * tensor.element_size()
        if bucket and (tensor.dtype != bucket[0].dtype or size + num_bytes > most_bytes):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += num_bytes
    if bucket:
        yield bucket
