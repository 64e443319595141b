"""Every plan worth a look for a model, a cluster and a batch: layouts, micro-batches, recompute, schedules."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

from shardwise.layout import Layout
from shardwise.planner.cost.stages import SPLIT_BACKWARD, stages_per_rank
from shardwise.plans.plan import Offload, Pipeline, Plan

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardwise.planner.model.shape import ModelShape, Recompute

RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
SCHEDULES = ("1f1b", "interleaved_1f1b", "zbv")
"""The leanest in memory, the one with half its bubbles, the one with hardly any; the others are like one of these."""
OFFLOADS = (("none", "none"), ("none", "cpu"), ("cpu", "cpu"))
"""(parameters, optimizer)."""
LEAST_TOKENS = 4096
"""Of a sample that a rank keeps where ranks share its tokens: shorter ones are shared out whole (judgement)."""


class Group(NamedTuple):
    """What sets compute and bubbles; plans of a group differ in what is cut over readers."""

    pp: int
    cp: int
    tp: int
    dp: int
    micro_batch: int
    accumulation: int
    recompute: Recompute
    schedule: str
    sequence_parallel: bool


class Variant(NamedTuple):
    """How readers share what they hold, and whether logits are never held whole."""

    shard: int
    zero: int
    gradient_sync: str = "last"
    offload: tuple[str, str] = ("none", "none")
    fused_loss: bool = False


def divisors(number: int) -> list[int]:
    """Return all divisors, rising."""
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def groups(shape: ModelShape, world_size: int, devices_per_node: int, batch_size: int) -> Iterator[Group]:
    """Yield every group whose readers divide the batch; tensor parallelism stays inside a node."""
    for pp, cp, tp in _cuts(shape, world_size, devices_per_node):
        tokens = shape.tokens_per_sample
        sequence_parallel = tp > 1 and tokens is not None and tokens // cp % tp == 0
        dp = world_size // tp // pp // cp
        if batch_size % dp:
            continue
        for micro_batch in divisors(batch_size // dp):
            number = batch_size // dp // micro_batch
            for recompute in RECOMPUTES:
                for schedule in _schedules(shape, pp, number, recompute):
                    yield Group(pp, cp, tp, dp, micro_batch, number, recompute, schedule, sequence_parallel)


def _cuts(shape: ModelShape, world_size: int, devices_per_node: int) -> Iterator[tuple[int, int, int]]:
    """Yield degrees of (pp, cp, tp) that cut the model; stages and slices are not cut together."""
    for tp in shape.tp_degrees:
        if world_size % tp or devices_per_node % tp:
            continue
        for pp in divisors(world_size // tp):
            if pp <= (shape.num_blocks if shape.stages else 1):
                yield pp, 1, tp
        for cp in slices(shape):
            if world_size // tp % cp == 0 and shape.heads % (cp * tp) == 0:
                yield 1, cp, tp


def slices(shape: ModelShape) -> list[int]:
    """Return the degrees above 1 by which the tokens of a sample may be cut: each slice stays long."""
    tokens = shape.tokens_per_sample or 0
    return [cp for cp in shape.cp_degrees if cp > 1 and tokens // cp >= LEAST_TOKENS]


def _schedules(shape: ModelShape, pp: int, number: int, recompute: Recompute) -> Sequence[str]:
    """Return the schedules that can run so many micro-batches."""
    if pp == 1:
        return ("1f1b",)
    return [
        schedule
        for schedule in SCHEDULES
        if number >= pp
        and pp * stages_per_rank(schedule, pp) <= shape.num_blocks
        and (schedule != "interleaved_1f1b" or number % (number // pp) == 0)
        and (schedule not in SPLIT_BACKWARD or recompute == "none")
    ]


def variants(group: Group) -> Iterator[Variant]:
    """Yield how a group's readers may share, without offload and with gradients summed once."""
    yield Variant(1, 0)
    for shard in divisors(group.dp):
        if shard * group.cp == 1:
            continue
        if shard == group.dp and group.tp == 1:
            yield Variant(shard, 1)
        if group.schedule not in SPLIT_BACKWARD:
            yield Variant(shard, 2)
            yield Variant(shard, 3)


def leaner(group: Group, variant: Variant, *, offload: bool, fuses: bool = False) -> Iterator[Variant]:
    """Yield forms of a variant that need less memory and more time, the quickest first.

    `fuses` says that the loss may be fused, which takes hardly any time.
    """
    syncs = ["every"] if variant.zero >= 2 and group.accumulation > 1 and group.pp == 1 else []
    fused = [False, True] if fuses else [variant.fused_loss]
    forms = [
        variant._replace(gradient_sync=sync, fused_loss=fuse, offload=kind)
        for kind in (OFFLOADS[1:] if offload else OFFLOADS[:1])
        if kind[0] == "none" or variant.zero >= 2
        for sync in ("last", *syncs)
        for fuse in fused
    ]
    yield from (form for form in forms if form != variant)


def make_plan(base: Plan, group: Group, variant: Variant) -> Plan:
    """Return the plan of a choice; all it does not say is as in `base`."""
    fields: dict[str, Any] = {
        "layout": Layout(
            pp=group.pp, replicate=group.dp // variant.shard, shard=variant.shard, cp=group.cp, tp=group.tp
        ),
        "zero": variant.zero,
        "micro_batch": group.micro_batch,
        "accumulation": group.accumulation,
        "recompute": group.recompute,
        "sequence_parallel": group.sequence_parallel,
        "fused_loss": variant.fused_loss,
        "gradient_sync": variant.gradient_sync,
        "pipeline": Pipeline(schedule=group.schedule) if group.pp > 1 else base.pipeline,  # type: ignore[arg-type]
        "offload": Offload(parameters=variant.offload[0], optimizer=variant.offload[1]),  # type: ignore[arg-type]
    }
    return dataclasses.replace(base, **fields)
