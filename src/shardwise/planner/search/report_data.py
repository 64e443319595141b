"""The content of a report of `plan`, and its form as data for JSON."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardwise.planner.search.advice import capture_gain, compile_gain, rounds_gain
from shardwise.planner.search.engine_forms import choose_form
from shardwise.planner.search.explain import asked_verdict, decision_path, form_reason, reason
from shardwise.planner.search.question import FILL
from shardwise.planner.search.search import Candidate
from shardwise.plans.plan import Plan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.planner.asked import Asked
    from shardwise.planner.cost.memory import Memory
    from shardwise.planner.cost.time import Time
    from shardwise.planner.next_step import Budget
    from shardwise.planner.search.advice import Hint
    from shardwise.planner.search.engine_forms import EngineForm
    from shardwise.planner.search.search import Answer, Rejected
    from shardwise.planner.search.subject import Subject


@dataclass(frozen=True, kw_only=True)
class ReportContent:
    """What a report shows: the result of the search, the user's own plan, hints, costs and the next command."""

    answer: Answer
    subject: Subject
    forms: Sequence[EngineForm] = ()
    """Plans of another engine, if the spec names one."""
    asked: Asked | None = None
    sizes: Sequence[Answer] = ()
    """Results for other numbers of devices."""
    hints: Sequence[Hint] = ()
    budget: Budget | None = None
    next_command: str = ""
    every: bool = False
    """Whether to show all predicted plans."""


def to_data(shown: ReportContent) -> dict[str, Any]:
    """Return a report as plain data in bytes and seconds; keys of parts that it does not have are absent."""
    data = answer_data(shown.answer, shown.forms, every=shown.every)
    data["hints"] = [dataclasses.asdict(hint) for hint in shown.hints]
    data["next"] = shown.next_command
    if shown.asked is not None:
        data["asked"] = _asked(shown.asked, shown.answer)
    if shown.budget is not None:
        data["budget"] = shown.budget.to_data()
    if shown.sizes:
        data["sizes"] = {_size(answer): answer.best and _candidate(answer.best) for answer in shown.sizes}
    return data


def _size(answer: Answer) -> str:
    return str(answer.question.cluster.num_devices)


def _asked(asked: Asked, answer: Answer) -> dict[str, Any]:
    data: dict[str, Any] = {"fits": asked.fits, "verdict": asked_verdict(asked, answer), "code": asked.code}
    return data | (_candidate(asked.candidate) if asked.candidate is not None else {"plan": _plan(asked.plan)})


def answer_data(answer: Answer, forms: Sequence[EngineForm] = (), *, every: bool = False) -> dict[str, Any]:
    """Return the result as plain data in bytes and seconds; `every` adds all predicted plans.

    `forms` are the plans of another engine, if the spec names one.
    """
    question = answer.question
    device = question.cluster.device
    shape = question.model.plain
    data: dict[str, Any] = {
        "model": {"name": shape.name, "parameters": shape.numel, "source": shape.source},
        "tokens_per_sample": shape.tokens_per_sample,
        "batch_size": question.batch_size,
        "cluster": {
            "description": question.cluster.describe(),
            "devices": question.cluster.num_devices,
            "idle_devices": answer.num_idle,
            "nodes": question.cluster.num_nodes,
            "memory_bytes": device.memory_bytes,
            "fill": FILL,
            "source": device.source,
        },
        "best": answer.best and _candidate(answer.best),
        "families": {family: _entry(answer, family, entry) for family, entry in answer.families.items()},
        "path": [dataclasses.asdict(fork) for fork in decision_path(answer)],
        "compile_gain": compile_gain(answer),
        "capture_gain": capture_gain(answer),
        "rounds_gain": rounds_gain(answer),
        "plans_considered": answer.num_plans,
        "plans_predicted": len(answer.candidates),
    }
    if every:
        data["candidates"] = [_candidate(candidate) for candidate in answer.candidates]
    if forms:
        chosen = choose_form(forms)
        data["deepspeed"] = {form.name: _form(form, chosen) for form in forms}
        data["chosen"] = chosen and chosen.best and _candidate(chosen.best)  # "best" is of engine torch
    return data


def _form(form: EngineForm, chosen: EngineForm | None) -> dict[str, Any]:
    data: dict[str, Any] = {"fits": form.best is not None, "reason": form_reason(form, chosen)}
    if form.best is not None:
        data |= _candidate(form.best)
        del data["family"]
    elif form.memory:
        data["memory"] = _memory(form.memory)
    return data


def _entry(answer: Answer, family: str, entry: Candidate | Rejected) -> dict[str, Any]:
    data: dict[str, Any] = {"fits": isinstance(entry, Candidate), "reason": reason(answer, family)}
    if isinstance(entry, Candidate):
        return data | _candidate(entry)
    if entry.plan:
        data["plan"] = _plan(entry.plan)
    if entry.memory:
        data["memory"] = _memory(entry.memory)
    return data


def _candidate(candidate: Candidate) -> dict[str, Any]:
    return {
        "family": candidate.family,
        "plan": _plan(candidate.plan),
        "memory": _memory(candidate.memory),
        "time": _time(candidate.time),
    }


def _plan(plan: Plan) -> dict[str, Any]:
    data: dict[str, Any] = {
        "layout": str(plan.layout),
        "zero": plan.zero,
        "micro_batch": plan.micro_batch,
        "accumulation": plan.accumulation,
        "recompute": plan.recompute,
        "recompute_blocks": plan.recompute_blocks,
        "gradient_sync": plan.gradient_sync,
        "sequence_parallel": plan.sequence_parallel,
        "fused_loss": plan.fused_loss,
        "schedule": plan.pipeline.schedule if plan.layout.pp > 1 else None,
        "split": list(plan.pipeline.split),
        "offload": {"parameters": plan.offload.parameters, "optimizer": plan.offload.optimizer},
        "compute": plan.precision.compute,
    }
    if plan.compile != "none":
        data["compile"] = plan.compile
    if plan.engine != Plan.engine:
        data["engine"] = plan.engine
    return data


def _memory(memory: Memory) -> dict[str, Any]:
    return {
        "total_bytes": memory.total,
        "allocated_bytes": memory.peak,
        "reserved_bytes": memory.reserved,
        "outside_bytes": memory.outside,
        "host_bytes": memory.host,
        "phase": memory.phase,
        "stage": memory.stage,
        "at_peak_bytes": dict(memory.at_peak),
    }


def _time(time: Time) -> dict[str, Any]:
    return {
        "step_s": time.seconds,
        "parts_s": dict(time.parts),
        "uncertainty": time.uncertainty,
        "interval_s": [time.low_s, time.high_s],
        "interval_from": time.interval_from,
        "samples_per_s": time.samples_per_second,
        "tokens_per_s_per_device": time.tokens_per_second_per_device,
        "mfu": time.mfu,
        "basis": dict(time.basis),
    }
