"""The report of `plan` as text for a terminal: a table, reasons, the cost of the chosen plan, and what to do next."""

from __future__ import annotations

import io
import math
import shutil
import sys
import textwrap
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from shardwise.planner.next_step import YOUR_JOB, plan_changes, written
from shardwise.planner.search.advice import ROUND, capture_gain, compile_gain, rounds_gain
from shardwise.planner.search.capacity import capacity_text
from shardwise.planner.search.choices import FAMILIES, family_of
from shardwise.planner.search.engine_forms import choose_form
from shardwise.planner.search.explain import (
    asked_verdict,
    beside_native,
    cluster_text,
    decision_path,
    form_reason,
    reason,
)
from shardwise.planner.search.search import FAMILY_TIE, Candidate
from shardwise.plans.plan import Plan
from shardwise.runs.console import counted
from shardwise.units import (
    GB,
    format_count,
    format_gb,
    format_rate,
    format_seconds,
    format_three_digits,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from shardwise.planner.asked import Asked
    from shardwise.planner.cost.memory import Memory
    from shardwise.planner.search.question import Question
    from shardwise.planner.search.report_data import ReportContent
    from shardwise.planner.search.search import Answer


NATIVE = "the best plan of engine torch"
"""Reason of the family that would be chosen without --engine."""
LABEL = 10
"""Width of the label of a paragraph, by which its other lines are indented."""
MOST_SIZES = 8
"""Other numbers of devices that are shown, the nearest to the chosen one."""


def to_text(shown: ReportContent) -> str:
    """Return the best plan of each family (or every plan), reasons, costs of the chosen plan, and what to do next."""
    answer, asked = shown.answer, shown.asked
    question = answer.question
    shape = question.model.plain
    length = f", {shape.tokens_per_sample:,} tokens each" if shape.tokens_per_sample else ""
    lines = [
        *_paragraph("model", f"{shape.name}: {format_count(shape.numel)} parameters ({shape.source})"),
        *_paragraph("cluster", cluster_text(answer)),
        *_paragraph("batch", f"{counted(question.batch_size, 'sample')} ({shown.subject.batch_source}){length}"),
        *_paragraph("precision", f"{shown.subject.precision_text} ({shown.subject.precision_source})"),
        "",
        _rendered(_every(answer) if shown.every else _families(shown)),
        "",
    ]
    if not shown.every:
        for sentence in reasons_of(shown):
            lines += _wrapped(sentence, indent=2)
        lines.append("")
    for fork in decision_path(answer, Plan.engine if shown.forms else ""):
        lines += _wrapped(f"{fork.question} {fork.answer}: {fork.because}", indent=2)
    lines += _form_lines(shown)
    if asked is not None:
        lines += ["", *_asked_lines(asked, answer)]
    if answer.best is not None and (asked is None or asked.plan != answer.best.plan):
        label = "chosen" if asked is None else "best"
        lines += ["", *_best_lines(answer, answer.best, "native" if shown.forms else label)]
    for number, (label, text) in enumerate(next_lines(shown)):
        lines += [""] if number == 0 else []
        # A command is not wrapped, so that it can be copied.
        lines += [f"{label:<{LABEL}}{text}"] if label == "next" else _paragraph(label, text)
    return "\n".join(lines)


def _families(shown: ReportContent) -> Table:
    """Return a table with the user's own plan, the best plan of each family, and each form of another engine."""
    answer, asked = shown.answer, shown.asked
    table = _table(answer)
    if asked is not None and asked.candidate is not None:
        table.add_row("yours", *cells_of(asked.candidate))
    for family, entry in answer.families.items():
        found = entry if isinstance(entry, Candidate) else None
        is_best = not shown.forms and reason(answer, family) == "chosen"
        _add_row(table, family, found, entry.memory, is_best=is_best)
    chosen, engine = choose_form(shown.forms), ""
    for form in shown.forms:
        if form.name.split()[0] != engine:  # above its forms: both in one cell leave no space for the layout
            engine = form.name.split()[0]
            table.add_row(engine)
        name = form.name.removeprefix(f"{engine} ")
        _add_row(table, name, form.best, form.memory, is_best=form is chosen)
    return table


def _add_row(table: Table, name: str, found: Candidate | None, least: Memory | None, *, is_best: bool) -> None:
    """Add a row with the best plan, or with the least memory that a plan needs if none fits; none without memory."""
    if found is not None:
        table.add_row(name, *cells_of(found), style="bold" if is_best else "")
    elif least is not None:
        table.add_row(name, "", "", "", format_three_digits(least.total / GB), "", "", "", style="dim")


def reasons_of(shown: ReportContent) -> list[str]:
    """Return a sentence for each reason, with the families and forms that share it, the chosen one first."""
    answer = shown.answer
    shared: dict[str, list[str]] = {}
    for family, entry in answer.families.items():
        details = _details(entry.plan) if isinstance(entry, Candidate) else ""
        why = reason(answer, family)
        if shown.forms and why == "chosen":
            why = NATIVE
        shared.setdefault(why, []).append(f"{family}{details}")
    chosen = choose_form(shown.forms)
    for form in shown.forms:
        shared.setdefault(form_reason(form, chosen), []).append(form.name)
    ordered = sorted(shared.items(), key=lambda each: each[0] != "chosen")
    return [f"{', '.join(names)}: {why}" for why, names in ordered]


def _details(plan: Plan) -> str:
    """Return the choices of a plan that neither its family nor its layout shows, in brackets."""
    parts = []
    if plan.zero and family_of(plan) != f"zero{plan.zero}":
        parts.append(f"zero{plan.zero}")
    if plan.layout.pp > 1:
        parts.append(f"schedule {plan.pipeline.schedule}")
    if plan.fused_loss:
        parts.append("fused loss")
    if plan.gradient_sync == "every":
        parts.append("gradients reduced in every micro-batch")
    return f" ({', '.join(parts)})" if parts else ""


SHOWN = ("micro_batch", "accumulation", "recompute", "recompute_blocks", "gradient_sync", "fused_loss")
"""Fields of a plan that its family, `_details` or the first words of `_options` show."""


def _options(plan: Plan) -> str:
    """Return the micro-batches, recompute, and every other option of a plan that is not a default."""
    parts = [f"{plan.micro_batch} x {plan.accumulation}", f"recompute {_recompute(plan)}"]
    for name, value in plan_changes(Plan(layout=plan.layout, zero=plan.zero, precision=plan.precision), plan):
        if name not in SHOWN and not name.startswith("pipeline."):
            parts.append(f"{name} {written(value)}")
    num_stages = len(plan.pipeline.split) + 1
    if num_stages > 1:
        parts.append(f"{num_stages} virtual stages" if num_stages > plan.layout.pp else "uneven stages")
    return " · ".join(parts)


def _recompute(plan: Plan) -> str:
    return f"{plan.recompute} of {plan.recompute_blocks}" if plan.recompute_blocks else plan.recompute


def _every(answer: Answer) -> Table:
    table = _table(answer)
    for candidate in answer.candidates:
        table.add_row(candidate.family, *cells_of(candidate, details=True))
    return table


def cells_of(candidate: Candidate, *, details: bool = False) -> list[str]:
    """Return the columns of a plan after its name; `details` adds what its family and layout do not show."""
    plan, time = candidate.plan, candidate.time
    return [
        f"{plan.layout}{_details(plan) if details else ''}",
        f"{plan.micro_batch} x {plan.accumulation}",
        _recompute(plan),
        format_three_digits(candidate.memory.total / GB),
        format_seconds(time.seconds),
        format_rate(time.tokens_per_second_per_device or time.samples_per_second / plan.layout.world_size),
        f"{time.mfu:.0%}",
    ]


def _asked_lines(asked: Asked, answer: Answer) -> list[str]:
    """Return the memory and time breakdown of the user's own plan, and how it compares with the recommended one."""
    plan, default = asked.plan, asked.default
    lines = _paragraph("yours", f"{family_of(plan)}: {plan.layout}{_details(plan)} · {_options(plan)}")
    if default is not None:
        usual = f"{default.plan.micro_batch} x {default.plan.accumulation}"
        text = f"train takes {usual} by default, which needs {format_gb(default.memory.total)}"
        lines += _paragraph("", f"{text}: pass --set micro_batch={plan.micro_batch} to it")
    if asked.candidate is not None:
        lines += _costs(asked.candidate, asked.question)
    return [*lines, *_paragraph("verdict", asked_verdict(asked, answer))]


def _best_lines(answer: Answer, best: Candidate, label: str) -> list[str]:
    """Return the memory and time breakdown of the chosen plan, and the options that would make it faster."""
    gains = (
        ("compile = blocks would save {}", compile_gain(answer), 0.01),
        ("capture = step would save {}, if all batches have the same shape", capture_gain(answer), 0.05),
        (f"communication.sync_every = {ROUND} would save {{}}, and change the results", rounds_gain(answer), 0.2),
    )
    name = f"{best.family}: {best.plan.layout}{_details(best.plan)} · {FAMILIES[best.family]} · {_options(best.plan)}"
    lines = [*_paragraph(label, name), *_costs(best, answer.question)]
    for text, gain, least in gains:
        if gain > least:
            lines += _paragraph("", text.format(f"{gain:.0%}"))
    return [
        *lines,
        *_paragraph("searched", f"{answer.num_plans:,} plans, {len(answer.candidates):,} predicted in full"),
    ]


def _costs(candidate: Candidate, question: Question) -> list[str]:
    """Return memory and time of a plan by part, and the source of the rates."""
    memory, time = candidate.memory, candidate.time
    at_peak = {**memory.at_peak, "allocator and context": memory.total - memory.peak}
    phase = f"{memory.phase}, stage {memory.stage}" if candidate.plan.layout.pp > 1 else memory.phase
    basis = ", ".join(f"{what} {origin}" for what, origin in time.basis.items())
    lines = [
        *_paragraph("memory", f"{format_gb(memory.total)} in {phase}: {_parts(at_peak, format_gb)}"),
        *_paragraph("", capacity_text(question)),
    ]
    if memory.host:
        lines += _paragraph("host", f"{format_gb(memory.host)} for each device")
    lines += _paragraph("time", f"{format_seconds(time.seconds)} a step: {_parts(time.parts, format_seconds)}")
    return [*lines, *_paragraph("", f"{time.interval_text()} ({basis})")]


def _form_lines(shown: ReportContent) -> list[str]:
    """Return the memory and time breakdown of the chosen form of another engine, which --out writes."""
    chosen = choose_form(shown.forms)
    if chosen is None or chosen.best is None:
        return []
    plan = chosen.best.plan
    lines = ["", *_paragraph("chosen", f"{chosen.name}: {plan.layout} · {_options(plan)}")]
    lines += _costs(chosen.best, shown.answer.question)
    return [*lines, *_paragraph("", beside_native(chosen, shown.answer))]


def next_lines(shown: ReportContent) -> list[tuple[str, str]]:
    """Return label and text of other numbers of devices, hints, the cost of the training, and the next command."""
    lines = []
    if shown.sizes:
        lines.append(("gpus", _sizes_text(shown)))
    lines += [("hint", hint.text) for hint in shown.hints]
    if shown.budget is not None:
        lines.append(("budget", shown.budget.to_text()))
    if shown.next_command:
        lines.append(("next", shown.next_command))
        if "hosts.txt" in shown.next_command:
            nodes = shown.answer.question.cluster.num_nodes
            lines.append(("", f"hosts.txt lists the names of the {nodes:,} nodes, one per line"))
        if YOUR_JOB in shown.next_command:
            question = shown.answer.question
            samples = counted(question.batch_size, "sample")
            lines.append(("", f"{YOUR_JOB} is your job with {question.model.plain.name} and a batch of {samples}"))
    return lines


def _sizes_text(shown: ReportContent) -> str:
    """Return the number of devices that was chosen, and the step times of the others."""
    seconds: dict[int, float] = {}
    for answer in shown.sizes:
        if answer.best is not None:
            seconds[answer.question.cluster.num_devices] = answer.best.time.seconds
    chosen = shown.answer.question.cluster.num_devices
    own = format_seconds(seconds.pop(chosen))
    near = sorted(seconds, key=lambda size: abs(math.log(size / chosen)))[:MOST_SIZES]
    others = [f"{size:,}: {format_seconds(seconds[size])}" for size in sorted(near)]
    text = f"{chosen:,}, the fewest whose step ({own}) takes at most {FAMILY_TIE:.0%} longer than the shortest"
    return f"{text}; a step on {' · '.join(others)}" if others else text


def _parts(parts: Mapping[str, float], write: Callable[[float], str]) -> str:
    """Return the parts above half a percent of the total, the largest first."""
    least = 0.005 * sum(parts.values())
    shown = sorted(parts.items(), key=lambda part: -part[1])
    return " · ".join(f"{name} {write(size)}" for name, size in shown if size > least)


def column_names(answer: Answer) -> tuple[str, ...]:
    """Return the columns of a table of plans."""
    rate = "tokens/s" if answer.question.model.plain.tokens_per_sample else "samples/s"
    return ("family", "layout", "micro-batch", "recompute", "GB", "step", f"{rate} each", "MFU")


def _table(answer: Answer) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in column_names(answer):
        is_right = name.endswith(("GB", "step", "each", "MFU"))
        short = name.replace("-", "-\n").replace(" ", "\n")
        may_wrap = name in {"family", "layout", "recompute"}
        table.add_column(short, overflow="fold", no_wrap=not may_wrap, justify="right" if is_right else "left")
    return table


def _rendered(table: Table) -> str:
    """Return a table as text: with styles in the width of the terminal, or plain in 180 columns."""
    text, width = io.StringIO(), _width()
    console = Console(file=text, highlight=False, width=width or 180, force_terminal=width is not None)
    for column in table.columns:
        cells = [str(cell) for cell in column.cells]
        column.no_wrap |= all(len(cell.split()) <= 1 for cell in cells)  # a cell wraps between words only
        pieces = [*cells, *str(column.header).split("\n")]
        if not column.no_wrap:
            pieces = [word for piece in pieces for word in piece.split()]
        column.min_width = max(map(len, pieces))
    wide = console.options.update(max_width=1000)
    if console.measure(table, options=wide).maximum > console.width:
        table.padding = (0, 1, 0, 0)
    # A truncated number would be another number: in a narrower terminal, the lines are longer than it.
    console.width = max(console.width, console.measure(table, options=wide).minimum)
    console.print(table)
    return text.getvalue().rstrip("\n")


def _width() -> int | None:
    """Return the columns of the terminal; None if standard output is not one."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _paragraph(label: str, text: str) -> list[str]:
    """Return a text behind its label, wrapped in a terminal, with the other lines below the text."""
    return _wrapped(f"{label:<{LABEL}}{text}", indent=LABEL)


def _wrapped(text: str, *, indent: int) -> list[str]:
    width = _width()
    if width is None:
        return [text]
    options: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False, "drop_whitespace": True}
    return textwrap.wrap(text, max(width, 40), subsequent_indent=" " * indent, **options)
