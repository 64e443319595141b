"""The user's own plan: resolved as `train --plan` resolves it, checked by the rules of `train`, and predicted.

A plan file that `shardwise plan --out` wrote names its model and cluster in comments at its top, so that
`shardwise plan PLAN.toml` predicts it again.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwise.engines.engine import engine_named
from shardwise.errors import InputError, MissingExtraError, PlanError
from shardwise.planner.next_step import plan_changes, written
from shardwise.planner.search.choices import PlanVariant, divisors, groups_of_layout, leaner, make_plan
from shardwise.planner.search.search import TIE, Candidate, refused_by_rule
from shardwise.plans.pipeline import check_pipeline
from shardwise.plans.toml import plan_to_toml, read_plan

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from shardwise.planner.model.shape import ModelShape
    from shardwise.planner.search.question import Question
    from shardwise.plans.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The user's own plan with its prediction, or the rule by which `train` refuses it."""

    plan: Plan
    question: Question
    """The model in the precision of the plan, and the cluster."""
    candidate: Candidate | None = None
    """None if the plan is refused."""
    refusal: str = ""
    code: str = ""
    """Code of the error with which `train` would refuse the plan."""
    default: Candidate | None = None
    """The plan with the micro-batch that `train --plan` takes, if that does not fit and another one replaced it."""
    leaner: Candidate | None = None
    """If the plan does not fit: the fastest of its layout, ZeRO stage and precision that does."""
    settings: tuple[str, ...] = ()
    """The --set options that turn the plan into `leaner`."""

    @property
    def fits(self) -> bool:
        """Whether `train` accepts the plan and the devices have the memory that it needs."""
        return self.candidate is not None and self.question.has_capacity(self.candidate.memory)


def predict_asked(plan: Plan, question: Question, *, batch_is_given: bool = True) -> Asked:
    """Return the prediction of a plan, also if it needs more memory than a device has.

    If its micro-batch is a default and does not fit, the fastest micro-batch that fits replaces it.
    """
    try:
        question.accepts(plan)
        check_shape(question.model.plain, plan)
    except MissingExtraError:
        pass  # of this machine, which need not be the cluster
    except InputError as error:
        return Asked(plan=plan, question=question, refusal=str(error), code=error.code)
    asked = Asked(plan=plan, question=question, candidate=_candidate(plan, question))
    if not asked.fits and not batch_is_given:
        asked = _with_micro_batch(asked)
    if asked.fits or not engine_named(plan.engine).uses_fsdp:  # the forms of a plan are those of engine torch
        return asked
    found = _leaner(asked.plan, question)
    settings = () if found is None else tuple(_settings(asked.plan, found.plan))
    return dataclasses.replace(asked, leaner=found, settings=settings)


def _candidate(plan: Plan, question: Question) -> Candidate:
    engine = engine_named(plan.engine)
    memory, time = engine.predict_memory(question, plan), engine.predict_time(question, plan)
    return Candidate(plan=plan, memory=memory, time=time)


