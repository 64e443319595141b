"""Collectives ready to be called: any of them, on any group, size, dtype, reduce operation and backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from shardwise.errors import InputError, nearest
from shardwise.measurement.comm.spec import KINDS, count_of, size_of
from shardwise.torch_private.distributed import premultiplied_sum

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

PREMULTIPLIER = 2
"""What PREMUL_SUM multiplies by before it adds."""


@dataclass(frozen=True, kw_only=True)
class CollectiveSpec:
    """Which collective, and on what."""

    name: str
    num_bytes: int
    """Of the whole tensor: what is gathered, what is scattered, one rank's input of all_to_all; none for barrier."""
    dtype: torch.dtype = torch.float32
    operation: str = "SUM"
    """How those that reduce do so."""
    root: int = 0
    """Rank in the group that those with a root begin or end at."""
    is_async: bool = False
    """Whether the call is started and then waited for, instead of one that returns when it is done."""


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective as one rank calls it."""

    spec: CollectiveSpec
    group: dist.ProcessGroup
    rank: int
    """In the group."""
    ranks: int
    count: int
    size_bytes: int
    sent: Tensor
    received: Tensor
    """`sent` again where torch works in place: all_reduce, reduce, broadcast."""
    call: Callable[[], object]
    """Communicates over the group."""

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""
        return self.sent.device


def prepare(spec: CollectiveSpec, group: dist.ProcessGroup, device: torch.device) -> Collective:
    """Allocate the tensors of a collective on this rank, filled with zeros; does not communicate."""
    name, ranks = spec.name, dist.get_world_size(group)
    if name not in MAKERS:
        raise InputError(f"collective {name!r} does not exist", code="bench.unknown-choice", fix=nearest(name, MAKERS))
    if name == "send" and ranks < 2:
        raise InputError("send needs two ranks, the group has 1", code="bench.too-few-ranks", fix="use --nproc 2")
    itemsize = spec.dtype.itemsize
    counted_as = "broadcast" if name == "send" else name
    kind, count = KINDS[counted_as], count_of(counted_as, spec.num_bytes, itemsize, ranks)
    size_bytes = size_of(counted_as, count, itemsize, ranks)
    whole = size_bytes // itemsize
    sent = torch.zeros(whole if kind.sends_whole else count, dtype=spec.dtype, device=device)
    received = sent
    if kind.is_split:
        received = sent.new_zeros(whole if kind.receives_whole else count)
    tensors = _Tensors(spec=spec, group=group, rank=dist.get_rank(group), ranks=ranks, sent=sent, received=received)
    start = MAKERS[name](tensors)
    return Collective(
        spec=spec,
        group=group,
        rank=tensors.rank,
        ranks=ranks,
        count=count,
        size_bytes=size_bytes,
        sent=sent,
        received=received,
        call=(lambda: start(async_op=True).wait()) if spec.is_async else lambda: start(async_op=False),
    )


def reduce_operation(name: str) -> Any:
    """Return torch's reduce operation; AttributeError where this torch has no such one."""
    if name == "PREMUL_SUM":  # made by a function without a public name
        return premultiplied_sum(float(PREMULTIPLIER))
    return getattr(dist.ReduceOp, name)


def wait_for_all(group: dist.ProcessGroup, device: torch.device, *, async_op: bool = False) -> Any:
    """Communicate over `group`: return when all its ranks have arrived."""
    on_nccl = dist.get_backend(group) == "nccl"  # without its device, nccl guesses one
    return dist.barrier(group, device_ids=[device.index] if on_nccl else None, async_op=async_op)


@dataclass(frozen=True, kw_only=True)
class _Tensors:
    """What a collective moves, as one rank sees it."""

    spec: CollectiveSpec
    group: dist.ProcessGroup
    rank: int
    ranks: int
    sent: Tensor
    received: Tensor

    @property
    def root(self) -> int:
        """The global rank of the root."""
        return self.peer(self.spec.root)

    @property
    def is_root(self) -> bool:
        return self.rank == self.spec.root

    def peer(self, rank: int) -> int:
        """Return the global rank of a rank of the group."""
        return dist.get_global_rank(self.group, rank)


def _all_reduce(t: _Tensors) -> Callable[..., Any]:
    operation = reduce_operation(t.spec.operation)
    return lambda **how: dist.all_reduce(t.sent, operation, group=t.group, **how)


def _all_gather(t: _Tensors) -> Callable[..., Any]:
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
    return lambda **how: gather(t.received, t.sent, group=t.group, **how)


def _reduce_scatter(t: _Tensors) -> Callable[..., Any]:
    operation = reduce_operation(t.spec.operation)
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # renamed in torch 2.13
    return lambda **how: scatter(t.received, t.sent, operation, group=t.group, **how)


def _broadcast(t: _Tensors) -> Callable[..., Any]:
    root = t.root
    return lambda **how: dist.broadcast(t.sent, root, group=t.group, **how)


def _reduce(t: _Tensors) -> Callable[..., Any]:
    root, operation = t.root, reduce_operation(t.spec.operation)
    return lambda **how: dist.reduce(t.sent, root, operation, group=t.group, **how)


def _gather(t: _Tensors) -> Callable[..., Any]:
    root, parts = t.root, list(t.received.chunk(t.ranks)) if t.is_root else None
    return lambda **how: dist.gather(t.sent, parts, root, group=t.group, **how)


def _scatter(t: _Tensors) -> Callable[..., Any]:
    root, parts = t.root, list(t.sent.chunk(t.ranks)) if t.is_root else None
    return lambda **how: dist.scatter(t.received, parts, root, group=t.group, **how)


def _all_to_all(t: _Tensors) -> Callable[..., Any]:
    return lambda **how: dist.all_to_all_single(t.received, t.sent, group=t.group, **how)


def _barrier(t: _Tensors) -> Callable[..., Any]:
    return lambda **how: wait_for_all(t.group, t.sent.device, **how)


def _send(t: _Tensors) -> Callable[..., Any]:
    """From the group's first rank to its second and back: what calibration knows as `send`."""
    if t.rank > 1:
        return lambda **_: None
    peer = t.peer(1 - t.rank)
    turns = (dist.send, dist.recv) if t.rank == 0 else (dist.recv, dist.send)
    return lambda **_: [turn(t.sent, peer, group=t.group) for turn in turns]


MAKERS: dict[str, Callable[[_Tensors], Callable[..., Any]]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
    "barrier": _barrier,
    "send": _send,
}
"""Name -> what makes one call of it, on every rank of the group."""
