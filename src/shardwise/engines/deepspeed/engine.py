"""DeepSpeed as an engine for torch models, and the plans that it can train.

What DeepSpeed would do otherwise than a plan says is refused, naming the way out. Neither torch nor DeepSpeed is
imported here: plans are checked before any process starts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.engines.deepspeed.config import best_expressible, write_config
from shardwise.engines.deepspeed.from_json import read_json
from shardwise.engines.deepspeed.library import preload_deepspeed, require_deepspeed
from shardwise.engines.engine import Engine
from shardwise.errors import PlanError
from shardwise.planner.search.deepspeed import deepspeed_forms

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from shardwise.dist import World
    from shardwise.engines.deepspeed.from_json import ConfigReading
    from shardwise.job import Job
    from shardwise.planner.search.deepspeed import ZeroForm
    from shardwise.planner.search.search import Question
    from shardwise.plans import Plan
    from shardwise.plans.plan import DType
    from shardwise.training.build import BuildContext
    from shardwise.training.step.step import Step


class DeepSpeedEngine(Engine):
    """Trains torch modules by `deepspeed.initialize`."""

    name = "deepspeed"
    title = "DeepSpeed"
    uses_fsdp = False
    replaces_parameters = True
    trains_adapters = False
    has_keyed_dropout = False
    is_slow_to_start = True
    has_fp64 = False

    def require(self) -> None:
        """Refuse to continue without a DeepSpeed that can be used."""
        require_deepspeed()

    def preload(self) -> None:
        """Import DeepSpeed once, before a fork."""
        preload_deepspeed()

    def check(self, plan: Plan) -> None:
        """Refuse a plan that DeepSpeed would train wrongly or not at all."""
        check_deepspeed(plan)

    def plan_forms(self, question: Question) -> tuple[ZeroForm, ...]:
        """Return the ZeRO stages and offloads that DeepSpeed can train the model with."""
        return deepspeed_forms(question)

    def read_config(
        self, path: Path, *, num_ranks: int | None, batch_size: int | None, precision: DType | None
    ) -> ConfigReading:
        """Return the plan in a JSON file for deepspeed.initialize."""
        return read_json(path, num_ranks=num_ranks, batch_size=batch_size, precision=precision)

    def write_config(self, plans: Sequence[Plan], path: Path, job: Job | None) -> tuple[Plan, list[str]]:
        """Write the first plan that DeepSpeed's JSON can express."""
        plan = best_expressible(plans)
        return plan, write_config(plan, path, job)

    def build(self, job: Job, plan: Plan, world: World, context: BuildContext) -> Step:
        """Make the Step that trains `job` under `plan`; called on every rank, communicates over the world."""
        from shardwise.engines.deepspeed.build import build_deepspeed_step

        return build_deepspeed_step(job, plan, world, context)


_NATIVE = "--set engine=torch"


def check_deepspeed(plan: Plan) -> None:
    """Refuse a plan for engine deepspeed that would train wrongly or not at all."""
    _check_layout(plan)
    _check_precision(plan)
    _check_offload(plan)
    default = type(plan)()
    for name in ("compile", "capture", "fused_loss"):
        if getattr(plan, name) != getattr(default, name):
            raise PlanError(
                f"plan {name} = {getattr(plan, name)!r} is not for engine deepspeed",
                code="support.deepspeed-option",
                fix=_NATIVE,
            )
    for name in ("compression", "find_unused_parameters", "static_graph", "broadcast_buffers", "sync_every"):
        value = getattr(plan.communication, name)
        if value != getattr(default.communication, name):
            raise PlanError(
                f"plan communication.{name} = {value!r} is not for engine deepspeed",
                code="support.deepspeed-option",
                fix=f"leave it at its default, or {_NATIVE}",
            )


def _check_layout(plan: Plan) -> None:
    layout = plan.layout
    for axis in ("pp", "cp", "tp"):
        if getattr(layout, axis) > 1:
            raise PlanError(
                f"plan {layout} uses axis {axis}, and engine deepspeed trains replicas and shards only",
                code="support.deepspeed-axis",
                fix=f"use --plan zero3, or {_NATIVE}",
            )
    if layout.replicate > 1 and layout.shard > 1:
        raise PlanError(
            f"plan {layout} shards within replicas, and engine deepspeed shards over all ranks",
            code="support.deepspeed-partial-sharding",
            fix=f"use --plan zero3, or {_NATIVE}",
        )


def _check_precision(plan: Plan) -> None:
    precision = plan.precision
    if {precision.parameter, precision.optimizer} != {"fp32"}:
        raise PlanError(
            f"engine deepspeed requires parameters and optimizer state in fp32, got {precision}",
            code="support.deepspeed-precision",
            fix=f"set precision.parameter and precision.optimizer to fp32, or {_NATIVE}",
        )
    if "fp64" in (precision.compute, precision.reduce):
        raise PlanError(
            f"plan has {precision}, and DeepSpeed has no fp64",
            code="support.deepspeed-fp64",
            fix=f"use fp32, or {_NATIVE}",
        )
    if precision.compute == "fp16" and plan.zero == 0:
        # 0.19.8 divides gradients by a scale that its backward never multiplied the loss with; only Adam hides it.
        raise PlanError(
            "plan computes in fp16 with zero = 0, where DeepSpeed shrinks gradients by the loss scale",
            code="support.deepspeed-fp16-unsharded",
            fix=f"use --plan zero1, precision bf16, or {_NATIVE}",
        )


def _check_offload(plan: Plan) -> None:
    offload, alone = plan.offload, plan.layout.world_size == 1
    if offload.parameters != "none" and plan.zero != 3 and not alone:
        raise PlanError(
            f"plan offloads parameters with zero = {plan.zero}, which keeps them whole on the device",
            code="support.offload-whole-parameters",
            fix="use --plan zero3, or offload the optimizer only",
        )
    if offload.optimizer != "none" and plan.zero == 0 and not alone:
        raise PlanError(
            "plan offloads the optimizer with zero = 0, which DeepSpeed does not",
            code="support.deepspeed-offload-unsharded",
            fix="use --plan zero1",
        )
    if "nvme" not in (offload.parameters, offload.optimizer):
        return
    if plan.zero != 3:
        raise PlanError(
            f"plan offloads to nvme with zero = {plan.zero}, and DeepSpeed would take the CPU without a word",
            code="support.deepspeed-nvme-stage",
            fix="use --plan zero3 on 2 ranks or more",
        )
    if offload.parameters == "nvme" and plan.precision.compute != "bf16":
        raise PlanError(
            f"plan offloads {plan.precision.compute} parameters to nvme, where DeepSpeed keeps them in bf16",
            code="support.deepspeed-nvme-dtype",
            fix='use precision bf16, or offload.parameters = "cpu"',
        )
    if not offload.folder:
        raise PlanError(
            "plan offloads to nvme and names no folder for it",
            code="plan.nvme-folder-missing",
            fix="--set offload.folder=PATH",
        )


ENGINE = DeepSpeedEngine()
