"""Explains one training step of FSDP, ZeRO, tensor and pipeline parallelism with the values of every rank.

Each step calls the collectives of its strategy directly and runs on real ranks. Each rank also computes the step of a
single process and compares the updated weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from shardwise.dist import World

RATE = 0.1
MOMENTUM = 0.9


@dataclass(frozen=True, kw_only=True)
class ExplainedMoment:
    """Values of one rank at one point of the step, shown side by side."""

    title: str
    values: tuple[tuple[str, Any], ...]
    """Column title and value."""
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class ExplainedStrategy:
    """A parallel strategy to explain."""

    sentence: str
    call: str
    run: Callable[[World], tuple[list[ExplainedMoment], bool]]
    """Runs the step; returns its moments and whether the weights are correct. Communicates; call on every rank."""
    corrected: str = ""


def _rows(world: World) -> Tensor:
    """Return the full weight [size, 2], which is sharded by rows: one row per rank."""
    return torch.arange(2.0 * world.size, device=world.device).view(world.size, 2) + 1


def _batch(world: World, rank: int) -> Tensor:
    """Return a rank's sample of shape [1, 2]: [[1, 2]] on rank 0, [[3, 4]] on rank 1."""
    return (torch.arange(2.0, device=world.device) + 1 + 2 * rank).unsqueeze(0)


def _mean_gradient(world: World, weight: Tensor) -> Tensor:
    """Return the gradient that one process computes from the samples of all ranks."""
    weight = weight.clone().requires_grad_()
    loss = sum((_batch(world, rank) @ weight.T).square().sum() / 2 for rank in range(world.size)) / world.size
    return torch.autograd.grad(loss, weight)[0]  # type: ignore[arg-type]


def _local_gradient(world: World, weight: Tensor) -> Tensor:
    sample = _batch(world, world.rank)
    return (sample @ weight.T).T @ sample


def _gather(world: World, shard: Tensor) -> Tensor:
    parts = [torch.empty_like(shard) for _ in range(world.size)]
    dist.all_gather(parts, shard)
    return torch.cat(parts)


def _reduce_scatter(world: World, whole: Tensor) -> Tensor:
    """Return this rank's row of the mean over ranks. Communicates; call on every rank."""
    shard = torch.empty_like(whole[:1])
    dist.reduce_scatter(shard, [row.contiguous() for row in whole.split(1)])
    return shard / world.size


def _fsdp(world: World) -> tuple[list[ExplainedMoment], bool]:
    start = _rows(world)
    shard = start[world.rank : world.rank + 1].clone()
    whole = _gather(world, shard)
    output = _batch(world, world.rank) @ whole.T
    again = _gather(world, shard)
    gradient = _local_gradient(world, again)
    mine = _reduce_scatter(world, gradient)
    updated = shard - RATE * mine
    expected = (start - RATE * _mean_gradient(world, start))[world.rank : world.rank + 1]
    moments = [
        ExplainedMoment(title="1. between steps: each rank has its shard of the weight", values=(("shard", shard),)),
        ExplainedMoment(
            title="2. forward: the weight is all-gathered, used, and freed",
            values=(("gathered", whole), ("output", output)),
        ),
        ExplainedMoment(
            title="3. backward: the weight is gathered again for the gradient of the rank's sample",
            values=(("gradient of the full weight", gradient),),
        ),
        ExplainedMoment(
            title="4. reduce-scatter: each rank gets the mean of its own rows only",
            values=(("before", gradient), ("after", mine)),
        ),
        ExplainedMoment(
            title=f"5. update: shard - {RATE:g} x its gradient; the optimizer has states of the shard only",
            values=(("updated shard", updated),),
        ),
    ]
    return moments, torch.allclose(updated, expected)


