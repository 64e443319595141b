"""An answer of the planner as plain data for JSON, and as a picture."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from shardwise.planner.search.deepspeed import choose_form, form_reason
from shardwise.planner.search.explain import capture_gain, compile_gain, decision_path, reason, rounds_gain
from shardwise.planner.search.search import FILL, Candidate
from shardwise.units import format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from shardwise.planner.cost.events import Span
    from shardwise.planner.cost.memory import Memory
    from shardwise.planner.cost.time import Time
    from shardwise.planner.search.deepspeed import ZeroForm
    from shardwise.planner.search.search import Answer, Rejected
    from shardwise.plans.plan import Plan


def answer_data(answer: Answer, forms: Sequence[ZeroForm] = (), *, every: bool = False) -> dict[str, Any]:
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


def _form(form: ZeroForm, chosen: ZeroForm | None) -> dict[str, Any]:
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


# A picture of an answer as SVG: memory by part for each family, and the timeline of one step.


WIDTH = 960
LEFT = 150
RIGHT = 30
ROW = 26
COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#edc948", "#b07aa1", "#9c755f", "#ff9da7", "#bab0ac")
"""Ten that keep apart on light and dark grounds, and for most who see colours differently."""
STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#1b1b1b}.small{font-size:11px}.head{font-size:16px;font-weight:600}"
    ".line{stroke:#1b1b1b;stroke-dasharray:4 3}.ground{fill:#fff}"
    "@media(prefers-color-scheme:dark){text{fill:#eee}.line{stroke:#eee}.ground{fill:#16181d}}"
)


def draw(answer: Answer, spans: Sequence[Span], *, title: str) -> str:
    """Return the picture of an answer; `spans` is the timeline of its best plan, empty when nothing fits."""
    bars, height = _memory_bars(answer, top=70)
    streams, height = _timeline(spans, top=height + 30) if spans else ([], height)
    height += 20
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="ground" width="{WIDTH}" height="{height:g}"/>',
        _text(20, 30, title, kind="head"),
    ]
    return "\n".join([*head, *bars, *streams, "</svg>", ""])


def _memory_bars(answer: Answer, top: float) -> tuple[list[str], float]:
    """Return one bar for each family that has a plan, with the limit, and where they end."""
    rows = [(family, entry) for family, entry in answer.families.items() if entry.memory is not None]
    limit = answer.question.cluster.device.memory_bytes
    names = _names(rows)
    colour = {name: COLOURS[place % len(COLOURS)] for place, name in enumerate(names)}
    most = max([limit, *(min(entry.memory.total, 2 * limit) for _, entry in rows if entry.memory)])
    scale = (WIDTH - LEFT - RIGHT) / (1.05 * most)
    shapes = [_text(20, top - 14, f"Memory of a device at its highest moment, by part (GB; {limit / 1e9:.0f} there)")]
    legend, top = _legend(colour, top)
    for row, (family, entry) in enumerate(rows):
        memory, y = entry.memory, top + row * ROW
        if memory is None:
            continue
        chosen = isinstance(entry, Candidate) and answer.best is not None and entry.plan == answer.best.plan
        shapes.append(_text(20, y + 15, f"{family}{' (chosen)' if chosen else ''}"))
        x = float(LEFT)
        slices = {**memory.at_peak, "allocator and context": memory.total - memory.peak}
        for name, size in slices.items():
            wide = min(size * scale, WIDTH - RIGHT - x)
            if wide > 0.3:
                tip = f"{name} {size / 1e9:.1f} GB"
                shapes.append(_rect((x, y + 2), (wide, ROW - 6), colour.get(name, COLOURS[-1]), tip))
            x += max(0.0, wide)
        shapes.append(_text(min(x + 4, WIDTH - 80), y + 15, f"{memory.total / 1e9:.1f}", kind="small"))
    bottom = top + len(rows) * ROW
    edge = LEFT + FILL * limit * scale
    shapes.append(f'<line class="line" x1="{edge:.1f}" x2="{edge:.1f}" y1="{top - 4:g}" y2="{bottom:g}"/>')
    return [*legend, *shapes], bottom


def _names(rows: Iterable[tuple[str, object]]) -> list[str]:
    """Return what lives at any peak, the largest first."""
    sizes: dict[str, float] = {}
    for _, entry in rows:
        memory = getattr(entry, "memory", None)
        for name, size in memory.at_peak.items() if memory else ():
            sizes[name] = max(size, sizes.get(name, 0.0))
    return [*sorted(sizes, key=lambda name: -sizes[name])[: len(COLOURS) - 1], "allocator and context"]


def _legend(colour: dict[str, str], top: float) -> tuple[list[str], float]:
    """Return names beside their colours, and where they end."""
    shapes, x, y = [], 20.0, top
    for name, shade in colour.items():
        wide = 30 + 6.6 * len(name)
        if x + wide > WIDTH - RIGHT:
            x, y = 20.0, y + 20
        shapes += [_rect((x, y), (12, 12), shade, name), _text(x + 17, y + 10, name, kind="small")]
        x += wide
    return shapes, y + 26


def _timeline(spans: Sequence[Span], top: float) -> tuple[list[str], float]:
    """Return one row per stream, and where they end."""
    streams = list(dict.fromkeys(span.stream for span in spans))
    end = max(span.end for span in spans)
    scale = (WIDTH - LEFT - RIGHT) / end
    kinds = {"F": 0, "B": 1, "forward": 0, "backward": 1, "gather": 2, "reduce": 3, "sum": 3, "update": 5, "collect": 6}
    shapes = [_text(20, top, f"One step, {format_seconds(end)} shown")]
    for row, stream in enumerate(streams):
        shapes.append(_text(20, top + row * ROW + 27, stream))
    for span in _merged(spans, least=end / (WIDTH - LEFT - RIGHT)):
        y = top + streams.index(span.stream) * ROW + 12
        word = span.label.split()[0].rstrip("0123456789")
        tip = f"{span.label}, {format_seconds(span.end - span.start)}"
        wide = max(0.4, (span.end - span.start) * scale - 0.3)
        shapes.append(_rect((LEFT + span.start * scale, y), (wide, ROW - 6), COLOURS[kinds.get(word, 9)], tip))
    bottom = top + len(streams) * ROW + 16
    words = {"forward": 0, "backward": 1, "gather": 2, "reduce, sum": 3, "update": 5, "collect": 6}
    legend, bottom = _legend({word: COLOURS[place] for word, place in words.items()}, bottom)
    return [*shapes, *legend], bottom


def _merged(spans: Sequence[Span], least: float) -> list[Span]:
    """Join neighbours of one kind that would be thinner than a line together."""
    merged: list[Span] = []
    for span in sorted(spans, key=lambda span: (span.stream, span.start)):
        last = merged[-1] if merged else None
        alike = last and last.stream == span.stream and last.label.split()[0] == span.label.split()[0]
        if last and alike and span.start - last.end < least and span.end - span.start < least:
            merged[-1] = last._replace(end=span.end)
        else:
            merged.append(span)
    return merged


def _rect(corner: tuple[float, float], size: tuple[float, float], colour: str, tip: str) -> str:
    return (
        f'<rect x="{corner[0]:.1f}" y="{corner[1]:.1f}" width="{size[0]:.1f}" height="{size[1]:g}" fill="{colour}">'
        f"<title>{escape(tip)}</title></rect>"
    )


def _text(x: float, y: float, words: str, *, kind: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}"{f" class={kind!r}" if kind else ""}>{escape(words)}</text>'
