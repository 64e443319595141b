"""The ordered model transforms that parallelize a module under a plan, and the mesh context of a rank."""

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
from shardwise.parallel.context import context_parallel
from shardwise.parallel.float8 import float8_linears, gather_in_float8, select_linears
from shardwise.parallel.fused_loss import fuse_head
from shardwise.parallel.gradsync import GradSync, NoSync, ReplicaSync, ShardSync, SummedSync
from shardwise.parallel.parameter_rules import attributes_of, restore_attributes
from shardwise.parallel.recompute import find_blocks, recompute_block, recomputed_blocks
from shardwise.parallel.replicated import replicate
from shardwise.parallel.sharded import (
    DTYPES,
    ReducedList,
    check_sharded,
    keep_unit_order,
    set_prefetch,
    shard_unit,
    unshardable,
)
from shardwise.parallel.tensor import tensor_parallel
from shardwise.parallel.weights import fill_buffers, fill_parameters
from shardwise.plans.rules import accumulates_in_fp32, gathers_float8, uses_ddp
from shardwise.torch_private.dynamo import disable_autograd_cache

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from shardwise.layout import Coordinate, Layout
    from shardwise.parallel.meta_model import MetaModel
    from shardwise.plans import Plan


def norm_batches(module: nn.Module, plan: Plan, context: MeshContext, _: MetaModel) -> nn.Module:
    """Replace batch norms so that they compute local or synchronized statistics, as `plan.batch_norm` requests."""
    foreign = foreign_batch_norms(module)
    if foreign and context.dp_group is not None and plan.batch_norm == "sync":
        raise JobError(
            f"custom batch norm classes cannot be synchronized over ranks: {', '.join(foreign)}",
            code="support.batch-norm-class",
            fix="use torch.nn.BatchNorm1d, BatchNorm2d or BatchNorm3d, or pass --set batch_norm=local",
        )
    replaced = replace_batch_norms(module, context.dp_group if plan.batch_norm == "sync" else None)
    every = plan.communication.sync_every
    if every > 1 and plan.batch_norm == "sync" and (foreign or batch_norms(replaced)):
        raise JobError(
            f"synchronized batch norms communicate in every forward pass, but replicas synchronize every {every} steps",
            code="support.batch-norm-sync-every",
            fix="pass --set batch_norm=local, or set communication.sync_every=1",
        )
    return replaced


def guard_convolutions(module: nn.Module, plan: Plan, context: MeshContext, _: MetaModel) -> nn.Module:
    """Compute bf16 convolutions in fp32 on CPUs for shapes whose weight gradient torch computes incompletely."""
    if plan.precision.activations == "bf16" and context.device.type == "cpu":
        guard_narrow_convolutions(module)
    return module


def use_float8(module: nn.Module, plan: Plan, context: MeshContext, meta_model: MetaModel) -> nn.Module:
    """Replace linear layers of blocks by layers that compute in float8, if the plan does."""
    if plan.precision.compute != "float8":
        return module
    names = meta_model.float8
    if names is None:
        names = select_linears(module, plan, meta_model.tensor_rules).names
    return float8_linears(module, names, plan, context.device)


def split_tensors(module: nn.Module, plan: Plan, context: MeshContext, meta_model: MetaModel) -> nn.Module:
    """Shard weight matrices over the tp axis by the tensor rules of the job or the model."""
    mesh = context.axis("tp")
    if mesh is None:
        return module
    return tensor_parallel(module, mesh, meta_model.tensor_rules, sequence=plan.sequence_parallel)


def fuse_loss(module: nn.Module, plan: Plan, _: MeshContext, __: MetaModel) -> nn.Module:
    """Make the output head return deferred logits, which the loss computes in chunks of tokens."""
    if plan.fused_loss:
        fuse_head(module)
    return module


def split_sequences(module: nn.Module, _: Plan, context: MeshContext, __: MetaModel) -> nn.Module:
    """Run the model on this rank's slice of the tokens if the cp axis splits sequences."""
    return module if context.cp_group is None else context_parallel(module, context.cp_group)


def recompute(module: nn.Module, plan: Plan, _: MeshContext, __: MetaModel) -> nn.Module:
    """Apply activation checkpointing: repeated blocks run their forward pass again in the backward pass."""
    if plan.recompute != "none":
        disable_kv_cache(module)
        for block in recomputed_blocks(module, plan.recompute_blocks):
            recompute_block(block, selective=plan.recompute == "selective")
    return module