def _zero(world: World) -> tuple[list[ExplainedMoment], bool]:
    weight = _rows(world)
    own = slice(world.rank, world.rank + 1)
    momentum = torch.full_like(weight[own], 1.0)
    gradient = _local_gradient(world, weight)
    mine = _reduce_scatter(world, gradient)
    moved = MOMENTUM * momentum + mine
    row = weight[own] - RATE * moved
    updated = _gather(world, row)
    expected = weight - RATE * (MOMENTUM * torch.ones_like(weight) + _mean_gradient(world, weight))
    moments = [
        ExplainedMoment(
            title="1. between steps: full weights, but optimizer states of the rank's own rows only",
            values=(("weight", weight), ("momentum", momentum)),
        ),
        ExplainedMoment(title="2. forward and backward of its sample, as in DDP", values=(("gradient", gradient),)),
        ExplainedMoment(
            title="3. reduce-scatter: each rank gets the mean gradient of its own rows",
            values=(("gradient of its rows", mine),),
            note="(ZeRO-1 keeps all gradients and may all-reduce instead; ZeRO-2 frees the other rows here)",
        ),
        ExplainedMoment(
            title=f"4. update of its own rows: {MOMENTUM:g} x momentum + gradient, times {RATE:g}",
            values=(("momentum", moved), ("own rows", row)),
        ),
        ExplainedMoment(
            title="5. all-gather: every rank has the full weight again (ZeRO-3 gathers before each use)",
            values=(("weight", updated),),
        ),
    ]
    return moments, torch.allclose(updated, expected)


def _tensor_parallel(world: World) -> tuple[list[ExplainedMoment], bool]:
    first, second = _rows(world), torch.arange(1.0, world.size + 1, device=world.device).unsqueeze(0)
    own = slice(world.rank, world.rank + 1)
    rows, columns = first[own].clone(), second[:, own].clone()
    sample = _batch(world, 0)  # the same on every rank
    hidden = (sample @ rows.T).relu()
    partial = hidden @ columns.T
    output = partial.clone()
    dist.all_reduce(output)
    hidden_gradient = columns.expand(1, 1) * (hidden > 0)  # the loss is the output: its gradient is 1
    partial_input = hidden_gradient @ rows
    input_gradient = partial_input.clone()
    dist.all_reduce(input_gradient)
    new_rows, new_columns = rows - RATE * hidden_gradient.T @ sample, columns - RATE * hidden
    expected = _two_layers(first, second, sample)
    is_equal = torch.allclose(new_rows, expected[0][own]) and torch.allclose(new_columns, expected[1][:, own])
    moments = [
        ExplainedMoment(
            title="1. shards: rows of the first matrix, columns of the second; the same sample on every rank",
            values=(("rows of W1", rows), ("column of W2", columns), ("sample", sample)),
        ),
        ExplainedMoment(
            title="2. forward: each rank computes its hidden units, and its term of the output",
            values=(("relu(x W1)", hidden), ("times W2: a partial sum", partial)),
        ),
        ExplainedMoment(title="3. all-reduce of the output", values=(("before", partial), ("after", output))),
        ExplainedMoment(
            title="4. backward: gradients of the shards need no communication; the input gradient is all-reduced",
            values=(("partial gradient of x", partial_input), ("after all-reduce", input_gradient)),
        ),
        ExplainedMoment(
            title=f"5. update: each rank subtracts {RATE:g} x gradient from its shards",
            values=(("rows of W1", new_rows), ("column of W2", new_columns)),
        ),
    ]
    return moments, is_equal


def _two_layers(first: Tensor, second: Tensor, sample: Tensor) -> list[Tensor]:
    """Return both matrices after a step in one process."""
    matrices = [matrix.clone().requires_grad_() for matrix in (first, second)]
    loss = ((sample @ matrices[0].T).relu() @ matrices[1].T).sum()
    gradients = torch.autograd.grad(loss, matrices)
    return [matrix.detach() - RATE * gradient for matrix, gradient in zip(matrices, gradients, strict=True)]


MICRO_BATCHES = 2


