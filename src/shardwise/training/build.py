"""Build the Step of a Job under a Plan in a World."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from shardwise.dist.world import running_group
from shardwise.engines.engine import engine_for
from shardwise.errors import JobError
from shardwise.job.generators import seed_generators
from shardwise.job.schedules import check_schedule
from shardwise.parallel.apply import MeshContext, apply_plan, gradient_sync
from shardwise.parallel.batch_norm import foreign_batch_norms
from shardwise.parallel.collectives import parameters_of, stages_of
from shardwise.parallel.context import check_context
from shardwise.parallel.counter_dropout import replace_dropouts
from shardwise.parallel.first_passes import watch_forward
from shardwise.parallel.fused_loss import separable_head
from shardwise.parallel.gradsync import GradNorm
from shardwise.parallel.lora import adapt_meta_model
from shardwise.parallel.meta_model import job_meta_model
from shardwise.parallel.mixed_adamw import accumulate_in_fp32
from shardwise.parallel.muon import for_model
from shardwise.parallel.optimizer import make_optimizer
from shardwise.parallel.parameter_rules import (
    check_dense,
    check_dtypes,
    check_parameters,
    note_dtypes,
    reject_sparse,
    trainable_of,
    without_gradient,
)
from shardwise.parallel.replicated import sync_by_rounds
from shardwise.parallel.sharded import DTYPES, LOWER
from shardwise.parallel.stage_gate import share_copies, tied_copies
from shardwise.parallel.stages import count_layers, find_layers, split_stages
from shardwise.parallel.tensor_gradients import reject_unequal, unequal_gradients
from shardwise.parallel.tensor_rules import find_rules
from shardwise.parallel.weights import BuiltWeights, broadcast_values
from shardwise.planner.settle import with_engine
from shardwise.plans.pipeline import split_layers
from shardwise.plans.rules import accumulates_in_fp32, compiles_head, compiles_model, uses_ddp
from shardwise.spec import local_path
from shardwise.training.float8 import settle_float8
from shardwise.training.loading import check_tokens, make_feed, token_shard, vocabulary_of
from shardwise.training.preflight import check_fit
from shardwise.training.saving import Resuming
from shardwise.training.step.captured import plain_step, sampled_batches
from shardwise.training.step.compiled import compilable
from shardwise.training.step.document_probe import DocumentProbe, ProbedModel
from shardwise.training.step.first_step_checks import PeerBatches
from shardwise.training.step.pipeline import PipelineStep
from shardwise.training.step.pipeline_schedule import Relay
from shardwise.training.step.step import (
    Autocast,
    LossReduction,
    StepContext,
    StepParts,
    StepSource,
    combine_marks,
    nvtx_ranges,
)
from shardwise.training.step.token_probe import TokenProbe
from shardwise.training.step.update import choose_update

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from torch import Tensor, nn

    from shardwise.data.feed import DataPosition, StepBatch
    from shardwise.dist import World
    from shardwise.job import Job
    from shardwise.parallel.gradsync import GradSync
    from shardwise.parallel.meta_model import MetaModel
    from shardwise.plans import Plan
    from shardwise.plans.pipeline import StageSplit
    from shardwise.training.step.step import Mark, Step
    from shardwise.training.step.update import Update


def build_step(
    job: Job,
    plan: Plan,
    world: World,
    *,
    note: Callable[[str], None] = lambda _: None,
    before_update: Callable[[], None] | None = None,
    first_step: int = 0,
    mark: Mark | None = None,
    report_loss: bool = True,
    resume: Path | str | None = None,
    position: DataPosition | None = None,
) -> Step:
    """Build the Step that trains `job` under `plan`. Communicates over the world; call on every rank.

    `note` receives messages for the user. `before_update` is called in each step after gradients are reduced and
    before they are clipped. `first_step` is the step at which the data starts, and `position` its position in a corpus
    or a stream, which is computed from `first_step` if it is None. `mark(phase, step)` is called on the host at the
    start of data, forward, backward and optimizer. Without `report_loss`, steps do not reduce the loss, and a report
    contains only this rank's share. `resume` is a run directory, a directory of checkpoints or one checkpoint: the step
    resumes from the newest intact one, saved at any world size under any strategy, or starts from scratch if there is
    none.
    """
    plan = with_engine(plan, job.engine)
    engine = engine_for(job, plan)
    engine.check_world(world)
    check_fit(job, plan, world)
    context = BuildContext(
        first_step=first_step,
        position=position,
        before_update=before_update,
        mark=mark,
        note=note,
        report_loss=report_loss,
    )
    resumed: Step | None = None
    if resume is not None:
        group = None
        if world.size > 1:
            group = world.own_host_group()
        resumed = Resuming(local_path(resume), job, plan, world, note).run(
            lambda start: engine.build(
                job, start.planned(plan), world, replace(context, first_step=start.step, position=start.position)
            ),
            group,
        )
    if resumed is not None:
        return resumed
    return engine.build(job, plan, world, context)


@dataclass(frozen=True, kw_only=True)
class BuildContext:
    """The arguments of `build_step`, other than job, plan and world, that every engine receives."""

    first_step: int
    position: DataPosition | None = None
    """Position of a corpus or a stream at `first_step`, from a checkpoint."""
    before_update: Callable[[], None] | None
    mark: Mark | None
    note: Callable[[str], None]
    report_loss: bool

    def step_context(self, job: Job, plan: Plan, world: World, *, fill: bool) -> StepContext:
        """Return the step's data, training length and hooks. Communicates to create the group of data-parallel ranks.

        `fill` sets whether short micro-batches are padded by repeating rows.
        """
        # A separate host group: its collectives run one step ahead and overlap with those of the model.
        feed_group = world.axis_group(plan.layout, ("replicate", "shard"), on_host=True)
        feed, length = make_feed(
            job, plan, world, feed_group, self.first_step, fill=fill, position=self.position, note=self.note
        )
        check_schedule(job.schedule, length.num_steps)
        reduce_loss = None
        if self.report_loss and world.size > 1:
            # On the CPU the host group is used, so that its collectives overlap with those of the model.
            group = world.host_group if world.device.type == "cpu" else running_group()
            reduce_loss = LossReduction(group=group, num_ranks=world.size)
        return StepContext(
            source=StepSource(job, plan, world),
            reduce_loss=reduce_loss,
            feed=feed,
            length=length,
            first_step=self.first_step,
            reports_loss=plan.layout.reports_loss(world.rank),
            before_update=self.before_update,
            mark=combine_marks(self.mark, nvtx_ranges()),
            note=self.note,
        )


def build_torch_step(job: Job, plan: Plan, world: World, context: BuildContext) -> Step:
    """Build the Step of the torch engine. Communicates over the world; call on every rank."""
    mesh_context = make_mesh_context(plan, world)
    plan = compilable(plan, world, context.note)
    head = _compiled_head(job, plan, world)  # before generators are seeded
    meta_model = prepare_meta_model(job, plan, world)
    if job.lora is None:  # frozen weights beside adapters may have the compute dtype
        note_dtypes(meta_model.module, plan, context.note)
    meta_model, plan = settle_float8(meta_model, plan, world, context.note)
    step_context = context.step_context(job, plan, world, fill=not foreign_batch_norms(meta_model.module))
    check_tokens(job, step_context.feed, vocabulary_of(meta_model.module), world, context.note)
    make = for_model(job.optimizer, meta_model.module)  # the full model, which a pipeline splits
    split, model = _apply_plan(job, meta_model, plan, mesh_context)
    # Data-parallel ranks sample different dropout masks, independent of the model's initialization.
    seed_generators(job.seed + 1 + plan.layout.draw_index(world.rank))
    named = parameters_of(model)
    owner = "the model" if split is None else f"pipeline stage {mesh_context.coordinate.pp}"
    trainable = trainable_of(named, owner=owner)
    if accumulates_in_fp32(plan):
        accumulate_in_fp32(trainable)
    inner = gradient_sync(model, plan, mesh_context)
    sync = sync_by_rounds(
        inner, model, trainable, plan=plan, context=mesh_context, ends_round=step_context.length.syncs_after
    )
    parts = StepParts(
        optimized=make_optimizer(
            make,
            trainable,
            shard_mesh=mesh_context.axis("shard") if plan.zero == 1 else None,
            on_host=plan.offload.optimizer == "cpu" and plan.offload.parameters == "none",
            replica_mesh=mesh_context.axis(*plan.dp_axes) if plan.zero >= 2 else None,
            precision=plan.precision,
            is_captured=plan.is_captured and plan.compile != "none" and context.before_update is None,
        ),
        sync=sync,
        update=_make_update(job, plan, world, model, sync.gain),
        autocast=Autocast(device_type=world.device.type, dtype=LOWER.get(plan.precision.activations)),
        origin=meta_model.weights.description if meta_model.weights is not None else "",
        after_first_backward=_first_check(named, plan, world, context.note, sync),
        head=head,
        batch_checks=_batch_checks(job, model, plan, step_context, relay=_relay(split, model, mesh_context)),
        **vars(step_context),
    )
    watch_forward(stages_of(model), plan, parts.optimized)
    if split is None:
        return plain_step(job, model, parts, plan=plan, note=context.note)
    stages = stages_of(model)
    return PipelineStep(job, stages, parts, split=split, plan=plan, mesh_context=mesh_context)  # type: ignore[arg-type]


def _compiled_head(job: Job, plan: Plan, world: World) -> str:
    """Return the name of the head to compile in one graph with the loss, "" if none. Communicates if FSDP compiles it.

    Ranks must agree, since the answer changes which parameters FSDP2 gathers in backward.
    """
    if not compiles_head(plan) and not compiles_model(plan):
        return ""
    dtype = LOWER.get(plan.precision.activations)
    head = separable_head(job, lambda: next(sampled_batches(job, 1, 1), None), world.device.type, dtype)
    if world.backend == "fake":  # without other ranks, there is nothing to compare
        return head
    return head if all(each == head for each in world.gather(head)) else ""


def prepare_meta_model(job: Job, plan: Plan, world: World) -> MetaModel:
    """Return the job's model on the meta device, checked and transformed for this plan; call on every rank."""
    meta_model = job_meta_model(
        job.model,
        seed=job.seed,
        weights=job.weights,
        rank=world.rank,
        size=world.size,
        dtype=DTYPES[plan.precision.parameter],
        local_size=world.local_size,
        agree=lambda value: world.backend == "fake" or all(world.gather(value)),
    )
    check_dense(meta_model.module)
    check_parameters(meta_model.module, plan)
    if isinstance(meta_model.weights, BuiltWeights) and world.size > 1:
        # A model may use random numbers that the seed does not control.
        broadcast_values(meta_model.module, world.device)
    if job.lora is not None:
        meta_model = adapt_meta_model(meta_model, job.lora, seed=job.seed)
    trainable_of(meta_model.module.named_parameters())  # checked here for a clearer error than DDP's on a frozen model
    check_dtypes(meta_model.module, plan, adapted=job.lora is not None)
    if plan.layout.cp > 1:
        check_context(meta_model.module, plan.layout, own_loss=not job.loss.by_row)
    if job.masks == "keyed":
        replace_dropouts(meta_model.module, staged=plan.layout.pp > 1)
    if plan.layout.tp == 1:
        return meta_model
    return replace(meta_model, tensor_rules=find_rules(meta_model.module, job.tensor_rules))


