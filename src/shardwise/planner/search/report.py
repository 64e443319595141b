"""The result of a search as data for JSON, as text for a terminal, and as a picture."""

from __future__ import annotations

import dataclasses
import io
import sys
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from shardwise.planner.search.choices import FAMILIES
from shardwise.planner.search.explain import (
    ROUND,
    beside_native,
    capacity_text,
    capture_gain,
    compile_gain,
    decision_path,
    form_reason,
    reason,
    rounds_gain,
)
from shardwise.planner.search.search import FILL, Candidate, choose_form
from shardwise.plots.figures import Bars, Gantt, GanttSpan
from shardwise.plots.svg import draw_sheet
from shardwise.units import GB, format_count, format_gb, format_rate, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from shardwise.planner.cost.events import Span
    from shardwise.planner.cost.memory import Memory
    from shardwise.planner.cost.time import Time
    from shardwise.planner.search.search import Answer, EngineForm, Rejected
    from shardwise.planner.search.subject import Subject
    from shardwise.plans.plan import Plan


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
    return {
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


# The result as text for a terminal.


def answer_text(answer: Answer, forms: Sequence[EngineForm], subject: Subject, *, every: bool) -> str:
    """Return the best plan of each family (or every plan), then the cost of the chosen plan with reasons.

    `forms` are the plans of another engine, if the spec names one.
    """
    question = answer.question
    shape = question.model.plain
    length = f", {shape.tokens_per_sample} tokens each" if shape.tokens_per_sample else ""
    lines = [
        f"model     {shape.name}: {format_count(shape.numel)} parameters ({shape.source})",
        f"cluster   {question.cluster.describe()}",
        f"batch     {question.batch_size} samples ({subject.batch_source}){length}",
        f"precision {subject.precision} ({subject.precision_source})",
        "",
        _rendered(_every(answer) if every else _families(answer, forms)),
        *([] if every else _shared_reasons(answer)),
        "",
    ]
    lines += [f"{fork.question} {fork.answer}: {fork.because}" for fork in decision_path(answer)]
    if answer.best is not None:
        lines += ["", *_best_lines(answer, answer.best)]
    chosen = choose_form(forms)
    if chosen is not None and chosen.best is not None:
        lines += ["", f"{chosen.name}: {beside_native(chosen, answer)}"]
        lines.append(f"          {_parts(chosen.best.memory.at_peak, format_gb)}")
        lines.append(f"          {_parts(chosen.best.time.parts, format_seconds)}")
        if chosen.best.memory.host:
            lines.append(f"          {format_gb(chosen.best.memory.host)} on the host for each device")
    return "\n".join(lines)


def _families(answer: Answer, forms: Sequence[EngineForm]) -> Table:
    """Return a table with a row for each family without a shared reason, and for each form of another engine."""
    table, shared = _table(answer, "why"), _by_shared_reason(answer)
    for family in FAMILIES:
        entry, why = answer.families[family], reason(answer, family)
        if why not in shared:
            _add_row(table, family, entry if isinstance(entry, Candidate) else None, entry.memory, why)
    chosen = choose_form(forms)
    for form in forms:
        _add_row(table, form.name, form.best, form.memory, form_reason(form, chosen))
    return table


def _by_shared_reason(answer: Answer) -> dict[str, list[str]]:
    """Return the reasons for which several families have no plan at all, with these families."""
    found: dict[str, list[str]] = {}
    for family in FAMILIES:
        if answer.families[family].memory is None:
            found.setdefault(reason(answer, family), []).append(family)
    return {why: families for why, families in found.items() if len(families) > 1}


def _shared_reasons(answer: Answer) -> list[str]:
    return [f"{', '.join(families)}: {why}" for why, families in _by_shared_reason(answer).items()]


def _add_row(table: Table, name: str, found: Candidate | None, least: Memory | None, why: str) -> None:
    """Add a row with the best plan, or with the least memory that a plan needs if none fits."""
    if found is not None:
        table.add_row(name, *_cells(found), why, style="bold" if why == "chosen" else "")
    else:
        memory = format_gb(least.total) if least else ""
        table.add_row(name, "", "", "", memory, "", "", "", why, style="dim")


def _every(answer: Answer) -> Table:
    table = _table(answer)
    for candidate in answer.candidates:
        table.add_row(candidate.family, *_cells(candidate))
    return table


def _cells(candidate: Candidate) -> list[str]:
    plan, time = candidate.plan, candidate.time
    layout = [str(plan.layout)]
    if plan.zero:
        layout.append(f"zero{plan.zero}")
    if plan.layout.pp > 1:
        layout.append(plan.pipeline.schedule)
    if plan.fused_loss:
        layout.append("fused")
    return [
        " ".join(layout),
        f"{plan.micro_batch} x {plan.accumulation}",
        f"{plan.recompute} of {plan.recompute_blocks}" if plan.recompute_blocks else plan.recompute,
        format_gb(candidate.memory.total),
        format_seconds(time.seconds),
        format_rate(time.tokens_per_second_per_device or time.samples_per_second / plan.layout.world_size),
        f"{time.mfu:.0%}",
    ]


def _best_lines(answer: Answer, best: Candidate) -> list[str]:
    """Return the memory and time breakdown of the chosen plan, and the source of the rates."""
    memory, time = best.memory, best.time
    fused = " · loss fused with the head" if best.plan.fused_loss else ""
    at_peak = {**memory.at_peak, "allocator and context": memory.total - memory.peak}
    phase = f"{memory.phase}, stage {memory.stage}" if best.plan.layout.pp > 1 else memory.phase
    lines = [
        f"chosen    {best.family}: {best.plan.layout} · {FAMILIES[best.family]}{fused}",
        f"memory    {format_gb(memory.total)} in {phase}: {_parts(at_peak, format_gb)}",
        f"          {capacity_text(answer.question)}",
    ]
    if memory.host:
        lines.append(f"host      {format_gb(memory.host)} for each device")
    basis = ", ".join(f"{what} {origin}" for what, origin in time.basis.items())
    lines.append(f"time      {format_seconds(time.seconds)} a step: {_parts(time.parts, format_seconds)}")
    lines.append(f"          +- {time.uncertainty:.0%} ({basis})")
    gains = (
        ("compile = blocks would save {}", compile_gain(answer), 0.01),
        ("capture = step would save {}, if all batches have the same shape", capture_gain(answer), 0.05),
        (f"communication.sync_every = {ROUND} would save {{}}, and change the results", rounds_gain(answer), 0.2),
    )
    lines += [f"          {text.format(f'{gain:.0%}')}" for text, gain, least in gains if gain > least]
    return [*lines, f"searched  {answer.num_plans} plans, {len(answer.candidates)} predicted in full"]


def _parts(parts: Mapping[str, float], write: Callable[[float], str]) -> str:
    """Return the parts above half a percent of the total, the largest first."""
    least = 0.005 * sum(parts.values())
    shown = sorted(parts.items(), key=lambda part: -part[1])
    return " · ".join(f"{name} {write(size)}" for name, size in shown if size > least)


def _table(answer: Answer, *more: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    rate = "tokens/s each" if answer.question.model.plain.tokens_per_sample else "samples/s each"
    for column in ("family", "layout", "micro-batch", "recompute", "memory", "step", rate, "MFU", *more):
        right = column in {"memory", "step", "MFU"} or column.endswith("each")
        table.add_column(column, overflow="fold", justify="right" if right else "left")
    return table


def _rendered(table: Table) -> str:
    """Return a table as text: with styles in the width of the terminal, or plain in 180 columns."""
    text, is_terminal = io.StringIO(), sys.stdout.isatty()
    width = None if is_terminal else 180
    Console(file=text, highlight=False, width=width, force_terminal=is_terminal).print(table)
    return text.getvalue().rstrip("\n")


# The picture of a result: memory of each family by kind, and the timeline of one step.


_NUM_PARTS = 8
"""Number of kinds of memory with their own color; the others share one, and memory outside tensors has its own."""
_REST, _OUTSIDE = "other", "allocator and context"
_KINDS = {"F": "forward", "B": "backward", "reduce": "reduce, sum", "sum": "reduce, sum"}
"""Start of a span's label -> kind of work, where the two differ."""


def draw(answer: Answer, spans: Sequence[Span], *, title: str) -> str:
    """Return the picture of a result as SVG; `spans` is the timeline of its best plan, empty if no plan fits."""
    figures: list[Bars | Gantt] = [_memory_bars(answer)]
    if spans:
        shown = [GanttSpan(span.stream, _kind(span.label), span.label, span.start, span.end) for span in spans]
        end = max(span.end for span in spans)
        figures.append(Gantt(title=f"One step, {format_seconds(end)} shown", spans=tuple(shown)))
    return draw_sheet(title, figures)


def _memory_bars(answer: Answer) -> Bars:
    """Return one bar for each family with a plan, and the limit."""
    limit = answer.question.cluster.device.memory_bytes
    memories = {family: entry.memory for family, entry in answer.families.items() if entry.memory is not None}
    largest: dict[str, float] = {}
    for memory in memories.values():
        for name, size in memory.at_peak.items():
            largest[name] = max(size, largest.get(name, 0.0))
    names = sorted(largest, key=lambda name: -largest[name])[:_NUM_PARTS]
    rows, has_rest = [], len(largest) > _NUM_PARTS
    for family, memory in memories.items():
        own = [memory.at_peak.get(name, 0.0) for name in names]
        rest = [max(0.0, sum(memory.at_peak.values()) - sum(own))] if has_rest else []
        parts = [*own, *rest, memory.total - memory.peak]
        rows.append((f"{family}{_chosen(answer, family)}", tuple(part / GB for part in parts)))
    return Bars(
        title=f"Peak memory of a device by kind (GB, of {limit / GB:.0f})",
        unit="GB",
        parts=(*names, *([_REST] if has_rest else []), _OUTSIDE),
        rows=tuple(rows),
        limit=FILL * limit / GB,
        clip_at=2 * limit / GB,
    )


def _chosen(answer: Answer, family: str) -> str:
    entry = answer.families[family]
    is_best = isinstance(entry, Candidate) and answer.best is not None and entry.plan == answer.best.plan
    return " (chosen)" if is_best else ""


def _kind(label: str) -> str:
    """Return the kind of work of a span from the start of its label: F3, gather 12, update."""
    name = label.split(maxsplit=1)[0].rstrip("0123456789")
    return _KINDS.get(name, name)