def _pipeline(world: World) -> tuple[list[ExplainedMoment], bool]:
    rank, size = world.rank, world.size
    # gloo sends from host memory only.
    device = torch.device("cpu") if world.backend == "gloo" else world.device
    weight = torch.full((), 2.0 + rank, device=device)
    inputs, outputs = [], []
    for number in range(MICRO_BATCHES):
        x = torch.tensor([1.0 + number, 2.0 + number], device=device)
        if rank > 0:
            dist.recv(x, src=rank - 1)
        inputs.append(x)
        outputs.append(weight * x)
        if rank < size - 1:
            dist.send(outputs[-1], dst=rank + 1)
    received, gradient = [], torch.zeros((), device=device)
    for x in inputs:
        upstream = torch.full((2,), 1 / MICRO_BATCHES, device=device)  # the loss: a mean over micro-batches of sums
        if rank < size - 1:
            dist.recv(upstream, src=rank + 1)
        received.append(upstream)
        gradient += (upstream * x).sum()
        if rank > 0:
            dist.send(weight * upstream, dst=rank - 1)
    updated = weight - RATE * gradient
    slots = MICRO_BATCHES + size - 1
    moments = [
        ExplainedMoment(title="1. stages: each rank has its layers, here y = w x", values=(("w", weight),)),
        ExplainedMoment(
            title=f"2. forward of {MICRO_BATCHES} micro-batches: receive, compute, send to the next stage",
            values=(("received (rank 0: read)", torch.stack(inputs)), ("sent (last: output)", torch.stack(outputs))),
        ),
        ExplainedMoment(
            title="3. backward: receive the output gradient, send the input gradient to the previous stage",
            values=(("received (last: of the loss)", torch.stack(received)), ("gradient of w", gradient)),
        ),
        ExplainedMoment(
            title="4. schedule of the forwards: a micro-batch in each slot, or a bubble",
            values=(("slots", _slots(rank, slots)),),
            note=f"(bubble: ({size} - 1) of {slots} slots of each stage are empty; backward is the mirror image)",
        ),
        ExplainedMoment(title=f"5. update: w - {RATE:g} x gradient", values=(("updated", updated),)),
    ]
    return moments, torch.allclose(updated, _pipeline_alone(size)[rank].to(device))


def _slots(rank: int, slots: int) -> str:
    filled = {rank + number: f"m{number}" for number in range(MICRO_BATCHES)}
    return " ".join(filled.get(slot, "..") for slot in range(slots))


def _pipeline_alone(size: int) -> Tensor:
    """Return the weights of all stages after a step in one process."""
    weights = (torch.arange(float(size)) + 2).requires_grad_()
    samples = torch.tensor([[1.0 + number, 2.0 + number] for number in range(MICRO_BATCHES)])
    loss = (weights.prod() * samples).sum() / MICRO_BATCHES
    return weights.detach() - RATE * torch.autograd.grad(loss, weights)[0]


STRATEGIES = {
    "fsdp": ExplainedStrategy(
        sentence="One step of FSDP (ZeRO-3): every rank has a shard of the weight and its own sample.",
        call="fully_shard(module); loss = module(batch).mean(); loss.backward(); optimizer.step()",
        run=_fsdp,
        corrected="FSDP does not replicate the model: a rank has a full weight only while its layer computes.",
    ),
    "zero": ExplainedStrategy(
        sentence="One step of ZeRO-1 and ZeRO-2: full weights, sharded optimizer states (and gradients in ZeRO-2).",
        call="ZeroRedundancyOptimizer, DeepSpeed stages 1 and 2, or shardwise train --plan zero1",
        run=_zero,
    ),
    "tp": ExplainedStrategy(
        sentence="One step of tensor parallelism: two matrices are sharded, and all ranks read the same sample.",
        call="parallelize_module(mlp, mesh, {'up': ColwiseParallel(), 'down': RowwiseParallel()})",
        run=_tensor_parallel,
        corrected="Tensor parallelism communicates by all-reduce, pipeline parallelism by send and recv.",
    ),
    "pp": ExplainedStrategy(
        sentence="One step of pipeline parallelism: every rank has some layers, and micro-batches pass through all.",
        call="dist.recv(x, src=rank - 1); y = stage(x); dist.send(y, dst=rank + 1)",
        run=_pipeline,
    ),
}
"""Name -> strategy to explain."""
