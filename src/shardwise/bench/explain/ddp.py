"""One step of DistributedDataParallel on real ranks, recorded: construct, forward, backward, all-reduce, update."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn

    from shardwise.dist import World

RATE = 0.1
_SMALL_BUCKET_MB = 1e-5
"""Ten bytes: so that seven parameters make buckets at all."""


@dataclass(frozen=True, kw_only=True)
class BucketRecord:
    """One bucket of one backward pass, on one rank."""

    index: int
    names: tuple[str, ...]
    """Parameters whose gradients lie in it, in its order."""
    local: list[float]
    """Its contents before the all-reduce."""
    averaged: list[float]
    """Its contents after it."""


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """What one rank saw of the step; parameters by name."""

    own: Mapping[str, Any]
    """As the rank initialised them."""
    constructed: Mapping[str, Any]
    """After DDP was constructed."""
    batch: list[Any]
    output: list[Any]
    loss: float
    first_buckets: int
    """In the first backward, before DDP has seen the order of gradients."""
    buckets: tuple[BucketRecord, ...]
    gradients: Mapping[str, Any]
    updated: Mapping[str, Any]
    alone: Mapping[str, Any]
    """The gradients of one process that has all ranks' batches."""


@dataclass
class _Recorder:
    """A communication hook that does what DDP does by itself, and keeps what was in the buckets."""

    names: Mapping[int, str]
    size: int
    kept: list[BucketRecord] = field(default_factory=list)

    def average(
        self, group: dist.ProcessGroup, bucket: torch._C._distributed_c10d.GradBucket
    ) -> torch.futures.Future[Tensor]:
        """Communicate over `group`: average the bucket."""
        buffer = bucket.buffer()
        local = buffer.tolist()
        dist.all_reduce(buffer, group=group)
        buffer /= self.size
        names = tuple(self.names[id(parameter)] for parameter in bucket.parameters())
        self.kept.append(BucketRecord(index=bucket.index(), names=names, local=local, averaged=buffer.tolist()))
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(buffer)
        return done


def record_step(world: World) -> StepRecord:
    """Communicate over the world, called on every rank: make one step of a model of seven parameters."""
    module = tiny_model(world)
    own = _values(module)
    model = DistributedDataParallel(module, bucket_cap_mb=_SMALL_BUCKET_MB)
    constructed = _values(module)
    recorder = _Recorder(names={id(p): name for name, p in module.named_parameters()}, size=world.size)
    # DDP refuses a hook whose annotations are strings; a lambda has none.
    model.register_comm_hook(dist.group.WORLD, lambda group, bucket: recorder.average(group, bucket))  # noqa: PLW0108
    batch = batch_of(world.rank, world.device)
    alone = _alone(module, world)
    # A first backward in which DDP sees in which order gradients come; it makes its buckets anew from that.
    model(batch).mean().backward()
    module.zero_grad()
    first_buckets = len(recorder.kept)
    recorder.kept.clear()
    output = model(batch)
    loss = output.mean()
    loss.backward()
    gradients = _gradients(module)
    torch.optim.SGD(module.parameters(), lr=RATE).step()
    return StepRecord(
        own=own,
        constructed=constructed,
        batch=batch.tolist(),
        output=output.tolist(),
        loss=loss.item(),
        first_buckets=first_buckets,
        buckets=tuple(recorder.kept),
        gradients=gradients,
        updated=_values(module),
        alone=alone,
    )


def tiny_model(world: World) -> nn.Module:
    """Return two layers of whole numbers, other ones on every rank."""
    module = torch.nn.Sequential()
    module.add_module("hidden", torch.nn.Linear(2, 2, bias=False))
    module.add_module("out", torch.nn.Linear(2, 1))
    numbers = {"hidden.weight": [[1.0, 2.0], [3.0, 4.0]], "out.weight": [[1.0, -1.0]], "out.bias": [0.0]}
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(torch.tensor(numbers[name]) + 10 * world.rank)
    return module.to(world.device)


def batch_of(rank: int, device: torch.device) -> Tensor:
    """Return a rank's batch, one row: 1, 2 on rank 0, 3, 4 on rank 1."""
    return (torch.arange(2.0, device=device) + 1 + 2 * rank).unsqueeze(0)


def _alone(module: nn.Module, world: World) -> dict[str, Any]:
    """Return the gradients of the model over all ranks' batches in this one process."""
    batches = torch.cat([batch_of(rank, world.device) for rank in range(world.size)])
    parameters = dict(module.named_parameters())
    gradients = torch.autograd.grad(module(batches).mean(), list(parameters.values()))
    return {name: gradient.tolist() for name, gradient in zip(parameters, gradients, strict=True)}


def _values(module: nn.Module) -> dict[str, Any]:
    return {name: parameter.tolist() for name, parameter in module.named_parameters()}


def _gradients(module: nn.Module) -> dict[str, Any]:
    return {name: p.grad.tolist() for name, p in module.named_parameters() if p.grad is not None}
