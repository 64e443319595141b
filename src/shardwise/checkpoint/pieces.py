"""Which box of a tensor this rank holds, and who writes which: torch's checkpoint planning, over our own storage.

Deduplication and resharding are torch.distributed.checkpoint's. Where a box begins is computed here: torch asks the
placements from left to right, which misplaces rows when a dimension is sharded by tp and then by shard, both unevenly
(the 50,257 rows of GPT-2's vocabulary on shard4 x tp2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor

from shardwise.checkpoint.errors import CheckpointError
from shardwise.checkpoint.manifest import CODES, DTYPES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardwise.checkpoint.manifest import Piece, TensorEntry

Form = tuple[str, tuple[int, ...]]
"""Dtype name and whole shape of a tensor."""


def local_data(tensor: Tensor) -> Tensor:
    """Return this rank's values, detached; for a whole tensor the tensor itself."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def box_of(name: str, tensor: Tensor) -> ChunkStorageMetadata:
    """Return where this rank's values lie in the whole tensor; `name` is for errors."""
    offsets, lengths = [0] * tensor.ndim, list(tensor.shape)
    if isinstance(tensor, DTensor):
        _narrow(name, tensor, offsets, lengths)
    local_shape = tuple(local_data(tensor).shape)
    if local_shape != tuple(lengths):
        raise CheckpointError(
            f"tensor {name!r} has {local_shape} here, and its placements give {tuple(lengths)}",
            code="checkpoint.placement-mismatch",
        )
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(lengths))


def _narrow(name: str, tensor: DTensor, offsets: list[int], lengths: list[int]) -> None:
    """Narrow the whole tensor's box to this rank's, one mesh axis after another in the order of sharding."""
    # By the rank, not by the mesh's own coordinate: the mesh of a result may be an equal one out of DTensor's cache,
    # made in the process that this one was forked from.
    rank = dist.get_rank() if dist.is_initialized() else 0
    coordinates = (tensor.device_mesh.mesh == rank).nonzero().tolist()
    if not coordinates:
        raise CheckpointError(
            f"tensor {name!r} is on a mesh that does not contain this rank", code="checkpoint.foreign-mesh"
        )
    sharded = [(axis, placement) for axis, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    pieces_so_far = [1] * tensor.ndim
    # A split factor is the number of pieces before this axis; plain Shards apply in the order of the mesh.
    for axis, placement in sorted(sharded, key=lambda each: getattr(each[1], "split_factor", 1)):
        dim = getattr(placement, "dim", None)
        if dim is None or getattr(placement, "split_factor", pieces_so_far[dim]) != pieces_so_far[dim]:
            raise CheckpointError(
                f"tensor {name!r} is placed as {tensor.placements}, which is not a box of it",
                code="checkpoint.placement-unsupported",
            )
        parts = tensor.device_mesh.size(axis)
        step = -(-lengths[dim] // parts)
        first = min(lengths[dim], coordinates[0][axis] * step)
        lengths[dim] = min(lengths[dim], first + step) - first
        offsets[dim] += first
        pieces_so_far[dim] *= parts


@dataclass(frozen=True)
class WriteProposal:
    """What one rank could write."""

    forms: dict[str, Form]
    """Every tensor of the rank, also those of which it holds nothing."""
    plan: SavePlan


def propose(tensors: Mapping[str, Tensor]) -> WriteProposal:
    """Return what this rank could write; no communication."""
    forms, items = {}, []
    for name, tensor in tensors.items():
        if tensor.dtype not in CODES:
            raise CheckpointError(
                f"tensor {name!r} is {tensor.dtype}",
                code="checkpoint.dtype-unsupported",
                fix=f"use one of {', '.join(DTYPES)}",
            )
        if name == "__metadata__":
            raise CheckpointError(
                f"tensor {name!r} has a name that safetensors keeps for itself",
                code="checkpoint.tensor-name-reserved",
                fix="rename it",
            )
        forms[name] = (CODES[tensor.dtype], tuple(tensor.shape))
        box = box_of(name, tensor)
        if 0 not in box.sizes:
            data = TensorWriteData(chunk=box, properties=TensorProperties(dtype=tensor.dtype), size=tensor.shape)
            items.append(WriteItem(index=MetadataIndex(name, box.offsets), type=WriteItemType.SHARD, tensor_data=data))
    return WriteProposal(forms, SavePlan(items))


def assign(proposals: Sequence[WriteProposal]) -> tuple[list[list[str]], dict[str, Form]]:
    """Return the names that each rank must write, every box by one rank only, and the form of every tensor."""
    forms: dict[str, Form] = {}
    for proposal in proposals:
        for name, form in proposal.forms.items():
            if forms.setdefault(name, form) != form:
                raise CheckpointError(
                    f"tensor {name!r} is {forms[name]} on one rank and {form} on another",
                    code="checkpoint.ranks-disagree",
                )
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    plans, _ = planner.create_global_plan([proposal.plan for proposal in proposals])
    return [[item.index.fqn for item in plan.items] for plan in plans], forms


@dataclass(frozen=True)
class PieceOverlap:
    """The overlap of a saved piece with this rank's shard of the same tensor."""

    piece: Piece
    piece_offsets: tuple[int, ...]
    box_offsets: tuple[int, ...]
    shape: tuple[int, ...]


def overlaps(name: str, tensor: Tensor, entry: TensorEntry) -> list[PieceOverlap]:
    """Return what of the saved pieces falls into this rank's box."""
    box = box_of(name, tensor)
    if 0 in box.sizes:
        return []
    saved = TensorStorageMetadata(
        properties=TensorProperties(dtype=tensor.dtype),
        size=torch.Size(entry.shape),
        chunks=[ChunkStorageMetadata(torch.Size(p.offsets), torch.Size(p.shape)) for p in entry.pieces],
    )
    return [
        PieceOverlap(
            piece=entry.pieces[cast("int", item.storage_index.index)],
            piece_offsets=tuple(item.storage_offsets),
            box_offsets=tuple(item.dest_offsets),
            shape=tuple(item.lengths),
        )
        for item in create_read_items_for_chunk_list(name, saved, [box])
    ]
