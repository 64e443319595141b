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
    from shardwise.parallel.meta_model import MetaModel
    from shardwise.plans import Plan


def norm_batches(module: nn.Module, plan: Plan, context: MeshContext, _: MetaModel) -> nn.Module:
    """Give batch norms the statistics the plan asks for."""
    foreign = foreign_batch_norms(module)
    if foreign and context.dp_group is not None and plan.batch_norm == "sync":
        raise JobError(
            f"{', '.join(foreign)}: a batch norm class of its own cannot be synced over ranks",
            code="support.batch-norm-class",
            fix="use torch's own batch norm, or --set batch_norm=local",
        )
    replaced = replace_batch_norms(module, context.dp_group if plan.batch_norm == "sync" else None)
    every = plan.communication.sync_every
    if every > 1 and plan.batch_norm == "sync" and (foreign or batch_norms(replaced)):
        raise JobError(
            f"batch norms are synced in every forward pass, and replicas synchronize after {every} steps",
            code="support.batch-norm-sync-every",
            fix="--set batch_norm=local, or sync_every = 1",
        )
    return replaced


def guard_convolutions(module: nn.Module, plan: Plan, context: MeshContext, _: MetaModel) -> nn.Module:
    """Keep a CPU's bf16 convolutions away from shapes whose weight gradient torch leaves unwritten."""
    if plan.precision.compute == "bf16" and context.device.type == "cpu":
        guard_narrow_convolutions(module)
    return module


def split_tensors(module: nn.Module, plan: Plan, context: MeshContext, meta_model: MetaModel) -> nn.Module:
    """Split matrices over the tp axis by the rules of the job or the model."""
    mesh = context.axis("tp")
    if mesh is None:
        return module
    return tensor_parallel(module, mesh, meta_model.tensor_rules, sequence=plan.sequence_parallel)


def fuse_loss(module: nn.Module, plan: Plan, _: MeshContext, __: MetaModel) -> nn.Module:
    """Have the head hand its input to the loss, which makes logits chunk by chunk."""
    if plan.fused_loss:
        fuse_head(module)
    return module


def split_sequences(module: nn.Module, _: Plan, context: MeshContext, __: MetaModel) -> nn.Module:
    """Run the model on this rank's slice of the tokens, where the cp axis splits sequences."""
    return module if context.cp_group is None else context_parallel(module, context.cp_group)


def recompute(module: nn.Module, plan: Plan, _: MeshContext, __: MetaModel) -> nn.Module:
    """Have repeated blocks run their forward again in backward instead of keeping it."""
    if plan.recompute != "none":
        forget_caches(module)
        for block in find_blocks(module).values() or (module,):
            recompute_block(block, selective=plan.recompute == "selective")
    return module


