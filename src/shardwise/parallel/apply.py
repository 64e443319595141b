"""The ordered list of model transforms that turns a plain module into a parallel one, and the mesh context they get."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from shardwise.errors import JobError
from shardwise.parallel.batch_norm import (
    batch_norms,
    foreign_batch_norms,
    guard_narrow_convolutions,
    replace_batch_norms,
)
from shardwise.parallel.collectives import stages_of, unwrap
from shardwise.parallel.context import compile_afresh, context_parallel
from shardwise.parallel.fused_loss import fuse_head
from shardwise.parallel.gradsync import GradSync, NoSync, ReplicaSync, ShardSync, SummedSync
from shardwise.parallel.parameter_rules import attributes_of, restore_attributes
from shardwise.parallel.recompute import find_blocks, recompute_block
from shardwise.parallel.replicated import replicate
from shardwise.parallel.sharded import (
    ReducedList,
    check_sharded,
    keep_unit_order,
    set_prefetch,
    shard_unit,
    unshardable,
)
from shardwise.parallel.support import uses_ddp
from shardwise.parallel.tensor import tensor_parallel
from shardwise.parallel.weights import fill_buffers, fill_parameters

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from shardwise.layout import Coordinate, Layout
    from shardwise.parallel.blueprint import Blueprint
    from shardwise.plans import Plan


def norm_batches(module: nn.Module, plan: Plan, place: MeshContext, _: Blueprint) -> nn.Module:
    """Give batch norms the statistics the plan asks for."""
    foreign = foreign_batch_norms(module)
    if foreign and place.readers is not None and plan.batch_norm == "sync":
        raise JobError(
            f"{', '.join(foreign)}: a batch norm class of its own cannot be synced over ranks",
            code="support.batch-norm-class",
            fix="use torch's own batch norm, or --set batch_norm=local",
        )
    replaced = replace_batch_norms(module, place.readers if plan.batch_norm == "sync" else None)
    every = plan.communication.sync_every
    if every > 1 and plan.batch_norm == "sync" and (foreign or batch_norms(replaced)):
        raise JobError(
            f"batch norms are synced in every forward pass, and replicas meet after {every} steps",
            code="support.batch-norm-sync-every",
            fix="--set batch_norm=local, or sync_every = 1",
        )
    return replaced


def guard_convolutions(module: nn.Module, plan: Plan, place: MeshContext, _: Blueprint) -> nn.Module:
    """Keep a CPU's bf16 convolutions away from shapes whose weight gradient torch leaves unwritten."""
    if plan.precision.compute == "bf16" and place.device.type == "cpu":
        guard_narrow_convolutions(module)
    return module


def cut_tensors(module: nn.Module, plan: Plan, place: MeshContext, blueprint: Blueprint) -> nn.Module:
    """Cut matrices over the tp axis by the rules of the job or the model."""
    mesh = place.axis("tp")
    if mesh is None:
        return module
    return tensor_parallel(module, mesh, blueprint.tensor_rules, sequence=plan.sequence_parallel)


def fuse_loss(module: nn.Module, plan: Plan, _: MeshContext, __: Blueprint) -> nn.Module:
    """Have the head hand its input to the loss, which makes logits chunk by chunk."""
    if plan.fused_loss:
        fuse_head(module)
    return module


def cut_context(module: nn.Module, _: Plan, place: MeshContext, __: Blueprint) -> nn.Module:
    """Run the model on this rank's slice of the tokens, where the cp axis cuts sequences."""
    return module if place.context is None else context_parallel(module, place.context)


def recompute(module: nn.Module, plan: Plan, _: MeshContext, __: Blueprint) -> nn.Module:
    """Have repeated blocks run their forward again in backward instead of keeping it."""
    if plan.recompute != "none":
        forget_caches(module)
        for block in find_blocks(module).values() or (module,):
            recompute_block(block, selective=plan.recompute == "selective")
    return module