def _with_micro_batch(asked: Asked) -> Asked:
    """Return the plan with the fastest micro-batch that fits, or with the one that needs the least memory."""
    plan, question = asked.plan, asked.question
    samples = plan.micro_batch * plan.accumulation
    found = []
    for micro_batch in divisors(samples):
        other = dataclasses.replace(plan, micro_batch=micro_batch, accumulation=samples // micro_batch)
        if micro_batch < plan.micro_batch and not refused_by_rule(question, other):
            found.append(_candidate(other, question))
    fitting = [each for each in found if question.has_capacity(each.memory)]
    if not found:
        return asked
    best = min(fitting, key=lambda each: each.time.seconds, default=found[0])
    return dataclasses.replace(asked, plan=best.plan, candidate=best, default=asked.candidate)


def _leaner(plan: Plan, question: Question) -> Candidate | None:
    """Return the fastest plan that fits with the layout, ZeRO stage, precision and offload of a plan.

    Of plans that are equal within model error, the one with the fewest changed options is returned.
    """
    shape, samples = question.model.plain, plan.micro_batch * plan.accumulation
    variant = PlanVariant(plan.layout.shard, plan.zero, offload=(plan.offload.parameters, plan.offload.optimizer))
    found = []
    for group in groups_of_layout(shape, plan.layout, samples):
        if group.micro_batch > plan.micro_batch or group.split:  # a long list of stages is nothing to type
            continue
        for form in (variant, *leaner(group, variant, offload=False, fuses=shape.head is not None)):
            other = make_plan(plan, group, form._replace(offload=variant.offload))
            if question.has_capacity(question.memory_of(other)) and not refused_by_rule(question, other):
                found.append(_candidate(other, question))
    least = min((each.time.seconds for each in found), default=0.0)
    equal = [each for each in found if each.time.seconds <= (1 + TIE) * least]
    best = min(equal, key=lambda each: (len(_settings(plan, each.plan)), each.time.seconds), default=None)
    return None if best is None else _with_fewest_blocks(best, question)


def _with_fewest_blocks(candidate: Candidate, question: Question) -> Candidate:
    """Return a plan with the smallest number of recomputed blocks that fits, if it does not recompute all."""
    for number in range(candidate.plan.recompute_blocks - 1, 0, -1):
        other = dataclasses.replace(candidate.plan, recompute_blocks=number)
        if not question.has_capacity(question.memory_of(other)):
            break
        candidate = _candidate(other, question)
    return candidate


def _settings(plan: Plan, other: Plan) -> list[str]:
    """Return the --set options that turn a plan into another one of the same layout and batch size."""
    changes = plan_changes(plan, other)
    return [f"{name}={written(value)}" for name, value in changes if name != "accumulation"]


def check_shape(shape: ModelShape, plan: Plan) -> None:
    """Raise PlanError if the degrees of a plan do not divide the heads, widths, tokens or blocks of a model."""
    layout = plan.layout
    if layout.tp > 1 and shape.tp_degrees == (1,):
        raise PlanError(
            f"plan does not describe {shape.name} under tensor parallelism",
            code="plan.tp-not-predicted",
            fix="use tp 1, or pass a job whose model has tensor-parallel rules",
        )
    if layout.tp not in shape.tp_degrees:
        raise PlanError(
            f"tp={layout.tp} does not divide the matrices of {shape.name}",
            code="plan.tp-not-divisible",
            fix=f"use tp {', '.join(map(str, shape.tp_degrees))}",
        )
    if layout.cp > 1 and (layout.cp not in shape.cp_degrees or shape.heads % (layout.cp * layout.tp)):
        valid = [cp for cp in shape.cp_degrees if cp == 1 or shape.heads % (cp * layout.tp) == 0]
        raise PlanError(
            f"cp={layout.cp} does not divide the heads and tokens of {shape.name}",
            code="plan.cp-heads-not-divisible",
            fix=f"use cp {', '.join(map(str, valid))}",
        )
    if layout.pp > 1 and not shape.stages:
        raise PlanError(
            f"{shape.name} has no blocks that pipeline stages could own",
            code="support.pipeline-no-blocks",
            fix="use a plan with pp = 1",
        )
    check_pipeline(plan, shape.num_blocks)
    if plan.fused_loss and shape.head is None:
        raise PlanError(
            f"{shape.name} has no output head that a fused loss could use",
            code="support.fused-loss-no-head",
            fix="set fused_loss = false",
        )
    if not engine_named(plan.engine).is_predicted:
        raise PlanError(
            f"the plan has engine {plan.engine}, which plan does not predict",
            code="plan.engine-not-predicted",
            fix="remove engine from the plan",
        )


# The comments of a plan file that name its model and cluster.


HEADER = ("model", "cluster", "length", "lora")
"""Options of `plan` that a plan file does not contain, but that its prediction depends on."""


def to_plan_file(plan: Plan, origin: Mapping[str, object]) -> str:
    """Return a plan as TOML; comments at its top name the options in HEADER that are not None."""
    lines = [f"# {name} = {origin[name]}\n" for name in HEADER if origin.get(name) is not None]
    return "".join(lines) + plan_to_toml(plan)


def read_header(path: Path) -> dict[str, str]:
    """Return the options that the comments of a plan file name."""
    read_plan(path)  # raises PlanError if it is not a plan
    found = re.findall(r"^# (\w+) = (.+)$", path.read_text(), re.MULTILINE)
    return {name: value.strip() for name, value in found if name in HEADER}
