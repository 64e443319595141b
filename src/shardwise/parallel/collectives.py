"""Collectives on plain tensors, conversion between placements, gradient buckets, and full state dicts on rank 0."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn import ModuleList, functional
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

_Placements = tuple["Placement", "Placement"]


def gather_flat(everyone: Tensor, mine: Tensor, group: dist.ProcessGroup) -> None:
    """All-gather `mine` of every rank into `everyone`, concatenated in rank order; communicates over `group`."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(everyone, mine, group=group)


def all_reduced(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of `x` over all ranks; communicates over `group`."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def all_gathered(x: Tensor, dim: int, group: dist.ProcessGroup, length: int | None = None) -> Tensor:
    """Return the shards of all ranks concatenated along `dim`; communicates over `group`.

    `length` is the size of the result along `dim`; pass it if the last shard is shorter than the others.
    """
    size = dist.get_world_size(group)
    longest = x.shape[dim] if length is None else -(-length // size)
    moved = x.movedim(dim, 0)
    padded = functional.pad(moved, (*(0, 0) * (moved.ndim - 1), 0, longest - moved.shape[0])).contiguous()
    everyone = padded.new_empty((size * longest, *padded.shape[1:]))
    gather_flat(everyone, padded, group)
    return everyone[: length or len(everyone)].movedim(0, dim).contiguous()


def sum_scattered(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Sum `x` over all ranks and return this rank's shard along `dim`; communicates over `group`.

    The group size must divide the size of `dim`.
    """
    moved = x.movedim(dim, 0).contiguous()
    shard = moved.new_empty((moved.shape[0] // dist.get_world_size(group), *moved.shape[1:]))
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(shard, moved, group=group)
    return shard.movedim(0, dim).contiguous()


def exchanged(tensors: Sequence[Tensor], split: int, join: int, group: dist.ProcessGroup) -> list[Tensor]:
    """Scatter each tensor by rank along `split` and concatenate along `join`; communicates over `group`.

    One all-to-all exchanges all tensors, which must have the same dtype. The group size must divide their `split` dim.
    """
    size = dist.get_world_size(group)
    shards = [x.unflatten(split, (size, -1)).movedim(split, 0) for x in tensors]
    sent = torch.cat([shard.flatten(1) for shard in shards], dim=1)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    pieces = received.split([shard[0].numel() for shard in shards], dim=1)
    # A comprehension, not a loop that appends: torch 2.13 compiles the loop with wrong sizes after a graph break.
    return [
        piece.unflatten(1, shard.shape[1:]).movedim(0, join).flatten(join, join + 1)
        for piece, shard in zip(pieces, shards, strict=True)
    ]


def own_shard(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's shard of a full tensor along `dim`, as torch.chunk splits it; does not communicate."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    longest = -(-x.shape[dim] // size)
    first = min(x.shape[dim], rank * longest)
    return x.narrow(dim, first, min(longest, x.shape[dim] - first)).contiguous()


def convert(
    x: Tensor, mesh: DeviceMesh, source: Placement, target: Placement, *, grad: Placement, width: int | None = None
) -> Tensor:
    """Convert a plain activation from one placement to another; communicates over `mesh`, also in backward.

    `grad` is the placement of the gradient of the result. `width` is the size of the full last dimension, required if
    ranks have uneven shards of it.
    """
    back = Replicate() if isinstance(source, Partial) else source
    return _Move.apply(x, mesh, (source, target), (grad, back), width)  # type: ignore[no-any-return, no-untyped-call]


class _Move(torch.autograd.Function):
    """Autograd function that converts an activation between placements in forward and its gradient in backward.

    DTensor's redistribution takes 0.1 ms of Python per call, returns views (FSDP2 warns if a sharded module returns a
    view), and crashes on gloo with CUDA tensors (torch 2.11).
    """

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd functions accept no keyword arguments
        ctx: Any, x: Tensor, mesh: DeviceMesh, there: _Placements, back: _Placements, width: int | None
    ) -> Tensor:
        ctx.mesh, ctx.back, ctx.width = mesh, back, width
        return _move(x, mesh, there, width)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _move(grad, ctx.mesh, ctx.back, ctx.width), None, None, None, None


def _move(x: Tensor, mesh: DeviceMesh, placements: _Placements, width: int | None) -> Tensor:
    source, target = placements
    group = mesh.get_group()
    if source == target:
        return x.view_as(x)
    if isinstance(source, Partial) and isinstance(target, Shard):
        return sum_scattered(x, target.dim, group)
    if isinstance(source, Partial):
        return all_reduced(x, group)
    if isinstance(source, Shard):
        return all_gathered(x, source.dim, group, width)
    return own_shard(x, target.dim, group)  # type: ignore[attr-defined]


# Buckets combine many small tensors into few collectives.


BUCKET_BYTES = 25 << 20
"""The default bucket size of DDP: large enough for full bandwidth, small enough that the extra copy is negligible."""


def in_buckets(tensors: Iterable[Tensor], max_bytes: int = BUCKET_BYTES) -> Iterator[list[Tensor]]:
    """Yield consecutive tensors of one dtype in buckets of at most `max_bytes`; a larger tensor gets its own bucket."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        num_bytes = tensor.numel() * tensor.element_size()
        if bucket and (tensor.dtype != bucket[0].dtype or size + num_bytes > max_bytes):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += num_bytes
    if bucket:
        yield bucket


# The user's modules in a parallel model, and their full tensors, gathered on rank 0 one by one.


def stages_of(model: nn.Module) -> list[nn.Module]:
    """Return the user's modules in a model returned by `apply_plan`: one module, or this rank's pipeline stages."""
    return list(model) if isinstance(model, ModuleList) else [unwrap(model)]


def parameters_of(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return this rank's parameters with their names in the user's model; a shared parameter occurs once."""
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for stage in stages_of(model):
        for item in stage.named_parameters():
            found.setdefault(id(item[1]), item)
    return list(found.values())


def unwrap(model: nn.Module) -> nn.Module:
    """Return the user's module without DDP's wrapper; sharded parameters stay sharded (see `full_state_dict`)."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def full_values(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return full tensors in host memory on rank 0 and {} on other ranks; communicates over the world.

    Call on every rank with the tensors of that rank; shards are DTensors. Tensors that rank 0 does not have, such as
    those of other pipeline stages, are sent by the first rank that has them.
    """
    mine = dict(named)
    rank, size = 0, 1
    if dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
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
    """Return the model's full state dict on rank 0 and {} on other ranks; communicates over the world."""
    named = []
    for stage in stages_of(model):
        foreign = getattr(stage, "foreign_buffers", ())
        for name, value in stage.state_dict().items():
            if name not in foreign:
                named.append((name, value))
    return full_values(named)


def own_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers that this rank owns; buffers of other pipeline stages are skipped."""
    for stage in stages_of(model):
        for name, buffer in stage.named_buffers():
            if name not in getattr(stage, "foreign_buffers", ()):
                yield name, buffer


def _whole(value: DTensor) -> Tensor:
    """Return the full tensor of a DTensor, gathered one mesh axis at a time; communicates over the mesh."""
    for axis in range(value.device_mesh.ndim):
        placements = [*(Replicate(),) * (axis + 1), *value.placements[axis + 1 :]]
        value = value.redistribute(placements=placements)
    return value.to_local()


def _owners(names: list[str], size: int) -> dict[str, int]:
    """Return name -> the first rank that has this tensor, in the same order on every rank; communicates."""
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
    """Send a tensor from rank `owner` to rank 0 and return it there; the two ranks communicate."""
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