def _apply_plan(
    job: Job, meta_model: MetaModel, plan: Plan, mesh_context: MeshContext
) -> tuple[StageSplit | None, nn.Module]:
    """Apply the plan to the model; return the stage split and this rank's stages, or None and the model without pp."""
    if plan.layout.pp == 1:
        return None, apply_plan(meta_model, plan, mesh_context)
    layers = find_layers(meta_model.module, job.layers)
    split = split_layers(plan, count_layers(meta_model.module, layers))
    stages = split_stages(
        meta_model.module,
        split,
        mesh_context.coordinate.pp,
        layers=layers,
        device=mesh_context.device,
        dtype=LOWER.get(plan.precision.activations) if plan.zero >= 2 else None,
    )
    applied = torch.nn.ModuleList()
    for stage in stages:
        applied.append(apply_plan(replace(meta_model, module=stage), plan, mesh_context))
    share_copies(stages)
    return split, applied


def make_mesh_context(plan: Plan, world: World) -> MeshContext:
    """Create the device mesh and process groups of this rank. Communicates over the world; call on every rank."""
    layout = plan.layout.folded
    return MeshContext(
        device=world.device,
        layout=layout,
        rank=world.rank,
        mesh=world.mesh(layout) if layout.world_size > 1 else None,
        dp_group=world.axis_group(layout, plan.dp_axes),
        host_dp_group=world.axis_group(layout, plan.dp_axes, on_host=True),
        cp_group=world.axis_group(plan.layout, ("cp",)),
    )


