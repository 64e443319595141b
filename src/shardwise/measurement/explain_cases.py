"""One small call of every collective and point-to-point method, with each rank's values before and after it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from shardwise.dist import World

    Run = Callable[[World, str], tuple[Any, Any]]

LATE_S = 0.05
"""Seconds between the arrivals of successive ranks at the barrier."""
_WRONG_DTYPE = "torch.zeros({count}) is float32 and {tensor} is int64:"
_ABORTS = "the ranks abort or read bytes of the other kind. Give the buffer the sender's dtype."
_RAISES = "torch raises ValueError. Give the buffer the input's dtype."


@dataclass(frozen=True, kw_only=True)
class ExplainedCall:
    """A collective or point-to-point call to explain."""

    description: str
    """The effect of the call, in a sentence."""
    call: str
    """The code of the call; {op} is the reduce operation."""
    run: Run
    """Runs the call and returns the values before and after. Communicates over the world; call on every rank."""
    before: str = "Before"
    nproc: int = 4
    """Default number of ranks."""
    least: int = 1
    """Minimum number of ranks."""
    reduces: bool = False
    """Whether the call has a reduce operation."""
    corrected: str = ""
    """A common mistake in the code of this call, and its correction."""


def numbers(world: World, op: str = "SUM") -> Tensor:
    """Return this rank's two numbers: [1, 2] on rank 0, [3, 4] on rank 1; floating-point for AVG."""
    return torch.arange(2, device=world.device, dtype=_dtype(op)) + 1 + 2 * world.rank


def _dtype(op: str) -> torch.dtype:
    return torch.float32 if op == "AVG" else torch.int64


def _reduce_op(op: str) -> dist.ReduceOp.RedOpType:
    found: dist.ReduceOp.RedOpType = getattr(dist.ReduceOp, op)
    return found


def _all_reduce(world: World, op: str) -> tuple[Any, Any]:
    tensor = numbers(world, op)
    before = tensor.tolist()
    dist.all_reduce(tensor, op=_reduce_op(op))
    return before, tensor.tolist()


def _reduce(world: World, op: str) -> tuple[Any, Any]:
    tensor = numbers(world, op)
    before = tensor.tolist()
    dist.reduce(tensor, dst=0, op=_reduce_op(op))
    return before, tensor.tolist() if world.rank == 0 else f"{tensor.tolist()}   (undefined)"


def _broadcast(world: World, _: str) -> tuple[Any, Any]:
    tensor = torch.tensor([1, 2, 3, 4] if world.rank == 0 else [0, 0, 0, 0], device=world.device)
    before = tensor.tolist()
    dist.broadcast(tensor, src=0)
    return before, tensor.tolist()


def _all_gather(world: World, _: str) -> tuple[Any, Any]:
    tensor = numbers(world)
    tensors = [torch.zeros_like(tensor) for _ in range(world.size)]
    dist.all_gather(tensors, tensor)
    return tensor.tolist(), _lists(tensors)


def _gather(world: World, _: str) -> tuple[Any, Any]:
    tensor = numbers(world)
    tensors = [torch.zeros_like(tensor) for _ in range(world.size)] if world.rank == 0 else None
    dist.gather(tensor, tensors, dst=0)
    return tensor.tolist(), _lists(tensors) if tensors else None


def _scatter(world: World, _: str) -> tuple[Any, Any]:
    tensors = _chunks(world) if world.rank == 0 else None
    tensor = torch.zeros(2, dtype=torch.int64, device=world.device)
    dist.scatter(tensor, tensors, src=0)
    return _lists(tensors) if tensors else None, tensor.tolist()


def _reduce_scatter(world: World, op: str) -> tuple[Any, Any]:
    tensors = [chunk.to(_dtype(op)) for chunk in _chunks(world)]
    before = _lists(tensors)
    output = torch.zeros_like(tensors[0])
    dist.reduce_scatter(output, tensors, op=_reduce_op(op))
    return before, output.tolist()


def _all_to_all(world: World, _: str) -> tuple[Any, Any]:
    tensor = torch.arange(world.size, device=world.device) + 10 * world.rank
    output = torch.zeros_like(tensor)
    dist.all_to_all_single(output, tensor)
    return tensor.tolist(), output.tolist()


def _barrier(world: World, _: str) -> tuple[Any, Any]:
    began = min(world.gather(time.time()))  # start time of the first rank; hosts may have different clocks
    time.sleep(LATE_S * world.rank)
    arrived = time.time()
    world.barrier()
    return f"arrives at {arrived - began:.2f} s", f"continues at {time.time() - began:.2f} s"


def _send(world: World, _: str) -> tuple[Any, Any]:
    is_source, peer = world.rank % 2 == 0, world.rank ^ 1
    tensor = _message(world) if is_source else torch.zeros(3, dtype=torch.int64, device=_p2p_device(world))
    before = tensor.tolist()
    if peer >= world.size:
        return before, f"{before}   (no peer)"
    if is_source:
        dist.send(tensor, dst=peer)
    else:
        dist.recv(tensor, src=peer)
    return before, tensor.tolist()


