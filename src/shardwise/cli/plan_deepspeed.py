"""How an answer of the planner looks on a terminal, and plans to and from DeepSpeed's JSON."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from shardwise.errors import PlanError
from shardwise.planner.search.choices import FAMILIES
from shardwise.planner.search.deepspeed import beside_native, choose_form, form_reason
from shardwise.planner.search.explain import (
    ROUND,
    capture_gain,
    compile_gain,
    decision_path,
    reason,
    room_in_words,
    rounds_gain,
)
from shardwise.planner.search.search import Candidate
from shardwise.runs.console import complain, say
from shardwise.units import format_count, format_gb, format_rate, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from shardwise.planner.cost.memory import Memory
    from shardwise.planner.cost.time import Time
    from shardwise.planner.search.deepspeed import ZeroForm
    from shardwise.planner.search.search import Answer
    from shardwise.planner.search.subject import Subject
    from shardwise.plans.plan import DType, Plan


def read_deepspeed(
    path: Path, out: Path | None, *, num_ranks: int | None, batch_size: int | None, precision: DType | None
) -> None:
    """Write the plan that a DeepSpeed JSON describes to `out` or standard output, and say what it does not hold."""
    from shardwise.engines.deepspeed.from_json import read_json
    from shardwise.plans.toml import plan_to_toml

    reading = read_json(path, num_ranks=num_ranks, batch_size=batch_size, precision=precision)
    text = plan_to_toml(reading.plan)
    if out is None:
        say(text.rstrip())
    else:
        out.write_text(text)
        say(f"plan      {out}: {reading.plan.layout}, zero {reading.plan.zero}, for train --plan {out}")
    complain(f"job       batch_size={reading.plan.batch_size}")
    for note in reading.notes:
        complain(f"note      {note}")


def write_deepspeed(plan: Plan, path: Path, *, clip_norm: float | None, has_job: bool) -> None:
    """Write a plan as DeepSpeed's JSON, and say what that cannot hold; nvme gets a folder beside the file."""
    import msgspec

    from shardwise.engines.deepspeed.config import deepspeed_config, left_out

    config = deepspeed_config(plan, clip_norm=clip_norm, nvme_path=str(path.resolve().parent / "nvme"))
    path.write_bytes(msgspec.json.format(msgspec.json.encode(config), indent=2) + b"\n")
    complain(f"deepspeed {path}: stage {config['zero_optimization']['stage']}, {plan.layout.world_size} ranks")
    if not has_job:
        complain("note      gradient_clipping is 0.0, off: write the job's clip_norm there, if it has one")
    for sentence in left_out(plan):
        complain(f"left out: {sentence}")


def best_for_deepspeed(answer: Answer) -> Plan:
    """Return the best plan of a search that DeepSpeed's JSON can hold; another than the best is said."""
    from shardwise.engines.deepspeed.config import require_expressible

    refusal = PlanError("no plan fits", code="plan.none-fits", fix="use a larger cluster")
    for candidate in answer.candidates:
        try:
            require_expressible(candidate.plan)
        except PlanError as error:
            refusal = error
            continue
        if candidate is not answer.best:
            complain(f"note      of the plans that DeepSpeed has words for, the best is {candidate.plan.layout}")
        return candidate.plan
    raise refusal


# How an answer of the planner looks on a terminal.


def show_answer(answer: Answer, forms: Sequence[ZeroForm], subject: Subject, *, every: bool) -> None:
    """Show the best of each family (or every plan), then what the chosen one costs and why it was chosen.

    `forms` are DeepSpeed's, where that engine was asked for.
    """
    question = answer.question
    shape = question.model.plain
    length = f", {shape.tokens_per_sample} tokens each" if shape.tokens_per_sample else ""
    say(f"model     {shape.name}: {format_count(shape.numel)} parameters ({shape.source})")
    say(f"cluster   {question.cluster.describe()}")
    say(f"batch     {question.batch_size} samples ({subject.batch_source}){length}")
    say(f"precision {subject.precision} ({subject.precision_source})")
    say("")
    _show(_every(answer) if every else _families(answer, forms))
    say("")
    for fork in decision_path(answer):
        say(f"{fork.question} {fork.answer}: {fork.because}")
    if answer.best is not None:
        say("")
        _show_best(answer, answer.best)
    chosen = choose_form(forms)
    if chosen is not None and chosen.best is not None:
        say("")
        say(f"{chosen.name}: {beside_native(chosen, answer)}")
        say(f"          {_parts(chosen.best.memory.at_peak, format_gb)}")
        say(f"          {_parts(chosen.best.time.parts, format_seconds)}")
        if chosen.best.memory.host:
            say(f"          {format_gb(chosen.best.memory.host)} on the host for each device")


