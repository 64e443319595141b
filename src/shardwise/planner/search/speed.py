"""The speed options of `--plan auto` on GPUs: compilation and a CUDA graph, chosen by the time that they save.

The search compares plans that run eagerly, because compilation changes the order of few of them. This file then adds
what makes the chosen plan faster without changing its results: torch.compile of the model with its loss on one rank,
or of each block on several, and on one rank the capture of the step as a CUDA graph. Compilation takes time at the
start, so a short job stays eager: the seconds saved in all steps must exceed the seconds of compilation.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.utils.data import IterableDataset

from shardwise.data.loaders import dataset_length, dataset_of
from shardwise.errors import ShardwiseError
from shardwise.planner.search.search import refused_by_rule
from shardwise.plans.pipeline import SCHEDULES
from shardwise.training.evaluate import training_length
from shardwise.training.step.captured import sampled_forms

if TYPE_CHECKING:
    from shardwise.job import Job
    from shardwise.planner.search.search import Question
    from shardwise.plans import Plan

COMPILE_S = {"blocks": 15.0, "model": 10.0}
"""Seconds of compilation on an H200 without a cache: of one block and the loss, and of the parts outside of blocks."""
COMPILE_BLOCK_S = 1.2
"""Additional seconds of `compile = model` for each block, which is compiled as often as it occurs."""
LEAST_GAIN = 0.01
"""Fraction of a step below which a predicted gain is within model error."""


class SpeedChoice(NamedTuple):
    """A field of the plan, its value, and the reason for it."""

    field: str
    value: str
    reason: str


def with_speed_options(job: Job, plan: Plan, question: Question) -> Plan:
    """Return the plan with the compilation and capture that make this job faster; sources have the reasons."""
    for choose in (_choose_compile, _choose_capture):
        choice = choose(job, plan, question)
        if choice is not None:
            sources = {**plan.sources, choice.field: choice.reason}
            changes: dict[str, Any] = {choice.field: choice.value}
            plan = dataclasses.replace(plan, sources=sources, **changes)
    return plan


def _choose_compile(job: Job, plan: Plan, question: Question) -> SpeedChoice | None:
    kind = "model" if plan.layout.world_size == 1 else "blocks"
    if SCHEDULES[plan.pipeline.schedule].splits_backward and plan.layout.pp > 1:
        return None
    if has_changing_shapes(job, plan):
        return SpeedChoice("compile", "none", "auto: eager, since the shapes of batches change")
    refusal = refused_by_rule(question, dataclasses.replace(plan, compile=kind))  # type: ignore[arg-type]
    if refusal:
        return SpeedChoice("compile", "none", f"auto: eager, since {refusal}")
    saved_s, gain = _predicted_gain(question, plan, compile=kind)
    if gain < LEAST_GAIN:
        return None
    compile_s = COMPILE_S[kind] + (COMPILE_BLOCK_S * question.model.plain.num_blocks if kind == "model" else 0.0)
    num_steps = count_steps(job)
    if num_steps is not None and num_steps * saved_s < compile_s:
        reason = f"auto: eager, since {num_steps} steps save {num_steps * saved_s:.0f} s of about {compile_s:.0f} s"
        return SpeedChoice("compile", "none", f"{reason} of compilation")
    what = "model and loss in one graph" if kind == "model" else "each block, and the loss"
    reason = f"auto: {what}, {gain:.0%} of a step saved (predicted), about {compile_s:.0f} s of compilation"
    return SpeedChoice("compile", kind, reason)


def _choose_capture(job: Job, plan: Plan, question: Question) -> SpeedChoice | None:
    is_possible = plan.layout.world_size == 1 and plan.offload.optimizer == "none" and job.masks != "keyed"
    if not is_possible or has_changing_shapes(job, plan):
        return None
    if refused_by_rule(question, dataclasses.replace(plan, capture="step")):
        return None
    _, gain = _predicted_gain(question, plan, capture="step")
    if gain < LEAST_GAIN:
        return None
    return SpeedChoice("capture", "step", f"auto: one CUDA graph, {gain:.0%} of a step saved (predicted)")


def _predicted_gain(question: Question, plan: Plan, **changes: Any) -> tuple[float, float]:
    """Return the seconds and the fraction of a step that changed fields save."""
    time = question.time_model()
    changed = dataclasses.replace(plan, **changes)
    before = time.predict(question.model.for_plan(plan), plan).seconds
    after = time.predict(question.model.for_plan(changed), changed).seconds
    return before - after, (before - after) / before


def has_changing_shapes(job: Job, plan: Plan) -> bool:
    """Return whether a few micro-batches, spread over the dataset, differ in shape; False for a stream."""
    return len(set(sampled_forms(job, plan.micro_batch))) > 1


def count_steps(job: Job) -> int | None:
    """Return the number of optimizer steps of a job; None if its dataset cannot be read here."""
    if job.steps is not None:
        return job.steps
    try:
        dataset = dataset_of(job, "train")
        if dataset is None or isinstance(dataset, IterableDataset):
            return None
        steps_per_epoch = -(-dataset_length(dataset) // job.batch_size)
        return training_length(job, dataset, steps_per_epoch).num_steps
    except ShardwiseError:
        return None