def _isend(world: World, _: str) -> tuple[Any, Any]:
    tensor = _message(world)
    received = torch.zeros_like(tensor)
    works = [
        dist.isend(tensor, dst=(world.rank + 1) % world.size),
        dist.irecv(received, src=(world.rank - 1) % world.size),
    ]
    for work in works:
        if work is not None:
            work.wait()
    return tensor.tolist(), received.tolist()


def _batch(world: World, _: str) -> tuple[Any, Any]:
    tensor = _message(world)
    received = torch.zeros_like(tensor)
    operations = [
        dist.P2POp(dist.isend, tensor, (world.rank + 1) % world.size),
        dist.P2POp(dist.irecv, received, (world.rank - 1) % world.size),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return tensor.tolist(), received.tolist()


def _chunks(world: World) -> list[Tensor]:
    """Return [1, 2], [3, 4] and so on, one for each rank."""
    whole = torch.arange(2 * world.size, device=world.device) + 1
    return list(whole.view(world.size, 2).unbind())


def _message(world: World) -> Tensor:
    return torch.arange(3, device=_p2p_device(world)) + 1 + 3 * world.rank


def _p2p_device(world: World) -> torch.device:
    """Return the device of tensors for point-to-point calls: gloo sends from host memory only."""
    return torch.device("cpu") if world.backend == "gloo" else world.device


def _lists(tensors: list[Tensor]) -> list[Any]:
    return [tensor.tolist() for tensor in tensors]


CASES = {
    "all_reduce": ExplainedCall(
        description="Every rank ends with the reduction of all ranks' tensors, element by element, in place.",
        call="dist.all_reduce(tensor, op=ReduceOp.{op})",
        run=_all_reduce,
        reduces=True,
        corrected="AVG needs a floating-point dtype: torch.arange(2) is int64.",
    ),
    "broadcast": ExplainedCall(
        description="Every rank ends with the tensor of one source rank.",
        call="dist.broadcast(tensor, src=0)",
        run=_broadcast,
        corrected=f"{_WRONG_DTYPE.format(count=4, tensor='torch.tensor([1, 2, 3, 4])')} {_ABORTS}",
    ),
    "reduce": ExplainedCall(
        description="One rank ends with the reduction of all ranks' tensors; those of the other ranks are undefined.",
        call="dist.reduce(tensor, dst=0, op=ReduceOp.{op})",
        run=_reduce,
        reduces=True,
    ),
    "all_gather": ExplainedCall(
        description="Every rank ends with a list of all ranks' tensors.",
        call="dist.all_gather(tensor_list, tensor)",
        run=_all_gather,
        corrected=f"{_WRONG_DTYPE.format(count=2, tensor='torch.arange(2)')} {_RAISES}",
    ),
    "gather": ExplainedCall(
        description="One rank ends with a list of all ranks' tensors.",
        call="dist.gather(tensor, tensor_list if rank == 0 else None, dst=0)",
        run=_gather,
    ),
    "scatter": ExplainedCall(
        description="One rank has a list, and every rank ends with its own element of it.",
        call="dist.scatter(tensor, tensor_list if rank == 0 else None, src=0)",
        run=_scatter,
    ),
    "reduce_scatter": ExplainedCall(
        description="Lists are reduced element by element, and every rank ends with its own element of the result.",
        call="dist.reduce_scatter(output, input_list, op=ReduceOp.{op})",
        run=_reduce_scatter,
        before="Input (the same on all)",
        reduces=True,
        corrected=f"{_WRONG_DTYPE.format(count=2, tensor='torch.tensor([1, 2])')} {_RAISES}",
    ),
    "all_to_all": ExplainedCall(
        description="Rank i's element j becomes rank j's element i: a transpose of a matrix with one row per rank.",
        call="dist.all_to_all_single(output, tensor)",
        run=_all_to_all,
    ),
    "barrier": ExplainedCall(
        description="No rank continues until all ranks have arrived; no data is sent.",
        call="dist.barrier()",
        run=_barrier,
    ),
    "send": ExplainedCall(
        description="One rank sends a tensor to another; send returns when it may be changed, recv when it arrived.",
        call="dist.send(tensor, dst=rank + 1) on even ranks, dist.recv(tensor, src=rank - 1) on odd ones",
        run=_send,
        nproc=2,
        least=2,
        corrected=f"{_WRONG_DTYPE.format(count=3, tensor='torch.tensor([1, 2, 3])')} {_ABORTS}",
    ),
    "isend": ExplainedCall(
        description="A ring: every rank sends to the next rank and receives from the previous one at the same time.",
        call="work = [dist.isend(tensor, next), dist.irecv(received, previous)]; then wait() for both",
        run=_isend,
        least=2,
        corrected="A ring of blocking sends can hang, since all wait for a receiver; buffers need the sender's dtype.",
    ),
    "batch_isend_irecv": ExplainedCall(
        description="The same ring as one batch, whose operations NCCL starts together in any order.",
        call="dist.batch_isend_irecv([P2POp(dist.isend, tensor, next), P2POp(dist.irecv, received, previous)])",
        run=_batch,
        least=2,
    ),
}
"""Name -> call to explain."""
