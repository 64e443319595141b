"""Candidate plans for a model, a cluster and a batch size, their families, and their order from simple to complex.

The idea: plans form groups that share compute and bubbles (`groups`: degrees, micro-batches, recompute, pipeline
schedule and split); plans of a group differ in how data-parallel ranks shard their states (`variants`). The invariant:
every candidate is a plan that `train` runs, by the rules of `plans/pipeline.py` and the engine.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

from shardwise.layout import Layout
from shardwise.plans.pipeline import SCHEDULES, balanced_bounds, even_bounds
from shardwise.plans.sections import Offload, Pipeline

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from shardwise.planner.model.shape import ModelShape, Recompute
    from shardwise.plans.plan import Plan


RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
OFFLOADS = (("none", "none"), ("none", "cpu"), ("cpu", "cpu"))
"""Offload targets of parameters and optimizer states."""
SPEED_OPTIONS = ("compile", "capture", "fused_loss", "recompute", "recompute_blocks", "micro_batch", "accumulation")
"""Fields of a plan that change its speed and memory, but neither the algorithm nor the precision."""
LEAST_TOKENS = 8192
"""Minimum tokens per sample on each context-parallel rank: Llama 3 split 131,072 tokens over 16 ranks and none of 8,192
(Llama team 2024, table 4)."""
RECOMPUTE_STEPS = 4
"""Steps in which the search varies the number of recomputed blocks; `search.py` refines the chosen number."""
MOST_CHUNKS = 8
"""Largest number of virtual pipeline stages per rank; each doubling halves the bubble and doubles the messages."""


class ChoiceGroup(NamedTuple):
    """The choices that determine compute and bubbles; plans of a group differ in data-parallel sharding only."""

    pp: int
    cp: int
    tp: int
    dp: int
    micro_batch: int
    accumulation: int
    recompute: Recompute
    schedule: str
    sequence_parallel: bool
    recompute_blocks: int = 0
    """Recomputed blocks of each stage; 0 means all."""
    split: tuple[int, ...] = ()
    """First block of each pipeline stage after the first; empty means the even split of the schedule."""


class PlanVariant(NamedTuple):
    """The choices of sharding and offload over data-parallel ranks, and of a fused loss."""

    shard: int
    zero: int
    gradient_sync: str = "last"
    offload: tuple[str, str] = ("none", "none")
    fused_loss: bool = False


def divisors(number: int) -> list[int]:
    """Return all divisors in ascending order."""
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


class Degrees(NamedTuple):
    """The degrees of parallelism of a layout; dp is replicate times shard."""

    pp: int
    cp: int
    tp: int
    dp: int

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.pp * self.cp * self.tp * self.dp


def groups(shape: ModelShape, world_size: int, devices_per_node: int, batch_size: int) -> Iterator[ChoiceGroup]:
    """Yield every group whose data-parallel degree divides the batch; tensor parallelism stays inside a node."""
    yield from groups_of_degrees(shape, degrees_of(shape, world_size, devices_per_node, batch_size), batch_size)


def degrees_of(shape: ModelShape, world_size: int, devices_per_node: int, batch_size: int) -> Iterator[Degrees]:
    """Yield the degrees of every layout of a number of ranks whose data-parallel degree divides the batch."""
    for pp, cp, tp in _model_degrees(shape, world_size, devices_per_node):
        dp = world_size // tp // pp // cp
        if batch_size % dp == 0:
            yield Degrees(pp, cp, tp, dp)


def groups_of_degrees(shape: ModelShape, every: Iterable[Degrees], batch_size: int) -> Iterator[ChoiceGroup]:
    """Yield every group of these degrees."""
    pipelines: dict[int, list[PipelineChoice]] = {}
    for degrees in every:
        pp, cp, tp, dp = degrees
        tokens = shape.tokens_per_sample
        sequence_parallel = tp > 1 and tokens is not None and tokens // cp % tp == 0
        if pp not in pipelines:
            pipelines[pp] = list(_pipelines(shape, pp))
        yield from _groups_of(pipelines[pp], degrees, batch_size // dp, sequence_parallel=sequence_parallel)


def groups_of_layout(shape: ModelShape, layout: Layout, num_samples: int) -> Iterator[ChoiceGroup]:
    """Yield every group of a layout whose data-parallel ranks have `num_samples` samples in a step."""
    pp, cp, tp, tokens = layout.pp, layout.cp, layout.tp, shape.tokens_per_sample
    sequence_parallel = tp > 1 and tokens is not None and tokens // cp % tp == 0
    degrees = (pp, cp, tp, layout.dp)
    yield from _groups_of(list(_pipelines(shape, pp)), degrees, num_samples, sequence_parallel=sequence_parallel)


def _groups_of(
    pipelines: list[PipelineChoice],
    degrees: tuple[int, int, int, int],
    num_samples: int,
    *,
    sequence_parallel: bool,
) -> Iterator[ChoiceGroup]:
    """Yield the groups of the degrees of (pp, cp, tp, dp), for every micro-batch, pipeline and recompute."""
    pp = degrees[0]
    for micro_batch in divisors(num_samples):
        number = num_samples // micro_batch
        for choice in pipelines:
            if pp > 1 and (number < pp or not SCHEDULES[choice.schedule].accepts(pp, number)):
                continue
            for recompute, blocks in choice.recomputes:
                yield ChoiceGroup(
                    *(*degrees, micro_batch, number, recompute, choice.schedule, sequence_parallel),
                    *(blocks, choice.split),
                )


def _model_degrees(shape: ModelShape, world_size: int, devices_per_node: int) -> Iterator[tuple[int, int, int]]:
    """Yield the degrees of (pp, cp, tp); pp and cp are not combined."""
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
    """Return the context-parallel degrees above 1 that leave each rank at least LEAST_TOKENS."""
    tokens = shape.tokens_per_sample or 0
    return [cp for cp in shape.cp_degrees if cp > 1 and tokens // cp >= LEAST_TOKENS]


class PipelineChoice(NamedTuple):
    """A pipeline schedule, its split, and the policies of recompute with their numbers of blocks per stage."""

    schedule: str
    split: tuple[int, ...]
    recomputes: tuple[tuple[Recompute, int], ...]


def _pipelines(shape: ModelShape, pp: int) -> Iterator[PipelineChoice]:
    """Yield the searched schedules with their splits: for every number of virtual stages, even and balanced ones."""
    if pp == 1:
        yield PipelineChoice("1f1b", (), _recomputes(max(1, shape.num_blocks)))
        return
    flops = _block_flops(shape)
    for name, schedule in SCHEDULES.items():
        chunks = default = schedule.stages_per_rank
        while schedule.is_searched and pp * chunks <= shape.num_blocks and chunks <= MOST_CHUNKS:
            even = even_bounds(shape.num_blocks, pp * chunks)
            balanced = balanced_bounds(*flops, num_stages=pp * chunks)
            for bounds in dict.fromkeys((even, balanced)):
                largest = max(end - start for start, end in itertools.pairwise(bounds))
                split = () if chunks == default and bounds == even else bounds[1:-1]
                policies = _recomputes(largest, splits_backward=schedule.splits_backward)
                yield PipelineChoice(name, split, policies)
            if schedule.placement != "loop":
                break
            chunks *= 2


def _recomputes(num_blocks: int, *, splits_backward: bool = False) -> tuple[tuple[Recompute, int], ...]:
    """Return the policies of recompute for stages of up to `num_blocks` blocks; a split backward allows none."""
    found: list[tuple[Recompute, int]] = [("none", 0)]
    if splits_backward:
        return tuple(found)
    numbers = {-(-num_blocks * step // RECOMPUTE_STEPS) for step in range(1, RECOMPUTE_STEPS)}
    for policy in RECOMPUTES[1:]:
        found += [(policy, number) for number in (0, *sorted(numbers - {num_blocks}))]
    return tuple(found)


def _block_flops(shape: ModelShape) -> tuple[list[float], float, float]:
    """Return the FLOPs of each block, and of the modules before and after the blocks."""
    blocks: list[float] = []
    outside = {"first": 0.0, "last": 0.0}
    for part in shape.parts:
        if part.kind == "block":
            blocks += [part.work.flops] * part.count
        else:
            outside[part.kind] += part.count * part.work.flops
    return blocks, outside["first"], outside["last"]


def stage_bounds(num_blocks: int, pp: int, schedule: str, split: tuple[int, ...]) -> tuple[int, ...]:
    """Return the first block of each stage, followed by the number of blocks."""
    if split or pp == 1:
        return (0, *split, num_blocks)
    return even_bounds(num_blocks, pp * SCHEDULES[schedule].stages_per_rank)


def variants(group: ChoiceGroup) -> Iterator[PlanVariant]:
    """Yield the sharding variants of a group, without offload and with one gradient reduction per step."""
    yield PlanVariant(1, 0)
    for shard in divisors(group.dp):
        if shard * group.cp == 1:
            continue
        if shard == group.dp and group.tp == 1:
            yield PlanVariant(shard, 1)
        if not SCHEDULES[group.schedule].splits_backward:
            yield PlanVariant(shard, 2)
            yield PlanVariant(shard, 3)


def leaner(group: ChoiceGroup, variant: PlanVariant, *, offload: bool, fuses: bool = False) -> Iterator[PlanVariant]:
    """Yield forms of a variant that need less memory and more time, the fastest first.

    `fuses` allows a fused loss, which takes hardly more time.
    """
    syncs = ["every"] if variant.zero >= 2 and group.accumulation > 1 and group.pp == 1 else []
    fused = [False, True] if fuses else [variant.fused_loss]
    kinds = OFFLOADS[1:] if offload else OFFLOADS[:1]
    for kind, sync, fuse in itertools.product(kinds, ("last", *syncs), fused):
        form = variant._replace(gradient_sync=sync, fused_loss=fuse, offload=kind)
        is_possible = kind[0] == "none" or variant.zero >= 2
        if is_possible and form != variant:
            yield form


def better_plans(group: ChoiceGroup, variant: PlanVariant) -> list[tuple[ChoiceGroup, PlanVariant]]:
    """Return plans of the same family that are simpler and at least as fast: the given one is needed if none fits.

    They have no recompute, or ZeRO-2, which gathers parameters less often than ZeRO-3.
    """
    found = []
    if group.recompute != "none":
        found.append((group._replace(recompute="none", recompute_blocks=0), variant))
    if variant.zero == 3 and group_family(group, variant) != "zero3":
        found.append((group, variant._replace(zero=2)))
    return found


def make_plan(base: Plan, group: ChoiceGroup, variant: PlanVariant) -> Plan:
    """Return the plan of a group and a variant; other fields are those of `base`."""
    fields: dict[str, Any] = {
        "layout": Layout(
            pp=group.pp, replicate=group.dp // variant.shard, shard=variant.shard, cp=group.cp, tp=group.tp
        ),
        "zero": variant.zero,
        "micro_batch": group.micro_batch,
        "accumulation": group.accumulation,
        "recompute": group.recompute,
        "recompute_blocks": group.recompute_blocks,
        "sequence_parallel": group.sequence_parallel,
        "fused_loss": variant.fused_loss,
        "gradient_sync": variant.gradient_sync,
        "pipeline": base.pipeline,
        "offload": Offload(parameters=variant.offload[0], optimizer=variant.offload[1]),  # type: ignore[arg-type]
    }
    if group.pp > 1:
        fields["pipeline"] = Pipeline(schedule=group.schedule, split=group.split)  # type: ignore[arg-type]
    if SCHEDULES[group.schedule].splits_backward:
        fields["compile"] = "none"  # compiled blocks do not support a split backward
    return dataclasses.replace(base, **fields)


# Families of plans, and the order of plans from simple to complex.


FAMILIES: dict[str, str] = {
    "ddp": "everything replicated on every device",
    "zero1": "optimizer states sharded",
    "zero2": "optimizer states and gradients sharded",
    "zero3": "optimizer states, gradients and parameters sharded (fsdp)",
    "hsdp": "sharded inside groups, replicated across them",
    "cp": "sequences split",
    "tp": "matrices split",
    "pp": "layers in stages",
    "3d": "layers in stages, matrices split",
    "offload": "states offloaded to the host",
}
"""Families of plans by name with a description, the simplest first."""

_ORDER = {family: position for position, family in enumerate(FAMILIES)}
_SCHEDULE_ORDER = tuple(SCHEDULES)


def family_of(plan: Plan) -> str:
    """Return the family of a plan."""
    offload = (plan.offload.parameters, plan.offload.optimizer)
    return _family(plan.layout, plan.layout.dp, PlanVariant(plan.layout.shard, plan.zero, offload=offload))


def group_family(group: ChoiceGroup, variant: PlanVariant) -> str:
    """Return the family of the plan of a group and a variant."""
    return _family(group, group.dp, variant)


def _family(degrees: Layout | ChoiceGroup, dp: int, variant: PlanVariant) -> str:
    if variant.offload != ("none", "none"):
        return "offload"
    if degrees.cp > 1:
        return "cp"
    if degrees.pp > 1:
        return "3d" if degrees.tp > 1 else "pp"
    if degrees.tp > 1:
        return "tp"
    if variant.shard == 1:
        return "ddp"
    return "hsdp" if variant.shard < dp else f"zero{variant.zero}"


def shards_widely(degrees: Layout | ChoiceGroup, shard: int, zero: int, widest: float) -> bool:
    """Whether more than `widest` devices gather the parameters of a model without stages from each other."""
    return zero >= 2 and degrees.pp == 1 and shard * degrees.cp * degrees.tp > widest


def is_wide(plan: Plan, widest: float) -> bool:
    """Whether a plan without stages shards over more than `widest` devices."""
    return shards_widely(plan.layout, plan.layout.shard, plan.zero, widest)


def splits_model(plan: Plan) -> bool:
    """Whether a plan splits matrices, layers or sequences."""
    return plan.layout.pp > 1 or plan.layout.tp > 1 or plan.layout.cp > 1


def simplicity(plan: Plan) -> tuple[object, ...]:
    """Return a sort key from simple to complex, unique among the plans of a search."""
    layout = plan.layout
    return (
        _ORDER[family_of(plan)],
        layout.pp,
        layout.tp,
        layout.cp,
        plan.fused_loss,
        plan.offload.parameters != "none",
        RECOMPUTES.index(plan.recompute),
        plan.recompute_blocks,
        plan.gradient_sync != "last",
        _SCHEDULE_ORDER.index(plan.pipeline.schedule) if layout.pp > 1 else 0,
        len(plan.pipeline.split),
        plan.pipeline.split,
        plan.zero,
        plan.accumulation,
        layout.replicate,
        plan.sequence_parallel,
    )
