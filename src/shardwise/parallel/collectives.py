"""Collectives on plain tensors along any dimension, buckets of small tensors, and whole state dicts on rank 0."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import ModuleList, functional
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import nn


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
    """Concatenate the shards of all ranks along `dim`, of which the last may be shorter; communicates over `group`.

    `length` is that of the whole, where shards differ.
    """
    size = dist.get_world_size(group)
    longest = x.shape[dim] if length is None else -(-length // size)
    moved = x.movedim(dim, 0)
    padded = functional.pad(moved, (*(0, 0) * (moved.ndim - 1), 0, longest - moved.shape[0])).contiguous()
    everyone = padded.new_empty((size * longest, *padded.shape[1:]))
    gather_flat(everyone, padded, group)
    return everyone[: length or len(everyone)].movedim(0, dim).contiguous()


def sum_scattered(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Sum all ranks' `x` and return this rank's shard along `dim`, which they divide; communicates over `group`."""
    moved = x.movedim(dim, 0).contiguous()
    shard = moved.new_empty((moved.shape[0] // dist.get_world_size(group), *moved.shape[1:]))
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(shard, moved, group=group)
    return shard.movedim(0, dim).contiguous()


def exchanged(tensors: Sequence[Tensor], split: int, join: int, group: dist.ProcessGroup) -> list[Tensor]:
    """Split each tensor by rank along `split`, and concatenate what ranks send along `join`; communicates over `group`.

    One all-to-all for all tensors, which share a dtype; ranks divide `split`.
    """
    size = dist.get_world_size(group)
    shards = [x.unflatten(split, (size, -1)).movedim(split, 0) for x in tensors]
    given = torch.cat([shard.flatten(1) for shard in shards], dim=1)
    taken = torch.empty_like(given)
    dist.all_to_all_single(taken, given, group=group)
    pieces = taken.split([shard[0].numel() for shard in shards], dim=1)
    return [
        piece.unflatten(1, shard.shape[1:]).movedim(0, join).flatten(join, join + 1)
        for piece, shard in zip(pieces, shards, strict=True)
    ]


def own_shard(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's shard of a whole tensor along `dim`, split as torch.chunk does; no communication."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    longest = -(-x.shape[dim] // size)
    first = min(x.shape[dim], rank * longest)
    return x.narrow(dim, first, min(longest, x.shape[dim] - first)).contiguous()


# Buckets: many small tensors in few collectives.


BUCKET_BYTES = 25 << 20
"""DDP's own size: large enough for bandwidth, small enough that the copy beside it does not matter."""


def in_buckets(tensors: Iterable[Tensor], most_bytes: int = BUCKET_BYTES) -> Iterator[list[Tensor]]:
    """Yield runs of tensors of one dtype that together stay below `most_bytes`; a larger one is alone."""
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


# The user's own modules in a parallel model, and their whole tensors, gathered on rank 0 one by one.


def stages_of(model: nn.Module) -> list[nn.Module]:
    """Return the user's own modules in a model made by `apply_plan`: one, or the stages of this rank."""
    return list(model) if isinstance(model, ModuleList) else [unwrap(model)]


def parameters_of(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return this rank's parameters of a model made by `apply_plan`, under the names of the user's own; each once."""
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for stage in stages_of(model):
        for item in stage.named_parameters():
            found.setdefault(id(item[1]), item)
    return list(found.values())


def unwrap(model: nn.Module) -> nn.Module:
    """Return the user's own module under any strategy; sharded parameters stay sharded (see full_state_dict)."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def full_values(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return whole tensors on the host of rank 0, {} elsewhere; communicates over the world, on every rank.

    Ranks pass their tensors, shards as DTensors; tensors of other stages come from the first rank that has them.
    """
    mine = dict(named)
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    device = next((tensor.device for tensor in mine.values()), torch.device("cpu"))
    whole: dict[str, Tensor] = {}
    for name, owner in _owners(list(mine), size).items():
        tensor = mine.get(name)
        value = tensor.detach() if tensor is not None else None
        if isinstance(value, DTensor):
            value = _whole(value)
        if owner != 0:
            value = _pass_to_first(value, owner, rank, device)
        if rank == 0 and value is not None:
            whole[name] = value.cpu().clone()
    return whole


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return the model's state dict with whole tensors on the host of rank 0, {} elsewhere; on every rank."""
    named = []
    for stage in stages_of(model):
        foreign = getattr(stage, "foreign_buffers", ())
        named += [(name, value) for name, value in stage.state_dict().items() if name not in foreign]
    return full_values(named)


def own_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers that this rank owns; those of other pipeline stages are skipped."""
    for stage in stages_of(model):
        for name, buffer in stage.named_buffers():
            if name not in getattr(stage, "foreign_buffers", ()):
                yield name, buffer


def _whole(value: DTensor) -> Tensor:
    """Gather one axis of the mesh after the other, the inner split first; communicates over the mesh."""
    for axis in range(value.device_mesh.ndim):
        placements = [*(Replicate(),) * (axis + 1), *value.placements[axis + 1 :]]
        value = value.redistribute(placements=placements)
    return value.to_local()


def _owners(names: list[str], size: int) -> dict[str, int]:
    """Return the first rank that has each name, in one order for all ranks; communicates over the world."""
    if size == 1:
        return dict.fromkeys(names, 0)
    everyone: list[list[str]] = [[] for _ in range(size)]
    dist.all_gather_object(everyone, names)
    owners: dict[str, int] = {}
    for rank, theirs in enumerate(everyone):
        for name in theirs:
            owners.setdefault(name, rank)
    return owners


def _pass_to_first(value: Tensor | None, owner: int, rank: int, device: torch.device) -> Tensor | None:
    """Send a tensor from `owner` to rank 0; communicates between the two."""
    if value is not None and rank == owner:
        dist.send_object_list([value.dtype, tuple(value.shape)], dst=0)
        dist.send(value.contiguous(), dst=0)
    if rank != 0:
        return None
    kind: list[Any] = [None, None]
    dist.recv_object_list(kind, src=owner)
    received: Tensor = torch.empty(kind[1], dtype=kind[0], device=device)
    dist.recv(received, src=owner)
    return received