def _make_update(job: Job, plan: Plan, world: World, model: nn.Module, gain: int) -> Update:
    """Choose the optimizer update. Communicates to create the group of ranks that shard a gradient."""
    parameters = [parameter for _, parameter in parameters_of(model) if parameter.requires_grad]
    copies = tied_copies(stages_of(model)) if plan.layout.pp > 1 else ()  # type: ignore[arg-type]
    sharded_axes = ("shard", "tp") if plan.zero >= 2 else ("tp",)
    layout = plan.layout.folded
    group = world.axis_group(layout, ("pp", *sharded_axes))
    norm = GradNorm(
        parameters, layout=layout, sharded_axes=sharded_axes, group=group, device=world.device, copies=copies
    )
    return choose_update(
        norm,
        parameters=parameters,
        clip_norm=job.clip_norm,
        fp16_gain=gain if plan.precision.compute == "fp16" else None,
    )


def _first_check(
    named: list[tuple[str, nn.Parameter]], plan: Plan, world: World, note: Callable[[str], None], sync: GradSync
) -> Callable[[Sequence[Tensor]], None] | None:
    """Return the check of the first backward pass for missing, sparse and unequal gradients.

    Returns None for DDP with a static graph, whose first backward must not be delayed. Communicates to create the
    process groups of the ranks that reduce gradients.
    """
    if plan.communication.static_graph and uses_ddp(plan):
        return None
    group = world.axis_group(plan.layout.folded, ("replicate", "shard"), on_host=True)
    tp_group = world.axis_group(plan.layout, ("tp",), on_host=True)

    def check(losses: Sequence[Tensor]) -> None:
        reject_sparse(named)
        report_missing(without_gradient(named, group, sync.has_gradient), plan, note)
        if tp_group is not None and world.backend != "fake":
            local_names = unequal_gradients(named, tp_group, DTYPES[plan.precision.activations], losses)
            names_by_rank: list[list[str]] = [[]] * world.size
            dist.all_gather_object(names_by_rank, local_names, group=world.host_group)
            reject_unequal(next(filter(None, names_by_rank), []))

    return check


