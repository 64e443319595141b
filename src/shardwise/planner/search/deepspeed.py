"""DeepSpeed's ZeRO stages and offload as plans: the best of each form, and the one to take with that engine."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from shardwise.layout import Layout
from shardwise.planner.cost.deepspeed import deepspeed_memory, deepspeed_time
from shardwise.planner.search.choices import divisors
from shardwise.planner.search.explain import over_the_host_limit, over_the_limit
from shardwise.planner.search.search import FAMILY_TIE, TIE, Candidate, refused_by_rule
from shardwise.plans.plan import Offload, Plan
from shardwise.units import format_gb, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Literal

    from shardwise.planner.cost.memory import Memory
    from shardwise.planner.cost.time import TimeModel
    from shardwise.planner.search.search import Answer, Question


class _Spec(NamedTuple):
    stage: Literal[0, 1, 2, 3]
    parameters: Literal["none", "cpu"] = "none"
    optimizer: Literal["none", "cpu"] = "none"


_SPECS = {
    "deepspeed zero0": _Spec(0),
    "deepspeed zero1": _Spec(1),
    "deepspeed zero2": _Spec(2),
    "deepspeed zero3": _Spec(3),
    "deepspeed zero2 offload": _Spec(2, optimizer="cpu"),
    "deepspeed zero3 offload": _Spec(3, optimizer="cpu"),
    "deepspeed infinity": _Spec(3, parameters="cpu", optimizer="cpu"),
}
"""Name -> its settings, the simplest first."""
_DTYPES = {"fp32", "bf16", "fp16"}


@dataclass(frozen=True, kw_only=True)
class ZeroForm:
    """One way to train with DeepSpeed: the fastest of its plans that fit, or why there is none."""

    name: str
    best: Candidate | None
    refusal: str = ""
    """Why there is none."""
    memory: Memory | None = None
    """Of its plans the least that is needed, where none fits."""

    @property
    def offloads(self) -> bool:
        """Whether it offloads to the host."""
        return _SPECS[self.name].optimizer != "none"


def deepspeed_forms(question: Question) -> tuple[ZeroForm, ...]:
    """Return DeepSpeed's forms on the question's cluster, the simplest first; all ranks share or none does."""
    times = question.time_model()
    return tuple(_form(question, times, name, spec) for name, spec in _SPECS.items())


def choose_form(forms: Sequence[ZeroForm]) -> ZeroForm | None:
    """Return the fastest form, or the simplest of those within model error; None where none fits.

    Offload is taken only where nothing else fits, as with the native plans.
    """
    fits = [form for form in forms if form.best is not None]
    kept = [form for form in fits if not form.offloads] or fits
    if not kept:
        return None
    limit = min(_seconds(form) for form in kept) * (1 + FAMILY_TIE)
    return next(form for form in kept if _seconds(form) <= limit)


def form_reason(form: ZeroForm, chosen: ZeroForm | None) -> str:
    """Return one sentence: why a form was not chosen, or that it was."""
    if form.best is None:
        return form.refusal
    if chosen is None or form is chosen:
        return "chosen"
    if form.offloads and not chosen.offloads:
        host = format_gb(form.best.memory.host)
        return f"not needed: {chosen.name} fits without it; {host} on the host for each device"
    change = _seconds(form) / _seconds(chosen) - 1
    if change < 0.005:
        return f"{max(0.0, -change):.0%} faster, within model error, and less simple"
    return f"{change:.0%} slower"


def beside_native(form: ZeroForm, answer: Answer) -> str:
    """Return one sentence: what the engine costs or saves compared with the best native plan."""
    if form.best is None or answer.best is None:
        return "no native plan fits" if answer.best is None else form.refusal
    mine, native = form.best, answer.best
    change = mine.time.seconds / native.time.seconds - 1
    text = "as fast as"
    if abs(change) >= TIE:
        text = f"{abs(change):.0%} {'slower' if change > 0 else 'faster'} than"
    return (
        f"{format_seconds(mine.time.seconds)} a step in {format_gb(mine.memory.total)}, {text} native {native.family}"
        f" ({format_seconds(native.time.seconds)}, {format_gb(native.memory.total)})"
    )


def _form(question: Question, times: TimeModel, name: str, spec: _Spec) -> ZeroForm:
    refusal = _refusal(question, spec)
    if refusal:
        return ZeroForm(name=name, best=None, refusal=refusal)
    best: Candidate | None = None
    least: Memory | None = None
    for plan in _plans(question, spec):
        refusal = refused_by_rule(question, plan)
        if refusal:
            continue
        shape = question.model.for_plan(plan)
        memory = deepspeed_memory(shape, plan, optimizer=question.optimizer, context=question.context)
        if least is None or memory.total < least.total:
            least = memory
        if not question.has_capacity(memory):
            continue
        time = deepspeed_time(times, shape, plan)
        if best is None or time.seconds < best.time.seconds * (1 - TIE):
            best = Candidate(plan=plan, memory=memory, time=time)
    if best is not None or least is None:
        return ZeroForm(name=name, best=best, refusal="" if best is not None else refusal)
    exceeds = over_the_limit if least.total > question.capacity else over_the_host_limit
    return ZeroForm(name=name, best=None, refusal=exceeds(least, question), memory=least)


def _refusal(question: Question, spec: _Spec) -> str:
    """Return why a form has no plan, whatever its memory."""
    devices = question.cluster.num_devices
    if question.precision.compute not in _DTYPES:
        return f"DeepSpeed does not compute in {question.precision.compute}"
    if devices == 1 and spec.stage and spec.optimizer == "none":
        return "one device has no other to shard over"
    if devices == 1 and spec == (3, "none", "cpu"):
        return "on one device the same as deepspeed zero2 offload"
    if question.batch_size % devices:
        return f"a batch of {question.batch_size} does not divide by {devices} devices"
    return ""


def _plans(question: Question, spec: _Spec) -> Iterator[Plan]:
    """Yield plans of a form: micro-batches and recompute, the simplest first."""
    devices = question.cluster.num_devices
    layout = Layout(shard=devices) if spec.stage and devices > 1 else Layout(replicate=devices)
    for recompute in ("none", "full"):
        for micro_batch in reversed(divisors(question.batch_size // devices)):
            yield dataclasses.replace(
                Plan(precision=question.precision),
                engine="deepspeed",
                layout=layout,
                zero=spec.stage if devices > 1 else 0,
                micro_batch=micro_batch,
                accumulation=question.batch_size // devices // micro_batch,
                recompute=recompute,
                offload=Offload(parameters=spec.parameters, optimizer=spec.optimizer),
            )


def _seconds(form: ZeroForm) -> float:
    return form.best.time.seconds if form.best is not None else float("inf")
