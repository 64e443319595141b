"""Collectives and three point-to-point methods, prepared for calls on any group, size, dtype and backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from shardwise.errors import InputError, nearest
from shardwise.measurement.comm.spec import KINDS, count_of, size_of
from shardwise.torch_private.distributed import premultiplied_sum

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from shardwise.dist import World

    Move = Callable[[Sequence[Tensor], int, dist.ProcessGroup], None]

PREMULTIPLIER = 2
"""The factor of PREMUL_SUM."""


@dataclass(frozen=True, kw_only=True)
class CollectiveSpec:
    """A collective with its size, dtype and options."""

    name: str
    num_bytes: int
    """Size of the whole tensor: the gathered or scattered tensor, one rank's input of all_to_all; 0 for barrier."""
    dtype: torch.dtype = torch.float32
    operation: str = "SUM"
    """Reduce operation of collectives that reduce."""
    root: int = 0
    """Root as a rank of the group, for collectives that have one."""
    is_async: bool = False
    """Whether the call uses async_op=True and waits for its handle."""


@dataclass(frozen=True, kw_only=True)
class Collective:
    """A collective on one rank with its allocated tensors."""

    spec: CollectiveSpec
    group: dist.ProcessGroup
    rank: int
    """Rank in the group."""
    ranks: int
    count: int
    size_bytes: int
    sent: Tensor
    received: Tensor
    """The same tensor as `sent` for collectives that work in place: all_reduce, reduce, broadcast."""
    call: Callable[[], object]
    """Communicates over the group."""

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return self.sent.device


def prepare(spec: CollectiveSpec, group: dist.ProcessGroup, device: torch.device) -> Collective:
    """Allocate the tensors of a collective on this rank, filled with zeros; does not communicate."""
    name, ranks = spec.name, dist.get_world_size(group)
    if name not in MAKERS:
        raise InputError(f"collective {name!r} does not exist", code="bench.unknown-choice", fix=nearest(name, MAKERS))
    if name == "send" and ranks < 2:
        raise InputError("send needs at least 2 ranks, got 1", code="bench.too-few-ranks", fix="pass --nproc 2")
    itemsize = spec.dtype.itemsize
    counted_as = "broadcast" if name == "send" else name
    kind, count = KINDS[counted_as], count_of(counted_as, spec.num_bytes, itemsize, ranks)
    size_bytes = size_of(counted_as, count, itemsize, ranks)
    whole = size_bytes // itemsize
    sent = received = torch.zeros(whole if kind.sends_whole else count, dtype=spec.dtype, device=device)
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
    """Return torch's reduce operation; raise AttributeError if this version of torch does not have it."""
    if name == "PREMUL_SUM":  # torch creates it by a private function
        return premultiplied_sum(float(PREMULTIPLIER))
    return getattr(dist.ReduceOp, name)


def wait_for_all(group: dist.ProcessGroup, device: torch.device, *, async_op: bool = False) -> Any:
    """Wait for all ranks of `group` at a barrier. Communicates over `group`; call on all its ranks."""
    on_nccl = dist.get_backend(group) == "nccl"  # NCCL guesses the device unless it is passed
    return dist.barrier(group, device_ids=[device.index] if on_nccl else None, async_op=async_op)


@dataclass(frozen=True, kw_only=True)
class _Tensors:
    """The tensors of a collective on one rank."""

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
    """Return a callable that sends from the group's first rank to its second rank and back."""
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
"""Name -> function that returns the collective as a callable, to be called on every rank of the group."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """A point-to-point method: `push` sends messages to a peer and `pull` receives them; both communicate over a group.

    The peer is a global rank. On a CPU both return when the memory may be reused, on a GPU when the transfer is queued.
    """

    description: str
    push: Move
    pull: Move

    def on(self, world: World) -> Way:
        """Return the method for the world's device.

        gloo sends from host memory only, so messages of a GPU are copied through host memory, as a program would.
        """
        if world.device.type == "cuda" and world.backend == "gloo":
            return _through_host(self)
        return self


def _send_blocking(messages: Sequence[Tensor], peer: int, group: dist.ProcessGroup) -> None:
    for message in messages:
        dist.send(message, peer, group=group)


def _recv(messages: Sequence[Tensor], peer: int, group: dist.ProcessGroup) -> None:
    for message in messages:
        dist.recv(message, peer, group=group)


def _at_once(operation: Callable[..., dist.Work | None]) -> Move:
    def move(messages: Sequence[Tensor], peer: int, group: dist.ProcessGroup) -> None:
        _wait([operation(message, peer, group=group) for message in messages])

    return move


def _batched(operation: Callable[..., dist.Work | None]) -> Move:
    def move(messages: Sequence[Tensor], peer: int, group: dist.ProcessGroup) -> None:
        _wait(dist.batch_isend_irecv([dist.P2POp(operation, message, peer, group) for message in messages]))

    return move


def _wait(works: Sequence[dist.Work | None]) -> None:
    for work in works:
        if work is not None:  # None on ranks outside the group
            work.wait()


def _through_host(way: Way) -> Way:
    def push(messages: Sequence[Tensor], peer: int, group: dist.ProcessGroup) -> None:
        way.push([message.cpu() for message in messages], peer, group)

    def pull(messages: Sequence[Tensor], peer: int, group: dist.ProcessGroup) -> None:
        received = [torch.empty_like(message, device="cpu") for message in messages]
        way.pull(received, peer, group)
        for message, host in zip(messages, received, strict=True):
            message.copy_(host)

    return Way(description=f"{way.description}, copied through host memory", push=push, pull=pull)


WAYS = {
    "send": Way(description="send and recv, one message after the other", push=_send_blocking, pull=_recv),
    "isend": Way(
        description="isend and irecv, all messages in flight", push=_at_once(dist.isend), pull=_at_once(dist.irecv)
    ),
    "batch": Way(
        description="batch_isend_irecv, all messages in one batch",
        push=_batched(dist.isend),
        pull=_batched(dist.irecv),
    ),
}
"""Name -> point-to-point method."""
