"""Candidate plans for a model, a cluster and a batch size, and lower bounds of their memory and time."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

from shardwise.layout import Layout
from shardwise.planner.cost.events import pipeline_floor
from shardwise.planner.cost.stage_costs import context_exchange, numel_of, tensor_exchange
from shardwise.planner.cost.stages import PipelineShape, even_stages
from shardwise.plans.pipeline import SCHEDULES, stages_per_rank
from shardwise.plans.sections import Offload, Pipeline
from shardwise.units import ELEMENT_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardwise.planner.cost.stages import StageParts
    from shardwise.planner.cost.time import TimeModel
    from shardwise.planner.model.shape import ModelShape, Part, Recompute
    from shardwise.planner.search.search import Question
    from shardwise.plans.plan import Plan


RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
OFFLOADS = (("none", "none"), ("none", "cpu"), ("cpu", "cpu"))
"""Offload targets of parameters and optimizer states."""
SPEED_OPTIONS = ("compile", "capture", "fused_loss", "recompute", "micro_batch", "accumulation")
"""Fields of a plan that change its speed and memory, but neither the algorithm nor the precision."""
LEAST_TOKENS = 4096
"""Minimum tokens per sample on each context-parallel rank (a judgement, not a measurement)."""


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


def groups(shape: ModelShape, world_size: int, devices_per_node: int, batch_size: int) -> Iterator[ChoiceGroup]:
    """Yield every group whose data-parallel degree divides the batch; tensor parallelism stays inside a node."""
    for pp, cp, tp in _model_degrees(shape, world_size, devices_per_node):
        tokens = shape.tokens_per_sample
        sequence_parallel = tp > 1 and tokens is not None and tokens // cp % tp == 0
        dp = world_size // tp // pp // cp
        if batch_size % dp:
            continue
        for micro_batch in divisors(batch_size // dp):
            number = batch_size // dp // micro_batch
            for recompute in RECOMPUTES:
                for schedule in _schedules(shape, pp, number, recompute):
                    yield ChoiceGroup(pp, cp, tp, dp, micro_batch, number, recompute, schedule, sequence_parallel)


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


def _schedules(shape: ModelShape, pp: int, number: int, recompute: Recompute) -> Sequence[str]:
    """Return the pipeline schedules that can run this many micro-batches."""
    if pp == 1:
        return ("1f1b",)
    found = []
    for name, schedule in SCHEDULES.items():
        fits = pp * schedule.stages_per_rank <= shape.num_blocks and number >= pp and schedule.accepts(pp, number)
        if schedule.is_searched and fits and (recompute == "none" or not schedule.splits_backward):
            found.append(name)
    return found


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
        "sequence_parallel": group.sequence_parallel,
        "fused_loss": variant.fused_loss,
        "gradient_sync": variant.gradient_sync,
        "pipeline": Pipeline(schedule=group.schedule) if group.pp > 1 else base.pipeline,  # type: ignore[arg-type]
        "offload": Offload(parameters=variant.offload[0], optimizer=variant.offload[1]),  # type: ignore[arg-type]
    }
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
_RECOMPUTE = ("none", "selective", "full")
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


def splits_model(plan: Plan) -> bool:
    """Whether a plan splits matrices, layers or sequences."""
    return plan.layout.pp > 1 or plan.layout.tp > 1 or plan.layout.cp > 1


def simplicity(plan: Plan) -> tuple[int, ...]:
    """Return a sort key from simple to complex, unique among the plans of a search."""
    layout = plan.layout
    return (
        _ORDER[family_of(plan)],
        layout.pp,
        layout.tp,
        layout.cp,
        plan.fused_loss,
        plan.offload.parameters != "none",
        _RECOMPUTE.index(plan.recompute),
        plan.gradient_sync != "last",
        _SCHEDULE_ORDER.index(plan.pipeline.schedule) if layout.pp > 1 else 0,
        plan.zero,
        plan.accumulation,
        layout.replicate,
        plan.sequence_parallel,
    )


# Lower bounds of memory and time, each computed in microseconds, so that few plans need a full prediction.


class Floors:
    """Lower bounds of memory and time for the plans of one question."""

    def __init__(self, question: Question, time: TimeModel) -> None:
        self._model = question.model
        self._time = time
        self._parameter_bytes = ELEMENT_BYTES[question.precision.parameter]
        self._compute_bytes = ELEMENT_BYTES[question.precision.activations]
        self._reduce_bytes = ELEMENT_BYTES[question.precision.reduce]
        least = min(1.0, question.optimizer.states) if question.optimizer.matrices else question.optimizer.states
        self._states = least * ELEMENT_BYTES[question.precision.optimizer]
        self._numels: dict[tuple[int, int], tuple[float, float, float]] = {}
        self._stages_known: dict[tuple[object, ...], tuple[StageParts, ...]] = {}
        self._saved: dict[tuple[object, ...], float] = {}
        self._busy: dict[tuple[object, ...], float] = {}

    def seconds(self, group: ChoiceGroup) -> float:
        """Return a lower bound of the step time in a group: compute, tensor-parallel collectives, and bubbles."""
        seconds = min(self._seconds(self._shape(group, gathered=gathered), group) for gathered in (False, True))
        return seconds * (1 + self._time.jitter(self._time.cluster.num_devices))

    def _shape(self, group: ChoiceGroup, *, gathered: bool) -> ModelShape:
        return self._model.sliced(group.cp, group.tp, gathered=gathered)

    def _seconds(self, shape: ModelShape, group: ChoiceGroup) -> float:
        stages = self._stages(shape, group)
        by_stage, busy = [], [0.0] * group.pp
        for stage in stages:
            seconds = sum(count * self._part_seconds(part, shape, group) for part, count in stage.parts)
            by_stage.append(seconds)
            busy[stage.rank] += seconds
        if SCHEDULES[group.schedule].splits_backward:
            return group.accumulation * max(busy)
        return pipeline_floor(busy, by_stage, group.accumulation)

    def _stages(self, shape: ModelShape, group: ChoiceGroup) -> tuple[StageParts, ...]:
        key = (id(shape), group.pp, SCHEDULES[group.schedule].placement)
        if key not in self._stages_known:
            self._stages_known[key] = even_stages(shape, group.pp, group.schedule)
        return self._stages_known[key]

    def _part_seconds(self, part: Part, shape: ModelShape, group: ChoiceGroup) -> float:
        key = (id(part), group.tp, group.micro_batch, group.recompute, group.sequence_parallel)
        if key not in self._busy:
            cost = self._time.compute(shape.compute).cost(
                part, group.micro_batch, tp=group.tp, sequence_parallel=group.sequence_parallel, compiled=False
            )
            seconds, num_passes = cost.forward.total + cost.backward.total, 2
            if part.kind == "block" and group.recompute != "none":
                seconds, num_passes = seconds + cost.again(group.recompute).total, 3
            self._busy[key] = seconds + num_passes * self._exchange(part, shape, group)
        return self._busy[key]

    def _exchange(self, part: Part, shape: ModelShape, group: ChoiceGroup) -> float:
        """Return the exposed communication inside one pass, without that of a head whose loss may be fused."""
        wires, samples = self._time.wires, group.micro_batch
        waits = context_exchange(part, samples, Layout(cp=group.cp, tp=group.tp), wires)
        if part.kind == "last" and shape.head is not None:
            return waits
        return waits + tensor_exchange(part, samples, group.tp, wires, sequence_parallel=group.sequence_parallel)

    def memory(self, group: ChoiceGroup, variant: PlanVariant) -> float:
        """Return a lower bound of a plan's memory: states in the update, or states and activations before backward.

        It assumes equal stages, which bounds the largest from below.
        """
        is_sharded, shard = variant.zero >= 2, variant.shard * group.cp
        shape = self._shape(group, gathered=is_sharded)
        numel, trained, narrow = (total / group.pp for total in self._numel(shape, group.tp))
        shards = shard if is_sharded else 1
        parameters = gradients = states = 0.0
        if variant.offload[0] == "none":
            stored = self._parameter_bytes * numel - (self._parameter_bytes - self._compute_bytes) * narrow
            parameters, gradients = stored / shards, self._parameter_bytes * trained / shards
        if variant.offload[1] == "none":
            states = self._states * trained / (shard if variant.zero else 1)
        # Gradients stay between micro-batches, unsharded unless each is reduced; DDP's buckets stay always.
        stay = 0.0
        if group.accumulation > 1 or (not is_sharded and group.pp == group.tp == 1 and group.dp * group.cp > 1):
            whole = is_sharded and variant.gradient_sync == "last" and group.accumulation > 1
            stay = self._reduce_bytes * trained if whole else gradients
        gathered = self._compute_bytes * numel if variant.zero == 2 else 0.0
        return parameters + states + max(gradients, stay + gathered + self._activations(shape, group))

    def _numel(self, shape: ModelShape, tp: int) -> tuple[float, float, float]:
        """Return the number of a tensor-parallel rank's parameters: all, trained, and stored in the compute dtype."""
        key = (id(shape), tp)
        if key not in self._numels:
            layout = Layout(tp=tp)
            numel = trained = narrow = 0.0
            for part in shape.parts:
                numel += part.count * numel_of(part, layout)
                trained += part.count * numel_of(part, layout, trained=True)
                for weight in part.weights:
                    if weight.narrow:
                        narrow += part.count * weight.numel / (tp if weight.split else 1)
            self._numels[key] = (numel, trained, narrow)
        return self._numels[key]

    def _activations(self, shape: ModelShape, group: ChoiceGroup) -> float:
        """Return the bytes of block activations for the micro-batches that the first rank has in flight."""
        key = (id(shape), group.pp, group.tp, group.micro_batch, group.recompute, group.sequence_parallel)
        if key not in self._saved:
            every, smallest = 0.0, math.inf
            for part in shape.parts:
                if part.kind == "block":
                    saved = part.footprints[group.recompute].saved
                    size = saved.at(group.micro_batch, tp=group.tp, sequence_parallel=group.sequence_parallel)
                    every, smallest = every + part.count * size, min(smallest, size)
            blocks = shape.num_blocks // group.pp
            least = blocks * smallest if blocks else 0.0
            self._saved[key] = every if group.pp == 1 else least
        chunks = stages_per_rank(group.schedule, group.pp)
        actions = PipelineShape(group.pp, group.schedule, group.accumulation, chunks)
        return self._saved[key] * sum(actions.in_flight(0, chunk) for chunk in range(chunks)) / chunks
