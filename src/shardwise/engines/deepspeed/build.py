"""Wiring: a Job, a Plan and a meta_model become a Step over `deepspeed.initialize`."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwise.engines.deepspeed.config import deepspeed_config
from shardwise.engines.deepspeed.holding import DeepSpeedState, ZeroRanks
from shardwise.engines.deepspeed.library import load_deepspeed
from shardwise.engines.deepspeed.pieces import find_pieces
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
from shardwise.planner.cost.deepspeed import deepspeed_stage
from shardwise.training.build import draw_up, find_place
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
    """Make the Step that trains `job` under `plan` with DeepSpeed; called on every rank, communicates."""
    place = find_place(plan, world)
    meta_model = draw_up(job, plan, world)
    around = context.step_context(job, plan, world, fill=not foreign_batch_norms(meta_model.module))
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
    _fill(module, meta_model, place, _cutter(deepspeed, module, plan, config))
    restore_attributes(module, attributes)
    named = list(module.named_parameters())
    optimizer, groups = _make_optimizer(job, named, shapes, place.device)
    require_elementwise(optimizer, deepspeed_stage(plan))
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    if not deepspeed_stage(plan):
        # Below fp32 it has moved the optimizer once by a gradient of zeros: all its counts would be one ahead.
        engine.basic_optimizer.state.clear()

    ranks = ZeroRanks(mesh=place.axis("shard"), group=place.dp_group, device=place.device)
    holding = DeepSpeedState(find_pieces(engine, place.rank), named, shapes, ranks)
    if low is not None and meta_model.weights is not None:
        holding.start_from(meta_model.weights, [spec for unit in meta_model.units for spec in unit.parameters])
    plain = low is None and deepspeed_stage(plan) < 3
    update = EngineUpdate(engine, _own_norm(engine, named, plan, place) if low is None else None, place.device)

    def refresh() -> None:
        if plain and deepspeed_stage(plan):
            engine.optimizer.refresh_fp32_params()
        holding.take()
        update.refresh()

    if not plain:
        _show_trained_values(module, holding)
    parts = StepParts(
        optimized=Optimized(optimizer=engine.basic_optimizer, named=named, refresh=refresh, groups=groups),
        sync=EngineSync(plan.layout.dp),
        update=update,
        autocast=Autocast(device_type=place.device.type, dtype=None),
        origin=meta_model.weights.description if meta_model.weights is not None else "",
        **vars(around),
    )
    return DeepSpeedStep(job, engine, parts, holding, plain=plain, shapes=shapes)


def engine_config(job: Job, plan: Plan, device: torch.device) -> dict[str, Any]:
    """Return the plan's JSON with what depends on the device, and what keeps torch's own operators in place."""
    config = copy.deepcopy(deepspeed_config(plan, clip_norm=job.clip_norm, nvme_path=plan.offload.folder or None))
    zero = config["zero_optimization"]
    zero["memory_efficient_linear"] = False  # it would replace torch.nn.functional.linear in this whole process
    if device.type == "cpu":
        for part in ("offload_param", "offload_optimizer"):
            if part in zero:
                zero[part]["pin_memory"] = False  # there is no device to copy to, and pinning would be compiled
    return config


def _require_dimensions(shapes: Mapping[str, torch.Size]) -> None:
    """Refuse scalars, which DeepSpeed fails to send to the other ranks."""
    scalars = [name for name, shape in shapes.items() if not shape]
    if scalars:
        raise JobError(
            f"parameters {', '.join(scalars)} have no dimension, and DeepSpeed trains none such",
            code="support.deepspeed-scalar-parameter",
            fix="give them the shape [1], or --set engine=torch",
        )


def _fill(module: nn.Module, meta_model: MetaModel, place: MeshContext, cut: Callable[[nn.Module], Any] | None) -> None:
    """Give parameters their values, unit by unit, and cut each unit before the next comes; communicates."""
    parts = dict(module.named_modules())
    for unit in meta_model.units:
        if meta_model.weights is not None:
            fill_parameters(module, unit.parameters, meta_model.weights, place.device)
        if cut is not None:
            cut(parts[unit.name])
    for buffer in module.buffers():
        buffer.data = buffer.data.to(place.device)
    if meta_model.weights is not None:
        fill_buffers(module, meta_model.buffers, meta_model.weights, place.device)


def _cutter(deepspeed: Any, module: nn.Module, plan: Plan, config: dict[str, Any]) -> Callable[[nn.Module], Any] | None:
    """Return what cuts the parameters of a part that are not cut yet; None where they stay whole."""
    if deepspeed_stage(plan) != 3:
        return None
    low = LOWER.get(plan.precision.compute)

    def cut(part: nn.Module) -> None:
        if plan.offload.parameters == "nvme" and part is not module:
            return  # every call would bring a swapper of its own
        for parameter in part.parameters():
            if low is not None and not hasattr(parameter, "ds_id"):
                parameter.data = parameter.data.to(low)
        deepspeed.zero.Init(module=part, config_dict_or_path=config)

    return cut


def _make_optimizer(
    job: Job, named: list[tuple[str, nn.Parameter]], shapes: Mapping[str, torch.Size], device: torch.device
) -> tuple[Any, tuple[tuple[str, ...], ...]]:
    """Return the job's optimizer, and the names in each of its groups.

    It is made over stand-ins of the whole shapes, since a factory may look at them: parameters that are cut are flat.
    """
    trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    if not trained:
        raise JobError(
            "the model has no trainable parameter",
            code="model.no-trainable-parameter",
            fix="set requires_grad=True on at least one",
        )
    stand_ins = [(name, nn.Parameter(torch.zeros(1, device=device).expand(shapes[name]))) for name, _ in trained]
    names = {id(stand_in): name for name, stand_in in stand_ins}
    parameters = dict(trained)
    optimizer = job.optimizer(stand_ins)
    groups = [tuple(names[id(each)] for each in group["params"]) for group in optimizer.param_groups]
    for group, members in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = [parameters[name] for name in members]
    return optimizer, tuple(members for members in groups if members)


def _own_norm(engine: Any, named: list[tuple[str, nn.Parameter]], plan: Plan, place: MeshContext) -> GradNorm | None:
    """Return what measures whole gradients, where the engine does not."""
    if engine.zero_optimization_stage():
        return None
    trained = [parameter for _, parameter in named if parameter.requires_grad]
    return GradNorm(trained, layout=plan.layout, sharded_axes=(), group=None, device=place.device)


def _show_trained_values(module: nn.Module, holding: DeepSpeedState) -> None:
    """Have the module's state dict give the values that are trained, as rows, not what it holds of them itself."""

    def replace(_: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
        names = {name: prefix + name for name, _ in module.named_parameters()}
        aliases = {id(each): name for name, each in module.named_parameters()}
        if any(isinstance(state[full], nn.Parameter) for full in names.values()):
            return  # keep_vars: somebody asks for identities
        values = holding.values()
        for name, each in module.named_parameters(remove_duplicate=False):
            state[prefix + name] = values[aliases[id(each)]]

    module.register_state_dict_post_hook(replace)
