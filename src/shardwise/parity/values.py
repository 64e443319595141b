"""What a rank's tensors are, made small enough to compare across ranks: fingerprints, digests, pieces."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from shardwise.data.rows import settle_marks, tensors

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from shardwise.data.feed import StepBatch
    from shardwise.data.rows import RowMarks

Print = tuple[float, float]
"""A projection of a tensor on a fixed pattern, and its norm: equal for equal tensors, as good as never for others."""

_PATTERN = 97


def fingerprint(value: Tensor) -> Print:
    """Project a tensor; the difference of two prints is about the norm of the difference of the tensors."""
    flat = value.detach().to("cpu", torch.float64).flatten()
    pattern = (torch.arange(len(flat)) * 31 % _PATTERN - _PATTERN // 2).double() / (_PATTERN / 4)
    return float(flat @ pattern), float(flat.norm())


def pieces(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return this rank's own part of each tensor; ranks that hold the same part give it the same key."""
    parts = {}
    for name, tensor in named:
        if isinstance(tensor, DTensor):
            parts[name + _cut(tensor)] = tensor.to_local().detach()
        else:
            parts[name] = tensor.detach()
    return parts


def _cut(tensor: DTensor) -> str:
    """Where on each axis that cuts the tensor this rank stands, such as " [tp 1]"."""
    mesh = tensor.device_mesh
    coordinate: Sequence[int] = mesh.get_coordinate() or ()
    names = mesh.mesh_dim_names or [str(number) for number in range(mesh.ndim)]
    parts = [
        f"{name} {place}"
        for name, place, placement in zip(names, coordinate, tensor.placements, strict=True)
        if not placement.is_replicate()
    ]
    return f" [{', '.join(parts)}]" if parts else ""


def row_digests(batch: StepBatch) -> list[str]:
    """Return a digest of every real row of a step, in order."""
    return [
        digest
        for each in batch.micro_batches
        for digest in digest_rows(each.uncut, each.rows, settle_marks(each.marks, each.uncut, each.filled))
    ]


def digest_rows(batch: Any, rows: int, marks: RowMarks) -> list[str]:
    """Return a digest of each of the first `rows` of a batch whose tensors with rows are marked."""
    parts = [tensor for tensor, marked in zip(tensors(batch), marks, strict=True) if marked]
    return [_digest(part[row] for part in parts) for row in range(rows)]


def _digest(values: Iterable[Any]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for value in values:
        digest.update(value.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