def _relay(split: StageSplit | None, model: nn.Module, mesh_context: MeshContext) -> Relay | None:
    """Return the relay that runs forward passes through pipeline stages; None without pp."""
    if split is None:
        return None
    group: dist.ProcessGroup = mesh_context.axis("pp").get_group()  # type: ignore[union-attr]
    return Relay(stages_of(model), split, group, mesh_context.device)  # type: ignore[arg-type]


def _batch_checks(
    job: Job, model: nn.Module, plan: Plan, context: StepContext, *, relay: Relay | None
) -> tuple[Callable[[StepBatch], None], ...]:
    """Return the checks of the first batches. Communicates to create the group of model-parallel ranks."""
    world = context.source.world
    group = world.axis_group(plan.layout, ("pp", "cp", "tp"), on_host=True)
    if world.backend == "fake":
        return ()
    checks: list[Callable[[StepBatch], None]] = []
    if group is not None:
        checks.append(PeerBatches(group, token_shard(job, plan, world)))
    if plan.layout.cp > 1:
        checks.append(TokenProbe(stages_of(model)[0], job.forward, world.host_group, context.note))
    autocast = Autocast(device_type=world.device.type, dtype=LOWER.get(plan.precision.activations))
    run = (lambda program: program(model)) if relay is None else relay.run
    checks.append(DocumentProbe(ProbedModel(model, job.forward, run, autocast), context))
    return tuple(checks)


def report_missing(missing: dict[int, list[str]], plan: Plan, note: Callable[[str], None]) -> None:
    """Report parameters without a gradient; raise JobError under DDP, whose buckets would wait for these gradients."""
    if not missing:
        return
    listed = "; ".join(f"rank {rank}: {', '.join(names)}" for rank, names in missing.items())
    if uses_ddp(plan) and not plan.communication.find_unused_parameters:
        raise JobError(
            f"parameters received no gradient in the first step ({listed})",
            code="train.unused-parameters",
            fix="freeze them, use them in forward, or pass --set communication.find_unused_parameters=true",
        )
    note(f"parameters without gradient in the first step: {listed}")
