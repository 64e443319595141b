"""The speed options of `--plan auto` on GPUs: compilation and a CUDA graph, chosen by the time that they save.

The search compares eager plans. This file adds what makes the chosen plan faster with the same results: torch.compile
of the model with its loss on one rank, or of each block on several, and on one rank the capture of the step as a CUDA
graph. A short job stays eager: the seconds saved in all steps must exceed the seconds of compilation.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset

from shardwise.data.loaders import dataset_length, dataset_of
from shardwise.job.optimizers import Muon
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
CAPTURED_SHARE = 0.5
"""Largest fraction of the device's memory of a captured plan, whose graph and evaluation do not share activations."""
LEAST_GAIN = 0.01
"""Fraction of a step below which a predicted gain is within model error."""


def with_speed_options(job: Job, plan: Plan, question: Question) -> Plan:
    """Return the plan with the compilation and capture that make this job faster; `sources` has the reasons."""
    if len(set(sampled_forms(job, plan.micro_batch))) > 1:
        return _with(plan, "compile", "none", "eager, since the shapes of batches change")
    plan = _with(plan, "compile", *_choose_compile(job, plan, question))
    is_capturable = plan.layout.world_size == 1 and plan.offload.optimizer == "none" and job.masks != "keyed"
    is_capturable = is_capturable and not isinstance(job.optimizer, Muon)  # it has no fused kernel
    if not is_capturable or refused_by_rule(question, dataclasses.replace(plan, capture="step")):
        return plan
    if question.memory_of(plan).total > CAPTURED_SHARE * question.capacity:
        return plan
    _, gain = _predicted_gain(question, plan, capture="step")
    return _with(plan, "capture", "step", f"one CUDA graph, {gain:.0%} of a step saved (predicted)")


def _with(plan: Plan, field: str, value: str, reason: str) -> Plan:
    changes: dict[str, Any] = {field: value, "sources": {**plan.sources, field: f"auto: {reason}"}}
    return dataclasses.replace(plan, **changes)


def _choose_compile(job: Job, plan: Plan, question: Question) -> tuple[str, str]:
    """Return the value of `compile` and the reason."""
    # A fused loss runs kernels of its own behind the model, so one graph would have nothing to fuse with the blocks.
    kind: Any = "model" if plan.layout.world_size == 1 and not plan.fused_loss else "blocks"
    refusal = refused_by_rule(question, dataclasses.replace(plan, compile=kind))
    if plan.layout.pp > 1 and SCHEDULES[plan.pipeline.schedule].splits_backward:
        refusal = f"schedule {plan.pipeline.schedule} splits backward passes"
    if refusal:
        return "none", f"eager, since {refusal}"
    saved_s, gain = _predicted_gain(question, plan, compile=kind)
    if gain < LEAST_GAIN:
        return "none", "eager, since compilation saves less than model error"
    compile_s = COMPILE_S[kind] + (COMPILE_BLOCK_S * question.model.plain.num_blocks if kind == "model" else 0.0)
    num_steps = count_steps(job)
    if num_steps is not None and num_steps * saved_s < compile_s:
        saving = f"{num_steps} steps save {num_steps * saved_s:.0f} s"
        return "none", f"eager, since {saving}, less than about {compile_s:.0f} s of compilation"
    what = "model and loss in one graph" if kind == "model" else "each block, and the loss"
    return kind, f"{what}, {gain:.0%} of a step saved (predicted), about {compile_s:.0f} s of compilation"


def _predicted_gain(question: Question, plan: Plan, **changes: Any) -> tuple[float, float]:
    """Return the seconds and the fraction of a step that changed fields save."""
    time, changed = question.time_model(), dataclasses.replace(plan, **changes)
    before = time.predict(question.model.for_plan(plan), plan).seconds
    saved = before - time.predict(question.model.for_plan(changed), changed).seconds
    return saved, saved / before


def count_steps(job: Job) -> int | None:
    """Return the number of optimizer steps of a job; None for a stream without Job.steps."""
    if job.steps is not None:
        return job.steps
    dataset = dataset_of(job, "train")
    if dataset is None or isinstance(dataset, IterableDataset):
        return None
    return training_length(job, dataset, -(-dataset_length(dataset) // job.batch_size)).num_steps
