"""Explanations of a search: reasons with numbers, comparisons of plans, and the path through the decision tree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwise.engines.engine import engine_named
from shardwise.layout import Layout
from shardwise.planner.search.capacity import cp_degrees, over_the_host_limit, over_the_limit, too_large
from shardwise.planner.search.choices import LEAST_TOKENS, splits_model
from shardwise.planner.search.search import FAMILY_TIE, STRUCTURE_TIE, TIE, Candidate, Rejected
from shardwise.plans.plan import Plan
from shardwise.runs.console import counted
from shardwise.units import format_gb, format_seconds

if TYPE_CHECKING:
    from shardwise.planner.asked import Asked
    from shardwise.planner.cost.memory import Memory
    from shardwise.planner.model.shape import ModelShape
    from shardwise.planner.search.engine_forms import EngineForm
    from shardwise.planner.search.question import Question
    from shardwise.planner.search.search import Answer


EQUAL = 0.005
"""Relative difference in time below which plans are as fast as each other: it would be reported as 0%."""


@dataclass(frozen=True, kw_only=True)
class Fork:
    """One question of the decision tree, its answer, and the reason with numbers."""

    question: str
    answer: str
    because: str


def cluster_text(answer: Answer) -> str:
    """Return the devices that the plans use, and how many others stay idle."""
    text = answer.question.cluster.describe()
    if not answer.num_idle:
        return text
    stay = "stays" if answer.num_idle == 1 else "stay"
    others = counted(answer.num_idle, "more device")
    return f"{text}; {others} {stay} idle, because the batch does not divide over all"


def reason(answer: Answer, family: str) -> str:
    """Return why a family was not chosen, in one sentence, or "chosen"."""
    entry, best = answer.families[family], answer.best
    if isinstance(entry, Rejected):
        return _rejection(answer, entry)
    if best is None or entry.plan == best.plan:
        return "chosen"
    change = entry.time.seconds / best.time.seconds - 1
    if change < EQUAL:
        return less_simple(change, _model_error(entry, best, change))
    return f"{change:.0%} slower: {_difference(entry, best)}"


def less_simple(change: float, error: str) -> str:
    """Return why a plan that is as fast as the chosen one, or faster by `change` < 0, was not chosen."""
    if change > -EQUAL:
        return "as fast, but less simple"
    return f"{-change:.0%} faster, which is within the model error of {error}, but less simple"


def _model_error(entry: Candidate, best: Candidate, change: float) -> str:
    """Return the relative difference in time below which the simpler plan was chosen."""
    if splits_model(entry.plan) == splits_model(best.plan):
        return f"{FAMILY_TIE:.0%}"
    if change > 1 / (1 + STRUCTURE_TIE) - 1:
        return f"{STRUCTURE_TIE:.0%}"
    return f"{STRUCTURE_TIE:.0%}, and {FAMILY_TIE:.0%} to the next simpler family"


def form_reason(form: EngineForm, chosen: EngineForm | None) -> str:
    """Return why a form of an engine was not chosen, in one sentence, or "chosen"."""
    if form.best is None:
        return form.refusal
    if chosen is None or chosen.best is None or form is chosen:
        return "chosen"
    if form.offloads and not chosen.offloads:
        host = format_gb(form.best.memory.host)
        return f"not needed: {chosen.name} fits without it; {host} on the host for each device"
    change = form.best.time.seconds / chosen.best.time.seconds - 1
    return less_simple(change, f"{FAMILY_TIE:.0%}") if change < EQUAL else f"{change:.0%} slower"


def beside_native(form: EngineForm, answer: Answer) -> str:
    """Return one sentence that compares a form of an engine with the best native plan in time and memory."""
    if answer.best is None:
        return "no native plan fits"
    if form.best is None:
        return form.refusal
    return beside(form.best, answer.best, f"native {answer.best.family}")


def beside(mine: Candidate, other: Candidate, name: str) -> str:
    """Return one sentence that compares two plans in throughput and memory; `name` is the other plan's."""
    change = other.time.samples_per_second / mine.time.samples_per_second - 1
    text = "as fast as"
    if change >= 1:
        text = f"{change + 1:.1f} times as long as"
    elif abs(change) >= TIE:
        text = f"{abs(change):.0%} {'slower' if change > 0 else 'faster'} than"
    return (
        f"{format_seconds(mine.time.seconds)} a step in {format_gb(mine.memory.total)}, {text} {name}"
        f" ({format_seconds(other.time.seconds)}, {format_gb(other.memory.total)})"
    )