def forget_caches(module: nn.Module) -> None:
    """Have transformers models keep no keys and values: a second forward pass would append them once more."""
    for part in module.modules():
        config = getattr(part, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False  # type: ignore[union-attr]


def compile_parts(module: nn.Module, plan: Plan, place: MeshContext, _: Blueprint) -> nn.Module:
    """Compile each repeated block in place, or the whole module when asked or where nothing repeats."""
    if plan.compile != "none":
        if place.context is not None:
            compile_afresh()
        for part in (plan.compile == "blocks" and find_blocks(module).values()) or (module,):
            part.compile()
    return module


def lay_out(module: nn.Module, plan: Plan, place: MeshContext, blueprint: Blueprint) -> nn.Module:
    """Give parameters their values and cut them, unit by unit: no rank ever holds more than one unit whole."""
    mesh = place.axis(*plan.reader_axes) if plan.zero >= 2 else None
    check_sharded(module, plan)
    parts = dict(module.named_modules())
    for unit in blueprint.units:
        if blueprint.weights is not None:
            fill_parameters(module, unit.parameters, blueprint.weights, place.device)
        part = parts.get(unit.name)
        if mesh is not None and part is not None and next(part.parameters(), None) is not None:
            # The head is in the root unit, and a fused loss reads its weight when forward has ended.
            shard_unit(part, plan, mesh, keep=plan.fused_loss and not unit.name)
    if mesh is None:
        module.to(place.device)
    else:
        finish_sharding(module, plan, place, blueprint)
    for buffer in module.buffers():
        buffer.data = buffer.data.to(place.device)
    if blueprint.weights is not None:
        fill_buffers(module, blueprint.buffers, blueprint.weights, place.device)
    return module


def finish_sharding(module: nn.Module, plan: Plan, place: MeshContext, blueprint: Blueprint) -> None:
    """Have sharded units gathered ahead and in one order on all data-parallel ranks; called on every rank."""
    for parameter in unshardable(module):
        parameter.data = parameter.data.to(place.device)
    parts = dict(module.named_modules())
    units = {unit.name: parts[unit.name] for unit in blueprint.units if isinstance(parts.get(unit.name), FSDPModule)}
    set_prefetch(list(units.values()), plan.communication.prefetch)
    inner = {name: unit for name, unit in units.items() if name}
    # A stage keeps an order of its own: the data-parallel ranks of a stage run its micro-batches in one schedule.
    if inner and place.host_readers is not None and isinstance(module, FSDPModule):
        keep_unit_order(module, inner, place.host_readers)


def replicate_parameters(module: nn.Module, plan: Plan, place: MeshContext, _: Blueprint) -> nn.Module:
    """Keep equal parameters on all readers; called on every rank."""
    if place.readers is None or not uses_ddp(plan):
        return module
    return replicate(module, place.readers, place.device, plan.communication)


TRANSFORMS = (
    norm_batches,  # first: it replaces modules that the others wrap
    guard_convolutions,  # before recompute and compile, which take up the forward that it replaces
    cut_tensors,  # before all that wraps forward: it replaces the forward of single layers
    fuse_loss,  # after the head is cut, whose part of the words the loss then uses
    cut_context,  # before recompute, which must run attention over whole sequences again
    recompute,  # before compile, so that the recomputed region is what gets compiled
    compile_parts,  # before sharding: its hooks stay outside of the graphs
    lay_out,  # after all that looks at whole parameters: from here on they are real, and cut
    replicate_parameters,  # last: it must see the final parameters
)


def apply_plan(blueprint: Blueprint, plan: Plan, place: MeshContext) -> nn.Module:
    """Return the module of `blueprint` under `plan`; called on every rank."""
    module = blueprint.module
    attributes = attributes_of(module)
    for transform in TRANSFORMS:
        module = transform(module, plan, place, blueprint)
    restore_attributes(unwrap(module), attributes)
    return module


def gradient_sync(model: nn.Module, plan: Plan, place: MeshContext) -> GradSync:
    """Return the one object that sums the gradients of a model made by `apply_plan`."""
    every = plan.gradient_sync == "every"
    if isinstance(model, DistributedDataParallel):
        return ReplicaSync(model, every=every)
    sharded = [stage for stage in stages_of(model) if isinstance(stage, FSDPModule)]
    if sharded:
        return ShardSync(
            sharded,
            ReducedList(model, place.host_readers),
            every=every,
            replicated=[parameter for parameter in unshardable(model) if parameter.requires_grad],
            group=place.readers,
        )
    if place.readers is not None and plan.zero < 2:
        return SummedSync([parameter for parameter in model.parameters() if parameter.requires_grad], place.readers)
    return NoSync()


# Where a module is made parallel: this rank's device, its place in the layout, and the groups it talks to.


@dataclass(frozen=True, kw_only=True)
class MeshContext:
    """One rank's place: what transforms need to know of the world, as arguments."""

    device: torch.device
    layout: Layout
    """How parameters are held: without a cp axis, whose peers count as shards (`Layout.folded`)."""
    rank: int
    mesh: DeviceMesh | None
    """Axes of degree over 1, by their names in the layout; None for a world of one."""
    readers: dist.ProcessGroup | None
    """The ranks that hold the same piece of the model and read other samples, or other tokens of them; None for one."""
    host_readers: dist.ProcessGroup | None = None
    """The ranks of `readers`, for small values of the host."""
    context: dist.ProcessGroup | None = None
    """The ranks that share the sequences of one reader, in the order of their slices; None where nothing is cut."""

    @property
    def coordinate(self) -> Coordinate:
        """Where this rank stands on every axis."""
        return self.layout.coordinate(self.rank)

    def axis(self, *names: str) -> DeviceMesh | None:
        """Return the sub-mesh of those axes that are cut at all; None when none is."""
        cut = tuple(name for name in names if getattr(self.layout, name) > 1)
        if not cut or self.mesh is None:
            return None
        return self.mesh[cut]
