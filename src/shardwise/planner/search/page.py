"""The report of `plan` as pictures: an SVG file, and a self-contained HTML page with the timeline of each family."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from shardwise.engines.engine import engine_named
from shardwise.planner.cost.time import SHOWN_ROUNDS, timeline
from shardwise.planner.search.capacity import capacity_text
from shardwise.planner.search.engine_forms import choose_form
from shardwise.planner.search.explain import asked_verdict, cluster_text
from shardwise.planner.search.report import cells_of, column_names, next_lines, reasons_of
from shardwise.planner.search.search import Candidate
from shardwise.plots.figures import Bars, Gantt, GanttSpan, Table
from shardwise.plots.page import Findings, Section, html_of
from shardwise.plots.svg import draw_sheet
from shardwise.runs.console import counted
from shardwise.units import GB, format_count, format_gb, format_seconds

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardwise.planner.cost.events import Span
    from shardwise.planner.cost.memory import Memory
    from shardwise.planner.search.question import Question
    from shardwise.planner.search.report_data import ReportContent
    from shardwise.planner.search.search import Answer


# The SVG file: memory of each family by kind, and the timeline of one step of the best plan.


_NUM_PARTS = 8
"""Number of kinds of memory with their own color; the others share one, and memory outside tensors has its own."""
_REST, _OUTSIDE = "other", "allocator and context"
_KINDS = {"F": "forward", "B": "backward", "reduce": "reduce, sum", "sum": "reduce, sum"}
"""Start of a span's label -> kind of work, where the two differ."""


def draw(answer: Answer, spans: Sequence[Span], *, title: str) -> str:
    """Return the picture of a result as SVG; `spans` is the timeline of its best plan, empty if no plan fits."""
    figures: list[Bars | Gantt] = [_memory_bars(answer)]
    if spans:
        end = max(span.end for span in spans)
        figures.append(Gantt(title=f"One step, {format_seconds(end)} shown", spans=_gantt_spans(spans)))
    return draw_sheet(title, figures)


def _gantt_spans(spans: Sequence[Span]) -> tuple[GanttSpan, ...]:
    return tuple(GanttSpan(span.stream, _kind(span.label), span.label, span.start, span.end) for span in spans)


def _memory_bars(answer: Answer) -> Bars:
    """Return one bar for each family with a plan, and the limit."""
    memories = {}
    for family, entry in answer.families.items():
        if entry.memory is not None:
            memories[f"{family}{_chosen(answer, family)}"] = entry.memory
    return _bars_of_memory(memories, answer.question)


def _bars_of_memory(memories: Mapping[str, Memory], question: Question) -> Bars:
    limit = question.cluster.device.memory_bytes
    values = {}
    for name, memory in memories.items():
        values[name] = {**memory.at_peak, _OUTSIDE: memory.total - memory.peak}
    parts, rows = _stacked(values, last=_OUTSIDE, unit=GB)
    return Bars(
        title="Peak memory of a device by kind",
        unit="GB",
        parts=parts,
        rows=rows,
        limit=question.capacity / GB,
        clip_at=2 * limit / GB,
    )


def _stacked(
    values: Mapping[str, Mapping[str, float]], *, last: str, unit: float
) -> tuple[tuple[str, ...], tuple[tuple[str, tuple[float, ...]], ...]]:
    """Return the parts of stacked bars and their rows: the _NUM_PARTS largest parts, a rest, and the part `last`."""
    largest: dict[str, float] = {}
    for parts in values.values():
        for part, size in parts.items():
            largest[part] = max(size, largest.get(part, 0.0))
    largest.pop(last, None)
    names = sorted(largest, key=lambda part: -largest[part])[:_NUM_PARTS]
    ends = [_REST] if len(largest) > _NUM_PARTS else []
    if last:
        ends.append(last)
    rows = []
    for label, parts in values.items():
        own = [parts.get(part, 0.0) for part in names]
        rest = max(0.0, sum(parts.values()) - sum(own) - parts.get(last, 0.0))
        tail = {_REST: rest, last: parts.get(last, 0.0)}
        rows.append((label, tuple(size / unit for size in (*own, *(tail[end] for end in ends)))))
    return (*names, *ends), tuple(rows)


def _chosen(answer: Answer, family: str) -> str:
    entry = answer.families[family]
    is_best = isinstance(entry, Candidate) and answer.best is not None and entry.plan == answer.best.plan
    return " (chosen)" if is_best else ""


def _kind(label: str) -> str:
    """Return the kind of work of a span from the start of its label: F3, gather 12, update."""
    name = label.split(maxsplit=1)[0].rstrip("0123456789")
    return _KINDS.get(name, name)


# The page: memory and time of each family by part, timelines, reasons, and what to do next.


