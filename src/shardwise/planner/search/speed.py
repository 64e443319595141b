"""The speed options of `--plan auto` on GPUs: compilation and a CUDA graph, chosen by the time that they save.

The search compares eager plans. This file adds what makes the chosen plan faster with the same results: torch.compile
of the model with its loss on one rank, or of each block on several, and on one rank the capture of the step as a CUDA
graph. A short job stays eager: the seconds saved in all steps must exceed the seconds of compilation. The first part
decides by predictions, the second by the measurements of a race (`race.py`), for long jobs.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset

from shardwise.data.corpus import Corpus
from shardwise.data.loaders import dataset_length, dataset_of
from shardwise.job.optimizers import Muon
from shardwise.planner.search.choices import SPEED_OPTIONS, divisors
from shardwise.planner.search.search import refused_by_rule, search
from shardwise.plans.pipeline import SCHEDULES
from shardwise.plans.rules import is_exact_in_graph
from shardwise.training.loading import training_length
from shardwise.training.step.captured import sampled_forms
from shardwise.units import format_gb

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.job import Job
    from shardwise.planner.search.question import Question
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
    fixed = question.fixed
    given: dict[str, Any] = {name: getattr(fixed.plan, name) for name in ("compile", "capture") if fixed.has(name)}
    plan = dataclasses.replace(plan, **given)
    if "compile" not in given:
        if len(set(sampled_forms(job, plan.micro_batch))) > 1:
            return _with(plan, "compile", "none", "eager, since the shapes of batches change")
        plan = _with(plan, "compile", *_choose_compile(job, plan, question))
    if "capture" in given or not is_capturable(job, plan, question):
        return plan
    if refused_by_rule(question, dataclasses.replace(plan, capture="step")):
        return plan
    _, gain = _predicted_gain(question, plan, capture="step")
    return _with(plan, "capture", "step", f"one CUDA graph, {gain:.0%} of a step saved (predicted)")


def best_with_speed_options(job: Job, question: Question, eager: Plan) -> Plan:
    """Return the best plan of a search with its speed options; if these compile it, plans are compared compiled.

    Compilation speeds up memory-bound operators, so that a simpler plan may be within model error of the fastest one.
    """
    plan = with_speed_options(job, eager, question)
    if plan.compile == "none" or question.fixed.has("compile"):
        return plan
    compiled = search(dataclasses.replace(question, compile="blocks")).best
    if compiled is None:
        return plan
    other = with_speed_options(job, dataclasses.replace(compiled.plan, compile="none"), question)
    return plan if other.compile == "none" else other


def is_capturable(job: Job, plan: Plan, question: Question) -> bool:
    """Return whether a step may be captured: one GPU, no offload, no fp64, drawn dropout masks, enough memory."""
    if plan.layout.world_size > 1 or plan.offload.optimizer != "none" or job.masks == "keyed":
        return False
    if not is_exact_in_graph(plan):
        return False
    if question.cluster.device.kind == "cpu" or isinstance(job.optimizer, Muon):  # Muon has no fused kernel
        return False
    return question.memory_of(plan).total <= CAPTURED_SHARE * question.capacity


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


def gains_of_memory_options(question: Question, plan: Plan) -> dict[str, str]:
    """Return what recompute, a fused loss and the micro-batch gain, each compared with another value in the plan."""
    recompute = "selective" if plan.recompute == "none" else "none"
    found = {
        "recompute": _gain_over(question, plan, "recompute", recompute, recompute_blocks=0),
    }
    head = question.model.plain.head
    if plan.fused_loss or (head is not None and head.rows > 1):  # images have few logits
        found["fused_loss"] = _gain_over(question, plan, "fused_loss", not plan.fused_loss)
    sizes = divisors(plan.micro_batch * plan.accumulation)
    if len(sizes) > 1:
        place = sizes.index(plan.micro_batch)
        # The larger one saves time if it fits; the largest one is compared with the next smaller one.
        other = sizes[place + 1] if place + 1 < len(sizes) else sizes[place - 1]
        accumulation = plan.micro_batch * plan.accumulation // other
        found["micro_batch"] = _gain_over(question, plan, "micro_batch", other, accumulation=accumulation)
        found["accumulation"] = found["micro_batch"]
    return found


def _gain_over(question: Question, plan: Plan, name: str, value: Any, **more: Any) -> str:
    """Return the predicted speed of a plan in multiples of the same plan with another value, or why that is refused."""
    changes: dict[str, Any] = {name: value, **more}
    other = dataclasses.replace(plan, **changes)
    shown = f"{name} = {str(value).lower()}"
    refusal = refused_by_rule(question, other)
    if refusal:
        return f"auto: {shown} is not supported, since {refusal}"
    needed = question.memory_of(other)
    if not question.has_capacity(needed):
        device = format_gb(question.cluster.device.memory_bytes)
        return f"auto: {shown} would need {format_gb(needed.total)} of {device} (predicted)"
    _, lost = _predicted_gain(question, plan, **changes)
    ratio = 1 - lost  # seconds with the other value, in multiples of those of the plan
    if abs(ratio - 1) < LEAST_GAIN:
        return f"auto: as fast as {shown} (predicted)"
    return f"auto: {ratio:.2f}x the speed of {shown} (predicted)"


def count_steps(job: Job) -> int | None:
    """Return the number of optimizer steps of a job; None for a stream without Job.steps."""
    if job.steps is not None:
        return job.steps
    dataset = dataset_of(job, "train")
    if isinstance(dataset, Corpus):
        return training_length(job, dataset, None).num_steps
    if dataset is None or isinstance(dataset, IterableDataset):
        return None
    return training_length(job, dataset, -(-dataset_length(dataset) // job.batch_size)).num_steps


# The choice by measured steps, and its explanation for the start report.


TIE = 0.01
"""Relative difference of measured steps below which the predicted plan, else the simpler one, is chosen."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A candidate with its measured step and compilation."""

    plan: Plan
    step_s: float = 0.0
    """Measured compute, and the predicted communication of the layout."""
    compile_s: float = 0.0
    error: str = ""
    failed_capture: bool = False
    """Whether the candidate had a CUDA graph that its step does not support, so that it was measured without one."""

    def cost(self, num_steps: int | None) -> float:
        """Return the seconds of a step, with its share of the compilation if the number of steps is known."""
        return self.step_s + (self.compile_s / num_steps if num_steps else 0.0)