def asked_verdict(asked: Asked, answer: Answer) -> str:
    """Return whether the user's own plan can be used, why not, and how it compares with the recommended plan."""
    mine, best = asked.candidate, answer.best
    if mine is None:
        subject = "plan cannot predict it" if asked.code.endswith("-not-predicted") else "train refuses it"
        return f"{subject}: {asked.refusal}"
    if not asked.fits:
        return _too_large(asked, mine, best)
    if best is None:
        return "it fits, although the search found no plan"
    if mine.plan == best.plan:
        return "it is the recommended plan"
    text = f"it takes {beside(mine, best, f'the recommended {best.family}')}"
    change = mine.time.seconds / best.time.seconds - 1
    return f"{text}: {_difference(mine, best)}" if change >= TIE else text


def _too_large(asked: Asked, mine: Candidate, best: Candidate | None) -> str:
    """Return the limit that the user's own plan exceeds, and the --set options with which it fits, if there are any."""
    leaner = asked.leaner
    exceeds = over_the_limit if mine.memory.total > asked.question.capacity else over_the_host_limit
    if not engine_named(asked.plan.engine).uses_fsdp:
        return f"it {exceeds(mine.memory, asked.question)}"
    if leaner is None:
        return f"it {too_large(mine.plan, mine.memory, asked.question)}"
    options = " ".join(f"--set {setting}" for setting in asked.settings)
    fits = f"{format_seconds(leaner.time.seconds)} a step in {format_gb(leaner.memory.total)}"
    if best is not None:
        fits = beside(leaner, best, f"the recommended {best.family}")
    return f"it {exceeds(mine.memory, asked.question)}; with {options} it fits: {fits}"


def _difference(entry: Candidate, best: Candidate) -> str:
    """Return the part of the step that costs a candidate the most time compared with the chosen plan."""
    names = {*entry.time.parts, *best.time.parts}
    per_part = {name: entry.time.parts.get(name, 0.0) - best.time.parts.get(name, 0.0) for name in names}
    worst = max(sorted(per_part), key=lambda name: per_part[name])
    return f"{worst} takes {format_seconds(per_part[worst])} longer"


def _rejection(answer: Answer, entry: Rejected) -> str:
    question, best = answer.question, answer.best
    if entry.reason == "not needed" and best is not None:
        return f"not needed: {best.family} fits without it, in {format_gb(best.memory.total)}"
    if entry.reason == "impossible" or entry.memory is None or entry.plan is None:
        return entry.detail or _impossible(entry.family, question)
    return too_large(entry.plan, entry.memory, question)


def _impossible(family: str, question: Question) -> str:
    """Return why a family has no plan, apart from memory."""
    shape, world = question.model.plain, question.cluster.num_devices
    if world == 1:
        return "sharding requires at least two devices"
    if family in {"hsdp", "3d"} and world < 4:
        return f"{world:,} devices are too few for two kinds of parallelism"
    if family == "cp" and not cp_degrees(question):
        return _unsliced(shape)
    if family in {"tp", "3d"} and not _tensor_degrees(question):
        return _unsplit(shape)
    if family in {"pp", "3d"} and (not shape.stages or shape.num_blocks < 2):
        return "the model has no list of blocks, or uses a module before the blocks that is registered after them"
    return _uneven(question)


def _tensor_degrees(question: Question) -> list[int]:
    inside = question.cluster.devices_per_node
    return [degree for degree in question.model.plain.tp_degrees if degree > 1 and inside % degree == 0]


def _unsplit(shape: ModelShape) -> str:
    """Return why tensor parallelism is not possible."""
    known = ", ".join(str(degree) for degree in shape.tp_degrees if degree > 1)
    if not known:
        return "plan knows no tensor-parallel rules of the model"
    return f"matrices can be split evenly only by {known}"


def _unsliced(shape: ModelShape) -> str:
    """Return why context parallelism is not possible."""
    tokens = shape.tokens_per_sample
    if max(shape.cp_degrees) == 1 or tokens is None:
        return "the model is not known to support context parallelism"
    if tokens < 2 * LEAST_TOKENS:
        return f"samples of {tokens:,} tokens are too short to split in two: a rank needs at least {LEAST_TOKENS:,}"
    known = ", ".join(str(degree) for degree in shape.cp_degrees if degree > 1)
    return f"heads and tokens can be split evenly only by {known}"


