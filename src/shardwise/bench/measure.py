"""Timed collectives: any of them, on any group, size, dtype and backend, as long as the slowest rank takes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from shardwise.bench.timing import Timing, wait_for
from shardwise.errors import InputError, nearest

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

_LEAST_BLOCK_S = 1e-3
"""Calls are timed in blocks of at least this long, so that leaving the barrier apart does not show."""


@dataclass(frozen=True, kw_only=True)
class CollectiveTiming:
    """One collective on one group: what the slowest rank took."""

    name: str
    num_bytes: int
    """Of the whole tensor: what is gathered, what is scattered, one rank's input of all_to_all; 0 for barrier."""
    dtype: str
    ranks: int
    timing: Timing


def measure_collective(
    name: str,
    num_bytes: int,
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    dtype: torch.dtype = torch.float32,
    budget_s: float = 0.1,
    most: int = 30,
) -> CollectiveTiming:
    """Communicate over `group`, called on all its ranks, to time a collective in about `budget_s` seconds.

    `send` goes from the group's first rank to its second and back, and half of that is its time. Sizes are rounded
    down to whole elements on every rank, but never to none.
    """
    operation, whole_bytes, share = _prepare(name, num_bytes, group, device, dtype)
    operation()
    once_s = _agree([_timed(operation, 1, device)], group, device)[0]
    inner = max(1, min(1000, round(_LEAST_BLOCK_S / once_s)))
    repeats = max(3, min(most, round(budget_s / (inner * once_s))))
    blocks = []
    for _ in range(repeats):
        _barrier(group, device)
        blocks.append(_timed(operation, inner, device) / inner)
    return CollectiveTiming(
        name=name,
        num_bytes=whole_bytes,
        dtype=str(dtype).removeprefix("torch."),
        ranks=dist.get_world_size(group),
        timing=Timing.of([share * seconds for seconds in _agree(blocks, group, device)]),
    )


def _timed(operation: Callable[[], object], times: int, device: torch.device) -> float:
    wait_for(device)
    began = time.perf_counter()
    for _ in range(times):
        operation()
    wait_for(device)
    return time.perf_counter() - began


def _agree(seconds: list[float], group: dist.ProcessGroup, device: torch.device) -> list[float]:
    """Return the slowest rank's seconds of each block; communicates over `group`."""
    slowest = torch.tensor(seconds, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    found: list[float] = slowest.tolist()
    return found


def _barrier(group: dist.ProcessGroup, device: torch.device) -> None:
    """Communicate over `group`: go on when all its ranks have come here."""
    on_nccl = dist.get_backend(group) == "nccl"
    dist.barrier(group, device_ids=[device.index] if on_nccl else None)  # without its device, nccl guesses one


def _prepare(
    name: str, num_bytes: int, group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype
) -> tuple[Callable[[], object], int, float]:
    """Return one call of the collective, the bytes of its whole tensor, and which share of the time is its own."""
    if name not in COLLECTIVES:
        raise InputError(f"there is no collective {name!r}", fix=nearest(name, COLLECTIVES))
    size = dist.get_world_size(group)
    if name == "send" and size < 2:
        raise InputError("send needs two ranks, the group has 1", fix="use --nproc 2")
    numel = max(1, num_bytes // dtype.itemsize // size) * size
    whole = torch.zeros(numel, dtype=dtype, device=device)
    operation = COLLECTIVES[name](_Tensors(whole=whole, size=size, rank=dist.get_rank(group), group=group))
    if name == "barrier":
        return operation, 0, 1.0
    return operation, numel * dtype.itemsize, 0.5 if name == "send" else 1.0


@dataclass(frozen=True, kw_only=True)
class _Tensors:
    """What collectives move, as one rank sees it."""

    whole: Tensor
    size: int
    rank: int
    group: dist.ProcessGroup

    @property
    def part(self) -> Tensor:
        return self.whole.new_zeros(self.whole.numel() // self.size)

    @property
    def parts(self) -> list[Tensor]:
        return list(self.whole.chunk(self.size))

    def peer(self, rank: int) -> int:
        """Return the global rank of a rank of the group."""
        return dist.get_global_rank(self.group, rank)


def _all_reduce(t: _Tensors) -> Callable[[], object]:
    return lambda: dist.all_reduce(t.whole, group=t.group)


def _all_gather(t: _Tensors) -> Callable[[], object]:
    part = t.part
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
    return lambda: gather(t.whole, part, group=t.group)


def _reduce_scatter(t: _Tensors) -> Callable[[], object]:
    part = t.part
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # renamed in torch 2.13
    return lambda: scatter(part, t.whole, group=t.group)


def _broadcast(t: _Tensors) -> Callable[[], object]:
    source = t.peer(0)
    return lambda: dist.broadcast(t.whole, source, group=t.group)


def _reduce(t: _Tensors) -> Callable[[], object]:
    target = t.peer(0)
    return lambda: dist.reduce(t.whole, target, group=t.group)


def _gather(t: _Tensors) -> Callable[[], object]:
    part, target = t.part, t.peer(0)
    parts = t.parts if t.rank == 0 else None
    return lambda: dist.gather(part, parts, target, group=t.group)


def _scatter(t: _Tensors) -> Callable[[], object]:
    part, source = t.part, t.peer(0)
    parts = t.parts if t.rank == 0 else None
    return lambda: dist.scatter(part, parts, source, group=t.group)


def _all_to_all(t: _Tensors) -> Callable[[], object]:
    received = torch.empty_like(t.whole)
    return lambda: dist.all_to_all_single(received, t.whole, group=t.group)


def _barrier_only(t: _Tensors) -> Callable[[], object]:
    return lambda: _barrier(t.group, t.whole.device)


def _send(t: _Tensors) -> Callable[[], object]:
    if t.rank > 1:
        return lambda: None
    peer = t.peer(1 - t.rank)
    turns = (dist.send, dist.recv) if t.rank == 0 else (dist.recv, dist.send)
    return lambda: [turn(t.whole, peer, group=t.group) for turn in turns]


COLLECTIVES: dict[str, Callable[[_Tensors], Callable[[], object]]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
    "barrier": _barrier_only,
    "send": _send,
}
"""Name -> what makes one call of it, on every rank of the group."""
