"""Preflight: what a plan asks of the job's own model, looked at before any process starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.data.tokens import check_token_loss
from shardwise.parallel.adapters import add_adapters
from shardwise.parallel.blueprint import structure
from shardwise.parallel.context_rules import check_context
from shardwise.parallel.fused_loss import find_head
from shardwise.parallel.stage_plan import check_pipeline, cut_layers
from shardwise.parallel.stages import check_stages, count_layers, find_layers
from shardwise.parallel.support import require_supported
from shardwise.parallel.tensor_rules import check_tensor, find_rules
from shardwise.step.captured import check_shapes

if TYPE_CHECKING:
    from shardwise.job import Job
    from shardwise.plan import Plan


def check_model(job: Job, plan: Plan) -> None:
    """Refuse a plan that cannot cut this job's model: heads, widths, layers, shared parameters; and adapters of none.

    Builds the model without memory for its parameters, and only for plans that look at it.
    """
    require_supported(plan)
    if plan.capture == "step":
        check_shapes(job, plan)
    if plan.layout.tp == plan.layout.pp == plan.layout.cp == 1 and job.lora is None and not plan.fused_loss:
        return
    module = structure(job.model, job.seed)[0]
    if job.lora is not None:
        add_adapters(module, job.lora)
    if plan.fused_loss:
        find_head(module)
    if plan.layout.cp > 1:
        check_token_loss(job)
        check_context(module, plan.layout, own_loss=not job.loss.by_row)
    if plan.layout.tp > 1:
        rules = find_rules(module, job.tensor_rules)
        check_tensor(module, plan.layout.tp, rules, sequence=plan.sequence_parallel)
    if plan.layout.pp > 1:
        layers = find_layers(module, job.layers)
        num_layers = count_layers(module, layers)
        check_pipeline(plan, num_layers)
        check_stages(module, cut_layers(plan, num_layers), layers)
