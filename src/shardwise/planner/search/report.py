"""An answer as plain data, for JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardwise.planner.search.deepspeed import choose_form, form_reason
from shardwise.planner.search.explain import decision_path, reason
from shardwise.planner.search.gains import capture_gain, compile_gain, rounds_gain
from shardwise.planner.search.search import FILL, Candidate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.planner.cost.memory import Memory
    from shardwise.planner.cost.time import Time
    from shardwise.planner.search.deepspeed import Form
    from shardwise.planner.search.search import Answer, Rejected
    from shardwise.plans.plan import Plan


def answer_data(answer: Answer, forms: Sequence[Form] = (), *, every: bool = False) -> dict[str, Any]:
    """Return all that was found, in bytes and seconds; `every` adds each plan that was predicted.

    `forms` are DeepSpeed's, where that engine was asked for.
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
            "nodes": question.cluster.num_nodes,
            "memory_bytes": device.memory_bytes,
            "fill": FILL,
            "source": device.source,
        },
        "best": answer.best and _candidate(answer.best),
        "families": {family: _entry(answer, family, entry) for family, entry in answer.families.items()},
        "path": [
            {"question": fork.question, "answer": fork.answer, "because": fork.because}
            for fork in decision_path(answer)
        ],
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
    return data


def _form(form: Form, chosen: Form | None) -> dict[str, Any]:
    words = {"fits": form.best is not None, "reason": form_reason(form, chosen)}
    if form.best is not None:
        return words | {name: part for name, part in _candidate(form.best).items() if name != "family"}
    return words | ({"memory": _memory(form.memory)} if form.memory else {})


def _entry(answer: Answer, family: str, entry: Candidate | Rejected) -> dict[str, Any]:
    words = {"reason": reason(answer, family)}
    if isinstance(entry, Candidate):
        return {"fits": True, **words, **_candidate(entry)}
    needs = {"plan": _plan(entry.plan)} if entry.plan else {}
    return {"fits": False, **words, **needs, **({"memory": _memory(entry.memory)} if entry.memory else {})}


def _candidate(candidate: Candidate) -> dict[str, Any]:
    return {
        "family": candidate.family,
        "plan": _plan(candidate.plan),
        "memory": _memory(candidate.memory),
        "time": _time(candidate.time),
    }


def _plan(plan: Plan) -> dict[str, Any]:
    return {
        "layout": str(plan.layout),
        "zero": plan.zero,
        "micro_batch": plan.micro_batch,
        "accumulation": plan.accumulation,
        "recompute": plan.recompute,
        "gradient_sync": plan.gradient_sync,
        "sequence_parallel": plan.sequence_parallel,
        "fused_loss": plan.fused_loss,
        "schedule": plan.pipeline.schedule if plan.layout.pp > 1 else None,
        "offload": {"parameters": plan.offload.parameters, "optimizer": plan.offload.optimizer},
        "compute": plan.precision.compute,
    }


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
        "samples_per_s": time.samples_per_second,
        "tokens_per_s_per_device": time.tokens_per_second_per_device,
        "mfu": time.mfu,
        "basis": dict(time.basis),
    }