def to_page(shown: ReportContent) -> str:
    """Return the report as one self-contained HTML page."""
    answer = shown.answer
    question = answer.question
    shape = question.model.plain
    cluster = question.cluster
    plans = _plans(shown)
    method = ["All numbers are predictions; `shardwise bench step` measures them."]
    if answer.best is not None:
        basis = ", ".join(f"{what} {origin}" for what, origin in answer.best.time.basis.items())
        method.append(f"Interval of the recommended plan's time: {answer.best.time.interval_text()} ({basis}).")
    method.append(f"The search considered {answer.num_plans:,} plans and predicted {len(answer.candidates):,} in full.")
    return html_of(
        Findings(
            title=f"{shape.name} on {cluster.num_devices:,} x {cluster.device.name}",
            verdict=_verdict(shown),
            facts=(
                ("model", f"{shape.name}: {format_count(shape.numel)} parameters ({shape.source})"),
                ("cluster", cluster_text(answer)),
                ("batch", f"{counted(question.batch_size, 'sample')} ({shown.subject.batch_source})"),
                ("tokens per sample", f"{shape.tokens_per_sample:,}" if shape.tokens_per_sample else "none"),
                ("precision", f"{shown.subject.precision_text} ({shown.subject.precision_source})"),
            ),
            facts_title="Question",
            method=tuple(method),
            sections=(*_cost_sections(shown, plans), _reason_section(shown, plans), *_next_section(shown)),
        )
    )


def _plans(shown: ReportContent) -> dict[str, Candidate]:
    """Return the plans that the page shows: the user's own, the chosen one, then the best of the other families."""
    answer, found = shown.answer, dict[str, Candidate]()
    if shown.asked is not None and shown.asked.candidate is not None:
        found["yours"] = shown.asked.candidate
    chosen = choose_form(shown.forms)
    if chosen is not None and chosen.best is not None:
        found[f"{chosen.name} (chosen)"] = chosen.best
    if answer.best is not None:
        found[f"{answer.best.family} ({'engine torch' if shown.forms else 'chosen'})"] = answer.best
    for family, entry in answer.families.items():
        if isinstance(entry, Candidate) and (answer.best is None or entry.plan != answer.best.plan):
            found[family] = entry
    return found


def _verdict(shown: ReportContent) -> str:
    answer, asked = shown.answer, shown.asked
    sentences = []
    if asked is not None:
        sentences.append(f"Your plan `{asked.plan.layout}`: {asked_verdict(asked, answer)}.")
    best, name = answer.best, answer.best.family if answer.best is not None else ""
    form = choose_form(shown.forms)
    if shown.forms:
        best, name = (form.best, form.name) if form is not None else (None, "")
    if best is None:
        sentences.append("No plan fits.")
    else:
        sentences.append(
            f"`{name}` is recommended: {format_gb(best.memory.total)} of"
            f" {format_gb(answer.question.cluster.device.memory_bytes)} on each device,"
            f" {format_seconds(best.time.seconds)} a step."
        )
    return " ".join(sentences)


def _cost_sections(shown: ReportContent, plans: Mapping[str, Candidate]) -> list[Section]:
    """Return the sections of memory and time by part, and of timelines."""
    question = shown.answer.question
    memories = {name: candidate.memory for name, candidate in plans.items()}
    for family, entry in shown.answer.families.items():
        if not isinstance(entry, Candidate) and entry.memory is not None:
            memories[f"{family} (too large)"] = entry.memory
    sections = [
        Section(
            title="Memory",
            text=f"{capacity_text(question)} (dashed line).",
            parts=(_bars_of_memory(memories, question),),
        )
    ]
    if plans:
        longest = max(plan.time.seconds for plan in plans.values())
        unit, size = ("s", 1.0) if longest >= 1 else ("ms", 1e-3)
        parts, rows = _stacked({name: plan.time.parts for name, plan in plans.items()}, last="", unit=size)
        times = Bars(title="Time of one step by part", unit=unit, parts=parts, rows=rows)
        text = "Communication counts only where compute waits for it."
        sections.append(Section(title="Time", text=text, parts=(times,)))
        sections.append(Section(title="Timelines", text=_TIMELINES, parts=_timelines(question, plans)))
    return sections


_TIMELINES = (
    f"The last micro-batch and the update of a rank; of a pipeline, the first {SHOWN_ROUNDS} rounds on all ranks."
    " Each timeline has its own scale."
)


def _timelines(question: Question, plans: Mapping[str, Candidate]) -> tuple[Gantt, ...]:
    model, drawn = question.time_model(), []
    for name, candidate in plans.items():
        if not engine_named(candidate.plan.engine).uses_fsdp:
            continue  # the streams of other engines are not simulated
        spans = timeline(model, question.model.for_plan(candidate.plan), candidate.plan)
        end, seconds = max(span.end for span in spans), candidate.time.seconds
        shown = f"{format_seconds(end)} shown of {format_seconds(seconds)}"
        if end >= seconds:  # the passes of a short pipeline without what the prediction adds or overlaps
            shown = f"a step of {format_seconds(seconds)}"
        title = f"{name}: {candidate.plan.layout}, {shown}"
        drawn.append(Gantt(title=title, spans=_gantt_spans(spans)))
    kinds = dict.fromkeys(span.kind for each in drawn for span in each.spans)
    return tuple(dataclasses.replace(each, kinds=tuple(kinds)) for each in drawn)


def _reason_section(shown: ReportContent, plans: Mapping[str, Candidate]) -> Section:
    rows = tuple((name, *cells_of(candidate)) for name, candidate in plans.items())
    table = Table(header=("plan", *column_names(shown.answer)[1:]), rows=rows)
    return Section(title="Plans and reasons", text="\n".join(reasons_of(shown)), parts=(table,) if rows else ())


def _next_section(shown: ReportContent) -> list[Section]:
    lines = [f"{label}: `{text}`" if label == "next" else text for label, text in next_lines(shown)]
    return [Section(title="Next", text="\n".join(lines))] if lines else []