def forget_caches(module: nn.Module) -> None:
    """Have transformers models keep no keys and values: a second forward pass would append them once more."""
    for submodule in module.modules():
        config = getattr(submodule, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False  # type: ignore[union-attr]


def compile_blocks(module: nn.Module, plan: Plan, context: MeshContext, _: MetaModel) -> nn.Module:
    """Compile each repeated block in place, or the whole module when asked or where nothing repeats."""
    if plan.compile != "none":
        if context.cp_group is not None:
            compile_afresh()
        for submodule in (plan.compile == "blocks" and find_blocks(module).values()) or (module,):
            submodule.compile()
    return module


def materialize(module: nn.Module, plan: Plan, context: MeshContext, meta_model: MetaModel) -> nn.Module:
    """Materialize parameters and shard them unit by unit: no rank ever has more than one unit whole."""
    mesh = context.axis(*plan.dp_axes) if plan.zero >= 2 else None
    check_sharded(module, plan)
    submodules = dict(module.named_modules())
    for unit in meta_model.units:
        if meta_model.weights is not None:
            fill_parameters(module, unit.parameters, meta_model.weights, context.device)
        submodule = submodules.get(unit.name)
        if mesh is not None and submodule is not None and next(submodule.parameters(), None) is not None:
            # The head is in the root unit, and a fused loss reads its weight when forward has ended.
            shard_unit(submodule, plan, mesh, keep=plan.fused_loss and not unit.name)
    if mesh is None:
        module.to(context.device)
    else:
        finish_sharding(module, plan, context, meta_model)
    for buffer in module.buffers():
        buffer.data = buffer.data.to(context.device)
    if meta_model.weights is not None:
        fill_buffers(module, meta_model.buffers, meta_model.weights, context.device)
    return module


def finish_sharding(module: nn.Module, plan: Plan, context: MeshContext, meta_model: MetaModel) -> None:
    """Have sharded units gathered ahead and in one order on all data-parallel ranks; called on every rank."""
    for parameter in unshardable(module):
        parameter.data = parameter.data.to(context.device)
    submodules = dict(module.named_modules())
    units = {
        unit.name: submodules[unit.name]
        for unit in meta_model.units
        if isinstance(submodules.get(unit.name), FSDPModule)
    }
    set_prefetch(list(units.values()), plan.communication.prefetch)
    inner = {name: unit for name, unit in units.items() if name}
    # A stage keeps an order of its own: the data-parallel ranks of a stage run its micro-batches in one schedule.
    if inner and context.host_dp_group is not None and isinstance(module, FSDPModule):
        keep_unit_order(module, inner, context.host_dp_group)


def replicate_parameters(module: nn.Module, plan: Plan, context: MeshContext, _: MetaModel) -> nn.Module:
    """Replicate parameters over data-parallel ranks; called on every rank."""
    if context.dp_group is None or not uses_ddp(plan):
        return module
    return replicate(module, context.dp_group, context.device, plan.communication)


TRANSFORMS = (
    norm_batches,  # first: it replaces modules that the others wrap
    guard_convolutions,  # before recompute and compile, which take up the forward that it replaces
    split_tensors,  # before all that wraps forward: it replaces the forward of single layers
    fuse_loss,  # after the head is split, whose shard of the vocabulary the loss then uses
    split_sequences,  # before recompute, which must run attention over whole sequences again
    recompute,  # before compile, so that the recomputed region is what gets compiled
    compile_blocks,  # before sharding: its hooks stay outside of the graphs
    materialize,  # after all that reads whole parameters: from here on they are real, and sharded
    replicate_parameters,  # last: it must see the final parameters
)


def apply_plan(meta_model: MetaModel, plan: Plan, context: MeshContext) -> nn.Module:
    """Return the module of `meta_model` under `plan`; called on every rank."""
    module = meta_model.module
    attributes = attributes_of(module)
    for transform in TRANSFORMS:
        module = transform(module, plan, context, meta_model)
    restore_attributes(unwrap(module), attributes)
    return module


def gradient_sync(model: nn.Module, plan: Plan, context: MeshContext) -> GradSync:
    """Return the one object that sums the gradients of a model made by `apply_plan`."""
    every = plan.gradient_sync == "every"
    if isinstance(model, DistributedDataParallel):
        return ReplicaSync(model, every=every)
    sharded = [stage for stage in stages_of(model) if isinstance(stage, FSDPModule)]
    if sharded:
        return ShardSync(
            sharded,
            ReducedList(model, context.host_dp_group),
            every=every,
            replicated=[parameter for parameter in unshardable(model) if parameter.requires_grad],
            group=context.dp_group,
        )
    if context.dp_group is not None and plan.zero < 2:
        return SummedSync([parameter for parameter in model.parameters() if parameter.requires_grad], context.dp_group)
    return NoSync()


# The mesh context of a rank: its device, its coordinate in the layout, and its process groups.


@dataclass(frozen=True, kw_only=True)
class MeshContext:
    """What transforms need to know of one rank: device, layout, mesh and groups."""

    device: torch.device
    layout: Layout
    """How parameters are sharded: without a cp axis, whose ranks count as shards (`Layout.folded`)."""
    rank: int
    mesh: DeviceMesh | None
    """Axes of degree over 1, by their names in the layout; None for a world of one."""
    dp_group: dist.ProcessGroup | None
    """Data-parallel ranks: those with the same shard of the model and other samples or tokens; None for one."""
    host_dp_group: dist.ProcessGroup | None = None
    """The ranks of `dp_group`, for small values in host memory."""
    cp_group: dist.ProcessGroup | None = None
    """The context-parallel ranks of one data-parallel rank, in the order of their slices; None for cp = 1."""

    @property
    def coordinate(self) -> Coordinate:
        """Return this rank's coordinate on every axis."""
        return self.layout.coordinate(self.rank)

    def axis(self, *names: str) -> DeviceMesh | None:
        """Return the sub-mesh of those axes whose degree is over 1; None when there is none."""
        used = tuple(name for name in names if getattr(self.layout, name) > 1)
        if not used or self.mesh is None:
            return None
        return self.mesh[used]
