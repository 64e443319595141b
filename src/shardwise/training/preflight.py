"""Preflight: what a plan asks of the job's own model, checked before any process starts.

One set of rules: search proposes a plan only if it passes them, and `train` applies them again to the plan it is given.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from shardwise.data.tokens import check_token_loss
from shardwise.errors import JobError, PlanError
from shardwise.parallel.adapters import add_adapters
from shardwise.parallel.blueprint import structure
from shardwise.parallel.context_rules import check_context
from shardwise.parallel.fused_loss import find_head
from shardwise.parallel.held_dtypes import check_dtypes
from shardwise.parallel.parameter_rules import check_parameters
from shardwise.parallel.stage_plan import check_pipeline, cut_layers
from shardwise.parallel.stages import check_stages, count_layers, find_layers
from shardwise.parallel.support import require_supported
from shardwise.parallel.tensor_rules import check_tensor, find_rules
from shardwise.training.optimizer_trial import try_on_shards
from shardwise.training.step.captured import check_shapes

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from shardwise.job import Job
    from shardwise.parallel.skeleton import Skeleton
    from shardwise.plans import Plan


class ModelRules:
    """Refuses plans that cannot train one job; builds its model once, on the meta device, when a plan needs a look."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._tried: dict[bool, JobError | None] = {}
        """What the trial of the optimizer on shards refused, by whether tensor parallelism splits them."""

    def __call__(self, plan: Plan) -> None:
        """Raise PlanError or JobError for a plan that cannot split this model: heads, layers, ties; or train this job.

        Reads the job's data only for plans that capture the step.
        """
        require_supported(plan)
        check_job(self._job, plan)
        if plan.capture == "step":
            check_shapes(self._job, plan)
        if _looks_at_model(self._job, plan):
            self._check_model(plan)

    def _check_model(self, plan: Plan) -> None:
        job, layout = self._job, plan.layout
        if plan.precision.parameter != "fp64":  # there the whole model is made fp64
            check_dtypes(self._module, plan, adapted=job.lora is not None)
        check_parameters(self._module, plan, self._skeleton.references)
        if plan.fused_loss:
            find_head(self._module)
        if layout.cp > 1:
            check_context(self._module, layout, own_loss=not job.loss.by_row)
        if layout.tp > 1:
            rules = find_rules(self._module, job.tensor_rules)
            check_tensor(self._module, layout.tp, rules, sequence=plan.sequence_parallel)
            self._try_optimizer(by_tensor=True, trial=lambda: try_on_shards(job.optimizer, self._module, rules))
        if plan.zero and plan.engine == "torch":
            self._try_optimizer(by_tensor=False, trial=lambda: try_on_shards(job.optimizer, self._module))
        if layout.pp > 1:
            layers = find_layers(self._module, job.layers)
            num_layers = count_layers(self._module, layers)
            check_pipeline(plan, num_layers)
            check_stages(self._module, cut_layers(plan, num_layers), layers)

    def _try_optimizer(self, *, by_tensor: bool, trial: Callable[[], None]) -> None:
        """Raise what the trial of the optimizer raises; it is made once for all plans."""
        if by_tensor not in self._tried:
            try:
                trial()
                self._tried[by_tensor] = None
            except JobError as error:
                self._tried[by_tensor] = error
        refusal = self._tried[by_tensor]
        if refusal is not None:
            raise refusal

    @cached_property
    def _skeleton(self) -> Skeleton:
        found = structure(self._job.model, self._job.seed)
        if self._job.lora is not None:
            add_adapters(found.module, self._job.lora)
        return found

    @property
    def _module(self) -> nn.Module:
        return self._skeleton.module


def check_model(job: Job, plan: Plan) -> None:
    """Refuse a plan that cannot train this job; see ModelRules."""
    ModelRules(job)(plan)


def check_job(job: Job, plan: Plan) -> None:
    """Refuse a plan whose engine or options cannot do what the job asks for; looks at neither model nor data."""
    if plan.layout.cp > 1:
        check_token_loss(job)
    if job.lora is not None and plan.engine != "torch":
        raise PlanError(
            f"engine {plan.engine} trains no adapters here",
            code="support.lora-engine",
            fix="use --set engine=torch, or leave Job.lora out",
        )
    if job.masks == "keyed" and (plan.engine != "torch" or plan.compile != "none"):
        raise PlanError(
            f"masks are keyed, and engine {plan.engine} with compile = {plan.compile} draws its own",
            code="support.keyed-masks-engine",
            fix="use --set engine=torch --set compile=none, or --set masks=drawn",
        )


def _looks_at_model(job: Job, plan: Plan) -> bool:
    layout = plan.layout
    if plan.engine == "torch" and (plan.zero or plan.offload.optimizer != "none"):
        return True  # they replace parameters
    return layout.tp > 1 or layout.pp > 1 or layout.cp > 1 or plan.fused_loss or job.lora is not None
