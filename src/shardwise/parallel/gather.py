"""Whole tensors again: what is cut or on another stage, brought together on rank 0, one tensor at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from shardwise.parallel.apply import stages_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import nn


def full_values(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return whole tensors on the host of rank 0, {} elsewhere; communicates over the world, on every rank.

    Ranks hand in what they hold, pieces as DTensors; tensors of other stages come from the first rank that has them.
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
    return full_values(
        (name, value)
        for stage in stages_of(model)
        for name, value in stage.state_dict().items()
        if name not in getattr(stage, "foreign_buffers", ())
    )


def own_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers whose values count on this rank: of stages, not those that belong to another."""
    for stage in stages_of(model):
        for name, buffer in stage.named_buffers():
            if name not in getattr(stage, "foreign_buffers", ()):
                yield name, buffer


def _whole(value: DTensor) -> Tensor:
    """Gather one axis of the mesh after the other, the inner cut first; communicates over the mesh."""
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
