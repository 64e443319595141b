"""The limits of device and host memory, and the changes of a plan that would bring it below them.

The idea: each change (a higher ZeRO stage, recompute, offload) is applied to the plan, and its memory predicted again,
so that the bytes it saves are exact, and the text says which changes suffice.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardwise.planner.search.choices import slices
from shardwise.planner.search.question import FILL, HOST_FILL
from shardwise.planner.search.search import refused_by_rule
from shardwise.plans.sections import Offload
from shardwise.units import format_gb

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardwise.planner.cost.memory import Memory
    from shardwise.planner.search.question import Question
    from shardwise.plans.plan import Plan


LONG = ("activations", "logits and loss")
"""Kinds of memory that grow with the length of samples."""
LEAST_SAVING = 0.03
"""Part of a plan's memory that a change must save to be named."""
MOST_CHANGES = 4
"""Largest number of changes that are combined."""


def capacity_text(question: Question) -> str:
    """Return one sentence with a device's memory, how much of it a plan may use, and why."""
    device = question.cluster.device
    size, usable = format_gb(device.memory_bytes), format_gb(question.capacity)
    if question.capacity == question.max_bytes:
        return f"--max-memory allows {usable} of the {size} of {device.name}"
    if question.memory_ratio > 1:
        return (
            f"{device.name} has {size}, of which a plan may use {usable}, because own runs needed"
            f" {question.memory_ratio:.2f} times the predicted memory"
        )
    return f"{device.name} has {size}, of which {FILL:.0%} may be used"


def over_the_limit(memory: Memory, question: Question) -> str:
    """Return one sentence with the memory that a plan needs, the limit, and how the limit is computed."""
    limit = f"{FILL:.0%} of the device's {format_gb(question.cluster.device.memory_bytes)}"
    if question.capacity == question.max_bytes:
        limit = "--max-memory"
    elif question.memory_ratio > 1:
        limit += f", divided by the {question.memory_ratio:.2f} that own runs needed in addition"
    return f"needs {format_gb(memory.total)}, but a plan may use {format_gb(question.capacity)} ({limit})"


def over_the_host_limit(memory: Memory, question: Question) -> str:
    """Return one sentence with the host memory that a plan needs per device, and the limit."""
    node = question.cluster.node
    return (
        f"needs {format_gb(memory.host)} of host memory for each device,"
        f" but a plan may use {format_gb(question.host_capacity)}"
        f" ({HOST_FILL:.0%} of a device's share of the node's {format_gb(node.host_memory_bytes)})"
    )


def too_large(plan: Plan, memory: Memory, question: Question) -> str:
    """Return the limit of device or host memory that a plan exceeds, with the changes after which it fits."""
    if memory.total <= question.capacity:
        return over_the_host_limit(memory, question)
    return f"{over_the_limit(memory, question)}: {way_to_fit(plan, memory, question)}"


# The changes that save memory.


@dataclass(frozen=True, kw_only=True)
class MemorySaving:
    """A change of a plan that lowers its peak."""

    text: str
    plan: Plan
    memory: Memory
    saved: float
    """Bytes of device memory."""

    def __str__(self) -> str:
        return f"{self.text} (-{format_gb(self.saved)})"


def savings(plan: Plan, memory: Memory, question: Question) -> list[MemorySaving]:
    """Return the changes that would lower the peak of a plan, those that cost the least time first."""
    found = []
    for text, changed in _changes(plan, question):
        if refused_by_rule(question, changed):
            continue
        needed = question.memory_of(changed)
        if memory.total - needed.total > LEAST_SAVING * memory.total:
            found.append(MemorySaving(text=text, plan=changed, memory=needed, saved=memory.total - needed.total))
    return found


def way_to_fit(plan: Plan, memory: Memory, question: Question) -> str:
    """Return the change or the changes after which a plan fits, or by how much they fail."""
    ways = savings(plan, memory, question)
    enough = [way for way in ways if question.has_capacity(way.memory)]
    if enough:
        return f"{' or '.join(map(str, enough[:2]))} would be enough"
    taken, left = list[MemorySaving](), memory
    while ways and len(taken) < MOST_CHANGES and not question.has_capacity(left):
        taken.append(max(ways, key=lambda way: way.saved))
        left = taken[-1].memory
        ways = savings(taken[-1].plan, left, question)
    *first, last = [*map(str, taken)] or [""]
    texts = f"{', '.join(first)} and {last}" if first else last
    if question.has_capacity(left):
        return f"{texts} together would be enough"
    other = "use more devices"
    saved = 0.5 * sum(left.at_peak.get(name, 0.0) for name in LONG)
    if question.model.plain.tokens_per_sample and 0 < left.total - question.capacity <= saved:
        other += f" or halve the length (-{format_gb(saved)})"
    if not taken:
        return other
    if left.total <= question.capacity:
        return f"even {texts} would not be enough, since host memory is too small: {other}"
    return f"even {texts} would leave {format_gb(left.total)}: {other}"


def _changes(plan: Plan, question: Question) -> Iterator[tuple[str, Plan]]:
    """Yield changes of a plan that could lower its peak with their texts, those that cost the least time first."""

    def change(text: str, **values: Any) -> tuple[str, Plan]:
        return text, dataclasses.replace(plan, **values)

    if question.model.plain.head is not None and not plan.fused_loss:
        yield change("a fused loss", fused_loss=True)
    if plan.micro_batch > 1:
        number = plan.accumulation * plan.micro_batch
        yield change("micro-batches of 1", micro_batch=1, accumulation=number)
    yield from _sharded(plan)
    if plan.zero >= 2 and plan.accumulation > 1 and plan.gradient_sync == "last":
        yield change("gradients reduced in every micro-batch", gradient_sync="every")
    if plan.recompute != "full" or plan.recompute_blocks:
        yield change("full recompute", recompute="full", recompute_blocks=0)
    yield from _sliced(plan, question)
    if plan.zero and plan.offload.optimizer == "none":
        yield change("optimizer states on the host", offload=Offload(optimizer="cpu"))
    if plan.zero >= 2 and plan.offload.optimizer != "none" and plan.offload.parameters == "none":
        yield change("parameters on the host", offload=dataclasses.replace(plan.offload, parameters="cpu"))


def _sharded(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """Yield the plan with each higher ZeRO stage, over all its data-parallel ranks if it has none yet."""
    layout = plan.layout
    if not plan.zero:
        layout = dataclasses.replace(layout, replicate=1, shard=layout.replicate * layout.shard)
    if layout.shard * layout.cp == 1:
        return
    for zero in range(plan.zero + 1, 4):
        yield f"ZeRO-{zero}", dataclasses.replace(plan, layout=layout, zero=zero)  # type: ignore[arg-type]


def _sliced(plan: Plan, question: Question) -> Iterator[tuple[str, Plan]]:
    """Yield the plan with its sequences split over as many of its sharding ranks as possible."""
    layout = plan.layout
    degrees = [cp for cp in cp_degrees(question, layout.tp) if layout.shard % cp == 0]
    if layout.cp == layout.pp == 1 and degrees:
        cp = max(degrees)
        split = dataclasses.replace(layout, cp=cp, shard=layout.shard // cp)
        changed = dataclasses.replace(plan, layout=split, accumulation=cp * plan.accumulation)
        yield f"sequences split by cp {cp}", changed


def cp_degrees(question: Question, tp: int = 1) -> list[int]:
    """Return the context-parallel degrees that are possible with `tp`, since both split the heads."""
    shape, devices = question.model.plain, question.cluster.num_devices // tp
    return [cp for cp in slices(shape) if devices % cp == 0 and shape.heads % (cp * tp) == 0]