def disable_kv_cache(module: nn.Module) -> None:
    """Disable the key-value cache of transformers models, because recomputation would append to the cache again."""
    for submodule in module.modules():
        config = getattr(submodule, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False  # type: ignore[union-attr]


def compile_blocks(module: nn.Module, plan: Plan, context: MeshContext, _: MetaModel) -> nn.Module:
    """Compile each repeated block in place, or the whole module if the plan requests it or no block repeats."""
    if plan.compile == "none":
        return module
    if context.cp_group is not None:
        # torch 2.13 restores garbage sizes for a graph with the all-to-all from its autograd cache. The cache of
        # compiled kernels, which saves most of the time, stays enabled.
        disable_autograd_cache()
    blocks = find_blocks(module) if plan.compile == "blocks" else {}
    for submodule in blocks.values() or (module,):
        submodule.compile()
    return module


def materialize(module: nn.Module, plan: Plan, context: MeshContext, meta_model: MetaModel) -> nn.Module:
    """Materialize and shard parameters unit by unit, so that no rank stores more than one unsharded unit."""
    mesh = context.axis(*plan.dp_axes) if plan.zero >= 2 else None
    check_sharded(module, plan)
    submodules = dict(module.named_modules())
    for unit in meta_model.units:
        if meta_model.weights is not None:
            fill_parameters(module, unit.parameters, meta_model.weights, context.device)
        submodule = submodules.get(unit.name)
        if mesh is not None and submodule is not None and next(submodule.parameters(), None) is not None:
            # The head is in the root unit, and a fused loss reads its weight after the forward pass.
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
    """Set up prefetching, a fixed order of all-gathers and their precision in all FSDP2 units; call on every rank."""
    for parameter in unshardable(module):
        parameter.data = parameter.data.to(context.device)
    submodules = dict(module.named_modules())
    units: dict[str, FSDPModule] = {}
    for unit in meta_model.units:
        submodule = submodules.get(unit.name)
        if isinstance(submodule, FSDPModule):
            units[unit.name] = submodule
    set_prefetch(list(units.values()), plan.communication.prefetch)
    inner = {name: unit for name, unit in units.items() if name}
    # Pipeline stages need no fixed order: the data-parallel ranks of a stage run the same schedule of micro-batches.
    if inner and context.host_dp_group is not None and isinstance(module, FSDPModule):
        keep_unit_order(module, inner, context.host_dp_group)
    if gathers_float8(plan):
        gather_in_float8(module)


def replicate_parameters(module: nn.Module, plan: Plan, context: MeshContext, _: MetaModel) -> nn.Module:
    """Replicate parameters over the data-parallel ranks with DDP; call on every rank.

    DDP reduces gradients in the dtype of their parameters, so gradients accumulated in fp32 are summed without it.
    """
    if context.dp_group is None or not uses_ddp(plan):
        return module
    return replicate(module, context.dp_group, context.device, plan.communication)


TRANSFORMS = (
    norm_batches,  # first: it replaces modules that later transforms wrap
    guard_convolutions,  # before recompute and compile, which capture the forward that it replaces
    use_float8,  # before tensor rules, which shard the new modules by their names
    split_tensors,  # before transforms that wrap forward: it replaces the forward of single layers
    fuse_loss,  # after the head is sharded: the loss uses this rank's shard of the vocabulary
    split_sequences,  # before recompute, which must recompute attention over the full sequences
    recompute,  # before compile, so that the recomputed region is compiled
    compile_blocks,  # before sharding, so that the FSDP hooks stay outside the graphs
    materialize,  # after every transform that reads full meta parameters; it materializes and shards them
    replicate_parameters,  # last: it must see the final parameters
)


def apply_plan(meta_model: MetaModel, plan: Plan, context: MeshContext) -> nn.Module:
    """Return the module of `meta_model` parallelized under `plan`; call on every rank."""
    module = meta_model.module
    attributes = attributes_of(module)
    for transform in TRANSFORMS:
        module = transform(module, plan, context, meta_model)
    restore_attributes(unwrap(module), attributes)
    return module


def gradient_sync(model: nn.Module, plan: Plan, context: MeshContext) -> GradSync:
    """Return the GradSync that sums the gradients of a model returned by `apply_plan`."""
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
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        dtype = DTYPES[plan.precision.reduce] if accumulates_in_fp32(plan) else None
        return SummedSync(parameters, context.dp_group, dtype)
    return NoSync()


# The mesh context of a rank: its device, its coordinate in the layout, and its process groups.


@dataclass(frozen=True, kw_only=True)
class MeshContext:
    """The position of one rank in the layout: its device, device mesh and process groups."""

    device: torch.device
    layout: Layout
    """The layout by which parameters are sharded; cp ranks are folded into the shard axis (`Layout.folded`)."""
    rank: int
    mesh: DeviceMesh | None
    """Mesh axes of degree greater than 1, named as in the layout; None in a world of one rank."""
    dp_group: dist.ProcessGroup | None
    """The ranks with the same model shard but different samples or tokens; None if there is only one such rank."""
    host_dp_group: dist.ProcessGroup | None = None
    """A group of the same ranks as `dp_group`, for small values in host memory."""
    cp_group: dist.ProcessGroup | None = None
    """The context-parallel ranks of this data-parallel rank in the order of their slices; None if cp is 1."""

    @property
    def coordinate(self) -> Coordinate:
        """This rank's coordinate on every axis."""
        return self.layout.coordinate(self.rank)

    def axis(self, *names: str) -> DeviceMesh | None:
        """Return the sub-mesh of the axes in `names` with a degree above 1; None if every degree is 1."""
        used = tuple(name for name in names if getattr(self.layout, name) > 1)
        if not used or self.mesh is None:
            return None
        return self.mesh[used]