def decide(measured: Sequence[Measured], num_steps: int | None, predicted: Plan | None = None) -> Measured | None:
    """Return the fastest plan, or within TIE of it the predicted plan, else the one with the fewest options.

    Compilation counts: it must save more seconds in `num_steps` steps than it takes. None if no plan was measured.
    """
    usable = [each for each in measured if not each.error]
    if not usable:
        return None
    limit = min(each.cost(num_steps) for each in usable) * (1 + TIE)
    close = [each for each in usable if each.cost(num_steps) <= limit]
    for each in close:
        # Two truncated models measure a CUDA graph's gain of 1 to 2 % as less: what was predicted stays.
        if each.plan == predicted:
            return each
    return min(close, key=lambda each: (_num_options(each.plan), each.cost(num_steps)))


def _num_options(plan: Plan) -> int:
    """Return how many options of speed a plan uses; more accumulation steps than one count as one option."""
    flags = (plan.compile != "none", plan.capture != "none", plan.fused_loss, plan.recompute != "none")
    return sum(flags) + (plan.accumulation > 1)


def explain_choice(best: Measured, measured: Sequence[Measured], plan: Plan) -> Plan:
    """Return the chosen plan with the measured gain of each option in `sources`; `plan` is the predicted plan."""
    usable = [each for each in measured if not each.error]
    sources = dict(plan.sources)
    for name in SPEED_OPTIONS:
        value, before = getattr(best.plan, name), getattr(plan, name)
        other = _OFF.get(name, before)  # the value with which the measured time is compared
        if value == other:
            other = before
        if value == other:
            continue
        text = _gain(best, name, [each for each in usable if getattr(each.plan, name) == other])
        if name == "capture" and best.failed_capture:
            text = "the step of this plan could not be captured as a CUDA graph (measured)"
        if name == "compile":
            text = f"{_COMPILED[value]}, {text}"
        if name == "compile" and value != "none":
            text += f", {best.compile_s:.0f} s of compilation"
        sources[name] = f"auto: {text}"
    return dataclasses.replace(best.plan, sources=sources)


_OFF = {"compile": "none", "capture": "none", "fused_loss": False}
_COMPILED = {"none": "eager", "blocks": "each block, and the loss", "model": "model and loss in one graph"}
_TOGETHER = {"micro_batch", "accumulation"}
"""Options of which one follows from the other."""


def _gain(best: Measured, name: str, others: Sequence[Measured]) -> str:
    """Return the part of a step that an option saves, compared with the plan that is otherwise the most similar."""
    if not others:
        return "part of the fastest measured plan"
    near = min(others, key=lambda each: (len(differing(each.plan, best.plan)), each.step_s))
    gain = 1 - best.step_s / near.step_s
    also = differing(near.plan, best.plan) - {name} - (_TOGETHER if name in _TOGETHER else set())
    together = f" together with {' and '.join(sorted(also))}" if also else ""
    if gain < -TIE:
        return "since compilation would take longer than it saves (measured)"
    if gain < TIE:
        return f"as fast as the other value{together} (measured), and simpler"
    return f"{gain:.0%} of a step saved{together} (measured)"


def differing(one: Plan, other: Plan) -> set[str]:
    """Return the options of speed in which two plans differ."""
    return {name for name in SPEED_OPTIONS if getattr(one, name) != getattr(other, name)}
