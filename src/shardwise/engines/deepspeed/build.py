"""Builds a DeepSpeedStep from a Job and a Plan: materializes parameters, then calls `deepspeed.initialize`.

The meta model is materialized unit by unit. In ZeRO stage 3, `deepspeed.zero.Init` partitions each unit before the
next one is materialized, so no rank ever stores the whole model. The optimizer is the job's own torch optimizer.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwise.engines.deepspeed.config import deepspeed_config, deepspeed_stage
from shardwise.engines.deepspeed.engine import load_deepspeed
from shardwise.engines.deepspeed.fragments import find_fragments
from shardwise.engines.deepspeed.state import DeepSpeedState, ZeroRanks
from shardwise.engines.deepspeed.step import DeepSpeedStep, EngineSync, EngineUpdate, compute_in, require_elementwise
from shardwise.errors import JobError
from shardwise.job.generators import seed_generators
from shardwise.parallel.apply import guard_convolutions, norm_batches, recompute
from shardwise.parallel.batch_norm import foreign_batch_norms
from shardwise.parallel.gradsync import GradNorm
from shardwise.parallel.optimizer import Optimized
from shardwise.parallel.parameter_rules import attributes_of, restore_attributes
from shardwise.parallel.sharded import LOWER
from shardwise.parallel.weights import fill_buffers, fill_parameters
from shardwise.training.build import make_mesh_context, prepare_meta_model
from shardwise.training.loading import check_tokens, vocabulary_of
from shardwise.training.step.document_probe import DocumentProbe, ProbedModel
from shardwise.training.step.step import Autocast, StepParts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from shardwise.dist import World
    from shardwise.job import Job
    from shardwise.parallel.apply import MeshContext
    from shardwise.parallel.meta_model import MetaModel
    from shardwise.plans import Plan
    from shardwise.training.build import BuildContext
    from shardwise.training.step.step import StepContext


def build_deepspeed_step(job: Job, plan: Plan, world: World, context: BuildContext) -> DeepSpeedStep:
    """Build the Step that trains `job` under `plan` with DeepSpeed. Communicates over the world; call on every rank."""
    place = make_mesh_context(plan, world)
    meta_model = prepare_meta_model(job, plan, world)
    around = context.step_context(job, plan, world, fill=not foreign_batch_norms(meta_model.module))
    check_tokens(job, around.feed, vocabulary_of(meta_model.module), world, context.note)
    step = _build(job, plan, place, meta_model, around, local_rank=world.local_rank)
    seed_generators(job.seed + 1 + plan.layout.draw_index(world.rank))
    return step


def _build(
    job: Job, plan: Plan, place: MeshContext, meta_model: MetaModel, around: StepContext, *, local_rank: int
) -> DeepSpeedStep:
    deepspeed = load_deepspeed(plan, place.device, local_rank)
    config = engine_config(job, plan, place.device)
    module = meta_model.module
    shapes = {name: parameter.shape for name, parameter in module.named_parameters()}
    _require_dimensions(shapes)
    for transform in (norm_batches, guard_convolutions, recompute):
        module = transform(module, plan, place, meta_model)
    low = LOWER.get(plan.precision.compute)
    if low is not None:
        compute_in(module, low, place.device.type)
    deepspeed.init_distributed(verbose=False)
    attributes = attributes_of(module)
    _materialize(module, meta_model, place, _partitioner(deepspeed, module, plan, config))
    restore_attributes(module, attributes)
    named = list(module.named_parameters())
    optimizer, groups = _make_optimizer(job, named, shapes, place.device)
    require_elementwise(optimizer, deepspeed_stage(plan))
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    if not deepspeed_stage(plan):
        # In bf16 and fp16, initialize() has made one optimizer step with zero gradients: step counts would be off by 1.
        engine.basic_optimizer.state.clear()

    ranks = ZeroRanks(mesh=place.axis("shard"), group=place.dp_group, device=place.device)
    state = DeepSpeedState(find_fragments(engine, place.rank), named, shapes, ranks)
    if low is not None and meta_model.weights is not None:
        state.start_from(meta_model.weights, [spec for unit in meta_model.units for spec in unit.parameters])
    plain = low is None and deepspeed_stage(plan) < 3
    norm = _gradient_norm(engine, named, plan, place) if low is None else None
    update = EngineUpdate(engine, norm, place.device)

    def refresh() -> None:
        if plain and deepspeed_stage(plan):
            engine.optimizer.refresh_fp32_params()
        state.load_filled()
        update.refresh()

    if not plain:
        _export_trained_values(module, state)
    autocast = Autocast(device_type=place.device.type, dtype=None)
    probed = ProbedModel(module, job.forward, lambda program: program(engine.module), autocast, compute=low)
    parts = StepParts(
        optimized=Optimized(optimizer=engine.basic_optimizer, named=named, refresh=refresh, groups=groups),
        sync=EngineSync(plan.layout.dp),
        update=update,
        autocast=autocast,
        batch_checks=(DocumentProbe(probed, around),),
        origin=meta_model.weights.description if meta_model.weights is not None else "",
        **vars(around),
    )
    return DeepSpeedStep(job, engine, parts, state, plain=plain, shapes=shapes)


def engine_config(job: Job, plan: Plan, device: torch.device) -> dict[str, Any]:
    """Return the plan's DeepSpeed configuration, adapted to the device; it leaves torch's operators unpatched."""
    config = copy.deepcopy(deepspeed_config(plan, clip_norm=job.clip_norm, nvme_path=plan.offload.folder or None))
    zero = config["zero_optimization"]
    zero["memory_efficient_linear"] = False  # it replaces torch.nn.functional.linear for the whole process
    if device.type == "cpu":
        for part in ("offload_param", "offload_optimizer"):
            if part in zero:
                zero[part]["pin_memory"] = False  # no device to copy to; DeepSpeed would compile an operator for it
    return config


def _require_dimensions(shapes: Mapping[str, torch.Size]) -> None:
    """Raise JobError if a parameter is a scalar: DeepSpeed fails to broadcast it."""
    scalars = [name for name, shape in shapes.items() if not shape]
    if scalars:
        raise JobError(
            f"engine deepspeed does not support scalar parameters, but the model has {', '.join(scalars)}",
            code="support.deepspeed-scalar-parameter",
            fix="use the shape [1] for them, or pass --set engine=torch",
        )


def _materialize(
    module: nn.Module, meta_model: MetaModel, place: MeshContext, partition: Callable[[nn.Module], Any] | None
) -> None:
    """Materialize parameters unit by unit and partition each unit before the next; communicates over the world."""
    parts = dict(module.named_modules())
    for unit in meta_model.units:
        if meta_model.weights is not None:
            fill_parameters(module, unit.parameters, meta_model.weights, place.device)
        if partition is not None:
            partition(parts[unit.name])
    for buffer in module.buffers():
        buffer.data = buffer.data.to(place.device)
    if meta_model.weights is not None:
        fill_buffers(module, meta_model.buffers, meta_model.weights, place.device)


def _partitioner(
    deepspeed: Any, module: nn.Module, plan: Plan, config: dict[str, Any]
) -> Callable[[nn.Module], Any] | None:
    """Return a function that partitions the parameters of a submodule; None below stage 3, where they stay whole."""
    if deepspeed_stage(plan) != 3:
        return None
    low = LOWER.get(plan.precision.compute)

    def partition(part: nn.Module) -> None:
        if plan.offload.parameters == "nvme" and part is not module:
            return  # every call of zero.Init would create another swapper
        for parameter in part.parameters():
            if low is not None and not hasattr(parameter, "ds_id"):
                parameter.data = parameter.data.to(low)
        deepspeed.zero.Init(module=part, config_dict_or_path=config)

    return partition


def _make_optimizer(
    job: Job, named: list[tuple[str, nn.Parameter]], shapes: Mapping[str, torch.Size], device: torch.device
) -> tuple[Any, tuple[tuple[str, ...], ...]]:
    """Return the job's optimizer and the parameter names of each of its groups.

    The factory may inspect shapes, so it receives placeholders of the full shapes: partitioned parameters are flat.
    """
    trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    if not trained:
        raise JobError(
            "the model has no trainable parameter",
            code="model.no-trainable-parameter",
            fix="set requires_grad=True on at least one parameter",
        )
    placeholders = [(name, nn.Parameter(torch.zeros(1, device=device).expand(shapes[name]))) for name, _ in trained]
    names = {id(placeholder): name for name, placeholder in placeholders}
    parameters = dict(trained)
    optimizer = job.optimizer(placeholders)
    groups = [tuple(names[id(each)] for each in group["params"]) for group in optimizer.param_groups]
    for group, members in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = [parameters[name] for name in members]
    return optimizer, tuple(members for members in groups if members)


def _gradient_norm(
    engine: Any, named: list[tuple[str, nn.Parameter]], plan: Plan, place: MeshContext
) -> GradNorm | None:
    """Return the GradNorm for stage 0, in which DeepSpeed computes no norm; None for other stages."""
    if engine.zero_optimization_stage():
        return None
    trained = [parameter for _, parameter in named if parameter.requires_grad]
    return GradNorm(trained, layout=plan.layout, sharded_axes=(), group=None, device=place.device)


def _export_trained_values(module: nn.Module, trained: DeepSpeedState) -> None:
    """Make `module.state_dict()` return the trained fp32 values as row shards, not the module's own copies."""

    def replace(_: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
        names = {name: prefix + name for name, _ in module.named_parameters()}
        aliases = {id(each): name for name, each in module.named_parameters()}
        if any(isinstance(state[full], nn.Parameter) for full in names.values()):
            return  # with keep_vars the caller wants the parameters themselves
        values = trained.values()
        for name, each in module.named_parameters(remove_duplicate=False):
            state[prefix + name] = values[aliases[id(each)]]

    module.register_state_dict_post_hook(replace)
