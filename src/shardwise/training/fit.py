"""Whether a plan fits a job and a world, or a training loop of the user's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.errors import PlanError
from shardwise.parallel.parameter_rules import check_parameters
from shardwise.parallel.sharded import check_sharded
from shardwise.parallel.support import require_supported, uses_ddp
from shardwise.training.preflight import check_job

if TYPE_CHECKING:
    from torch import nn

    from shardwise.dist import World
    from shardwise.job import Job
    from shardwise.plans import Plan


def check_fit(job: Job, plan: Plan, world: World) -> None:
    """Refuse a plan that cannot be applied, or is for another world or another batch."""
    require_supported(plan)
    if plan.layout.pp > 1 and world.backend == "gloo" and world.device.type == "cuda":
        raise PlanError(
            f"plan {plan.layout} has stages on GPUs, and gloo sends no GPU tensors",
            code="support.pipeline-gloo-gpu",
            fix="use --backend nccl",
        )
    if plan.engine == "mlx" and world.device.type != "cpu":
        raise PlanError(
            f"the world is on {world.device.type}, and engine mlx takes its samples from the host",
            code="support.mlx-device",
            fix="use sw.world(device='cpu')",
        )
    if plan.layout.world_size != world.size:
        raise PlanError(
            f"plan {plan.layout} is for {plan.layout.world_size} ranks, the world has {world.size}",
            code="plan.world-size-mismatch",
            fix=f"use plan.refit({world.size})",
        )
    if plan.batch_size != job.batch_size:
        raise PlanError(
            f"the plan trains {plan.micro_batch} x {plan.accumulation} x {plan.layout.dp} = {plan.batch_size} samples"
            f" a step, the job asks for {job.batch_size}",
            code="plan.batch-size-mismatch",
            fix=f"use Plan.preset(name, {world.size}, batch_size={job.batch_size})",
        )
    check_job(job, plan)


def check_own_loop(model: nn.Module, plan: Plan) -> None:
    """Refuse a plan that needs more than a model."""
    require_supported(plan)
    if plan.layout.pp > 1:
        raise PlanError(
            f"plan {plan.layout} has stages, which a loop of your own cannot run",
            code="support.own-loop-pipeline",
            fix="use build_step",
        )
    if plan.layout.cp > 1:
        raise PlanError(
            f"plan {plan.layout} cuts sequences, which a loop of your own reads",
            code="support.own-loop-cp",
            fix="use build_step",
        )
    if plan.zero == 1 or plan.offload.optimizer != "none":
        raise PlanError(
            "the plan cuts the optimizer, which your own loop makes",
            code="support.own-loop-zero1",
            fix="use build_step, or zero2",
        )
    if plan.layout.dp > 1 and plan.zero < 2 and not uses_ddp(plan):
        raise PlanError(
            f"plan {plan.layout} has replicas of split weights, whose gradients a step sums, not a loop of your own",
            code="support.own-loop-split-replicas",
            fix=f"use build_step, or shard{plan.layout.dp}.tp{plan.layout.tp}",
        )
    if plan.communication.sync_every > 1:
        raise PlanError(
            "the plan syncs after steps of an optimizer, which your own loop makes",
            code="support.own-loop-sync-every",
            fix="use build_step",
        )
    if plan.capture == "step":
        raise PlanError(
            "the plan captures the step, which your own loop makes",
            code="support.own-loop-capture",
            fix="use build_step",
        )
    check_parameters(model, plan)
    check_sharded(model, plan, by_step=False)