def _uneven(question: Question) -> str:
    batch, devices = question.batch_size, question.cluster.num_devices
    if batch < devices:
        return f"a batch of {batch:,} has fewer samples than the {devices:,} devices"
    return f"a batch of {batch:,} samples is not divisible by the data-parallel ranks of {devices:,} devices"


def decision_path(answer: Answer, engine: str = "") -> list[Fork]:
    """Return the path through the guide's decision tree, with the choice by predicted time at its end.

    `engine` is named at its end if plans of another engine are predicted, too.
    """
    question, best, whole = answer.question, answer.best, answer.families["ddp"]
    device = question.cluster.device
    memory = whole.memory or _smallest_replica(question)
    fits = question.has_capacity(memory)
    usable = f"{format_gb(question.capacity)} of {format_gb(device.memory_bytes)}"
    path = [
        Fork(
            question=f"Does the model fit in {'host' if device.kind == 'cpu' else 'GPU'} memory?",
            answer="yes" if fits else "no",
            because=f"each replica needs {format_gb(memory.total)}, and a plan may use {usable}",
        )
    ]
    if whole.memory is None:
        asked = "Can the devices divide the batch evenly?"
        path.append(Fork(question=asked, answer="no", because=reason(answer, "ddp")))
    advised, because = "ddp", "the simplest that usually fits"
    if not fits:
        transformer = any(part.work.attentions for part in question.model.plain.parts)
        known = "it has attention" if transformer else "it has no attention"
        path.append(Fork(question="Is it a transformer?", answer="yes" if transformer else "no", because=known))
        advised = "fsdp or zero3" if transformer else "pipeline or tensor parallel"
    batch, devices = question.batch_size, question.cluster.num_devices
    if whole.memory is None and not fits and batch < devices:
        advised = "fsdp or zero3 combined with tp, pp or cp" if transformer else advised
        because = f"{batch:,} samples occupy all {devices:,} devices only if several devices share a sample"
    elif whole.memory is None:
        advised += f" with a batch that {devices:,} devices divide evenly"
    path.append(Fork(question="The decision tree recommends", answer=advised, because=because))
    if best is not None:
        path += _slicing(answer, best)
        end = f"The predictions recommend for engine {engine}" if engine else "The predictions recommend"
        path.append(Fork(question=end, answer=best.family, because=_verdict(answer, best)))
    return path


def _smallest_replica(question: Question) -> Memory:
    """Return the memory of a replica with a micro-batch of one sample, if the devices cannot divide the batch."""
    layout = Layout(replicate=question.cluster.num_devices)
    return question.memory_of(Plan(layout=layout, recompute="full", precision=question.precision))


def _slicing(answer: Answer, best: Candidate) -> list[Fork]:
    """Return why context parallelism was chosen; empty if it was not."""
    question, cp, tokens = answer.question, best.plan.layout.cp, answer.question.model.plain.tokens_per_sample
    if cp == 1 or tokens is None:
        return []
    whole, devices = answer.families["zero3"].memory, question.cluster.num_devices
    if whole is not None and whole.total > question.capacity:
        because = f"they need {format_gb(whole.total)} unsplit under zero3, and {format_gb(best.memory.total)} split"
    elif question.batch_size < devices:
        because = f"{question.batch_size:,} samples use all {devices:,} devices only if sequences are split"
    else:
        because = "shorter sequences need less recompute"
    return [
        Fork(question="Are sequences split?", answer=f"over {cp} ranks, {tokens // cp:,} tokens each", because=because)
    ]


def _verdict(answer: Answer, best: Candidate) -> str:
    """Return one sentence that compares the chosen plan with the fastest other family, and with ddp if that fits."""
    others = [entry for entry in answer.families.values() if isinstance(entry, Candidate) and entry.plan != best.plan]
    if not others:
        return "there is only one device" if best.plan.layout.world_size == 1 else "no other family can be used"
    near = min(others, key=lambda entry: entry.time.seconds)
    change = near.time.seconds / best.time.seconds - 1
    text = f"{change:.0%} faster than the next family, {near.family}"
    if abs(change) < EQUAL:
        text = f"as fast as {near.family}"
    elif change < 0:
        error = _model_error(near, best, change)
        text = f"{near.family} would be {-change:.0%} faster, within the model error of {error}, but is less simple"
    whole = answer.families["ddp"]
    if isinstance(whole, Candidate) and whole.plan not in (best.plan, near.plan):
        slower = whole.time.seconds / best.time.seconds - 1
        text += f"; ddp is {slower:.0%} slower" if slower >= EQUAL else ""
    return text