def _families(answer: Answer, forms: Sequence[ZeroForm]) -> Table:
    """Return a table with a row for each family, and for each of DeepSpeed's forms."""
    table = _table("family", "layout", "micro-batch", "recompute", "memory", "step", _rate(answer), "MFU", "why")
    for family in FAMILIES:
        entry = answer.families[family]
        words = reason(answer, family)
        if isinstance(entry, Candidate):
            style = "bold" if words == "chosen" else ""
            table.add_row(family, *_cells(entry.plan, entry.memory, entry.time), words, style=style)
        else:
            memory = format_gb(entry.memory.total) if entry.memory else ""
            table.add_row(family, "", "", "", memory, "", "", "", words, style="dim")
    chosen = choose_form(forms)
    for form in forms:
        words = form_reason(form, chosen)
        if form.best is not None:
            style = "bold" if form is chosen else ""
            table.add_row(form.name, *_cells(form.best.plan, form.best.memory, form.best.time), words, style=style)
        else:
            memory = format_gb(form.memory.total) if form.memory else ""
            table.add_row(form.name, "", "", "", memory, "", "", "", words, style="dim")
    return table


def _every(answer: Answer) -> Table:
    table = _table("family", "layout", "micro-batch", "recompute", "memory", "step", _rate(answer), "MFU")
    for entry in answer.candidates:
        table.add_row(entry.family, *_cells(entry.plan, entry.memory, entry.time))
    return table


def _cells(plan: Plan, memory: Memory, time: Time) -> list[str]:
    schedule = f" {plan.pipeline.schedule}" if plan.layout.pp > 1 else ""
    rate = time.tokens_per_second_per_device or time.samples_per_second / plan.layout.world_size
    return [
        f"{plan.layout}{f' zero{plan.zero}' if plan.zero else ''}{schedule}{' fused' if plan.fused_loss else ''}",
        f"{plan.micro_batch} x {plan.accumulation}",
        plan.recompute,
        format_gb(memory.total),
        format_seconds(time.seconds),
        format_rate(rate),
        f"{time.mfu:.0%}",
    ]


def _rate(answer: Answer) -> str:
    return "tokens/s each" if answer.question.model.plain.tokens_per_sample else "samples/s each"


def _show_best(answer: Answer, best: Candidate) -> None:
    """Show memory and time of the chosen plan by part, and what the figures stand on."""
    memory, time = best.memory, best.time
    fused = " · loss fused with the head" if best.plan.fused_loss else ""
    say(f"chosen    {best.family}: {best.plan.layout} · {FAMILIES[best.family]}{fused}")
    held = {**memory.at_peak, "allocator and context": memory.total - memory.peak}
    where = f"{memory.phase}, stage {memory.stage}" if best.plan.layout.pp > 1 else memory.phase
    say(f"memory    {format_gb(memory.total)} in {where}: {_parts(held, format_gb)}")
    say(f"          {room_in_words(answer.question)}")
    if memory.host:
        say(f"host      {format_gb(memory.host)} for each device")
    say(f"time      {format_seconds(time.seconds)} a step: {_parts(time.parts, format_seconds)}")
    basis = ", ".join(f"{what} {origin}" for what, origin in time.basis.items())
    say(f"          +- {time.uncertainty:.0%} ({basis})")
    _show_gains(answer)
    say(f"searched  {answer.num_plans} plans, {len(answer.candidates)} predicted in full")


def _show_gains(answer: Answer) -> None:
    """Say what options that the search leaves alone would do."""
    for words, gain, least in (
        ("compile = blocks would take {} off", compile_gain(answer), 0.01),
        ("capture = step would take {} off, where all batches have one shape", capture_gain(answer), 0.05),
        (f"communication.sync_every = {ROUND} would take {{}} off, and change the numbers", rounds_gain(answer), 0.2),
    ):
        if gain > least:
            say(f"          {words.format(f'{gain:.0%}')}")


def _parts(parts: Mapping[str, float], words: Callable[[float], str]) -> str:
    shown = sorted(parts.items(), key=lambda part: -part[1])
    whole = sum(parts.values())
    return " · ".join(f"{name} {words(size)}" for name, size in shown if size > 0.005 * whole)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        right = column in {"memory", "step", "MFU"} or column.endswith("each")
        table.add_column(column, overflow="fold", justify="right" if right else "left")
    return table


def _show(table: Table) -> None:
    Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else 180).print(table)
