"""The ordered list of model transforms that turns a plain module into a parallel one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.nn.parallel import DistributedDataParallel

from shardwise.errors import JobError
from shardwise.parallel.batch_norm import foreign_batch_norms, replace_batch_norms
from shardwise.parallel.gradsync import GradSync, NoSync, ReplicaSync
from shardwise.parallel.replicated import replicate

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch import nn

    from shardwise.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a module is made parallel: this rank's device, and the group of readers (None for one reader)."""

    device: torch.device
    readers: dist.ProcessGroup | None


def norm_batches(module: nn.Module, plan: Plan, place: Place) -> nn.Module:
    """Give batch norms the statistics the plan asks for."""
    foreign = foreign_batch_norms(module)
    if foreign and place.readers is not None and plan.batch_norm == "sync":
        raise JobError(
            f"{', '.join(foreign)}: a batch norm class of its own cannot be synced over ranks",
            fix="use torch's own batch norm, or --set batch_norm=local",
        )
    return replace_batch_norms(module, place.readers if plan.batch_norm == "sync" else None)


def replicate_parameters(module: nn.Module, plan: Plan, place: Place) -> nn.Module:
    """Keep equal parameters on all readers; called on every rank."""
    if place.readers is None:
        return module
    return replicate(module, place.readers, place.device, plan.communication)


TRANSFORMS = (
    norm_batches,  # first: it replaces modules that the others wrap
    replicate_parameters,  # last: it must see the final parameters
)


def apply_plan(module: nn.Module, plan: Plan, place: Place) -> nn.Module:
    """Return `module` under `plan`; called on every rank."""
    for transform in TRANSFORMS:
        module = transform(module, plan, place)
    return module


def gradient_sync(model: nn.Module, plan: Plan) -> GradSync:
    """Return the one object that sums the gradients of a model made by `apply_plan`."""
    if isinstance(model, DistributedDataParallel):
        return ReplicaSync(model, every=plan.gradient_sync == "every")
    return NoSync()


def unwrap(model: nn.Module) -> nn.Module:
    """Return the user's own module under any strategy."""
    return model.module if isinstance(model, DistributedDataParallel) else model
