"""Buckets: many small tensors in few collectives."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor

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
