"""Lower bounds of the memory and the time of plans, each computed in microseconds.

The idea: a bound that ignores what sharding sends (gathers, reductions, hops) needs only the times of a few kinds of
stages, so few plans need a full prediction. It counts what sharding launches, since steps of small models on many
devices consist of launches. The invariant: no bound is above the prediction of `cost/` (a test compares them).
"""

from __future__ import annotations

import itertools
import operator
from typing import TYPE_CHECKING, NamedTuple

from shardwise.layout import Layout
from shardwise.planner.cost.events import pipeline_floor
from shardwise.planner.cost.memory import FRAGMENTED
from shardwise.planner.cost.stage_costs import (
    batch_norm_exchange,
    context_exchange,
    numel_of,
    tensor_exchange,
    with_host_operators,
)
from shardwise.planner.cost.stages import PipelineShape, compiled_saves, stages_between
from shardwise.planner.model.forms import stores_half
from shardwise.planner.search.choices import OFFLOADS, ChoiceGroup, PlanVariant, divisors, stage_bounds
from shardwise.plans.pipeline import SCHEDULES
from shardwise.plans.sections import Float8
from shardwise.units import ELEMENT_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from shardwise.planner.cost.time import TimeModel
    from shardwise.planner.model.shape import Amount, ModelShape, Part, Recompute
    from shardwise.planner.search.choices import Degrees
    from shardwise.planner.search.question import Question


class Load(NamedTuple):
    """Number of recomputed and of other instances of each part of the model that a micro-batch runs through."""

    recomputed: tuple[int, ...]
    others: tuple[int, ...]

    def total(self, recomputed: Sequence[float], others: Sequence[float]) -> float:
        """Return the sum of a quantity, given its values for recomputed and for other instances of the parts."""
        # A search computes hundreds of thousands of these sums: map takes half the time of a loop.
        again: float = sum(map(operator.mul, self.recomputed, recomputed))
        return sum(map(operator.mul, self.others, others), again)


class Stages(NamedTuple):
    """The loads of a pipeline that determine its lower bounds."""

    before: tuple[Load, ...]
    """Stages that a micro-batch passes between each rank of `ranks` and the one before it."""
    ranks: tuple[Load, ...]
    """The last of the ranks with equal loads, over all of its stages."""
    first: tuple[Load, ...]
    """The stages of the first rank, which has the most micro-batches in flight."""


class Floors:
    """Lower bounds of memory and time for the plans of one question."""

    def __init__(self, question: Question, time: TimeModel) -> None:
        self._model = question.model
        self._time = time
        self._compiles = question.compile == "blocks"
        self._syncs_batch_norm = question.model.plain.ties_samples and question.base.batch_norm != "local"
        self._context = question.context
        self._parameter_bytes = ELEMENT_BYTES[question.precision.parameter]
        self._stores_half = stores_half(question.precision)
        self._compute_bytes = ELEMENT_BYTES[question.precision.activations]
        is_float8 = question.precision.compute == "float8"
        self._recipe = Float8.recipe if is_float8 else ""  # the one of candidates
        self._gathered_bytes = 1 if is_float8 else self._compute_bytes  # of most weights in float8
        self._reduce_bytes = ELEMENT_BYTES[question.precision.reduce]
        least = min(1.0, question.optimizer.states) if question.optimizer.matrices else question.optimizer.states
        self._states = least * ELEMENT_BYTES[question.precision.optimizer]
        self._numels: dict[tuple[int, int], tuple[float, float, float]] = {}
        self._stages_known: dict[tuple[object, ...], Stages] = {}
        self._saved: dict[tuple[object, ...], tuple[list[float], list[float]]] = {}
        self._times: dict[tuple[object, ...], tuple[list[float], list[float]]] = {}
        self._last_activations: dict[int, tuple[ChoiceGroup, float]] = {}
        """Of the last group with each shape: the plans of a group are considered one after the other."""

    def seconds(self, group: ChoiceGroup, *, is_sharded: bool) -> float:
        """Return a lower bound of the step time in a group: compute, collectives inside of a pass, and bubbles.

        `is_sharded` is whether parameters are sharded, for plans with zero = 2 or 3; the others are mostly faster.
        """
        seconds = self._seconds(self._shape(group, gathered=is_sharded), group, is_sharded=is_sharded)
        return seconds * (1 + self._time.jitter(group.pp * group.dp * group.cp * group.tp))

    def least_seconds(self, degrees: Degrees, num_samples: int) -> float:
        """Return a lower bound of the step time of all plans with these degrees, `num_samples` for each dp rank.

        It is that of equal stages without bubbles and without recompute, with the best micro-batch.
        """
        pp, cp, tp, dp = degrees
        bounds = []
        for micro_batch, sequence_parallel in itertools.product(divisors(num_samples), {False, tp > 1}):
            number = num_samples // micro_batch
            group = ChoiceGroup(1, cp, tp, pp * dp, micro_batch, number, "none", "1f1b", sequence_parallel)
            bounds += [self.seconds(group, is_sharded=is_sharded) / pp for is_sharded in (False, True)]
        return min(bounds)

    def _shape(self, group: ChoiceGroup, *, gathered: bool) -> ModelShape:
        return self._model.sliced(group.cp, group.tp, gathered=gathered or self._stores_half)

    def _seconds(self, shape: ModelShape, group: ChoiceGroup, *, is_sharded: bool) -> float:
        stages, times = self._stages(shape, group), self._part_times(shape, group, is_sharded=is_sharded)
        busy = [load.total(*times) for load in stages.ranks]
        if group.pp == 1 or SCHEDULES[group.schedule].splits_backward:
            return group.accumulation * max(busy)
        return pipeline_floor([0.0, *busy], [load.total(*times) for load in stages.before] + [0.0], group.accumulation)

    def _stages(self, shape: ModelShape, group: ChoiceGroup) -> Stages:
        key = (id(shape), group.pp, group.schedule, group.split, group.recompute_blocks)
        if key not in self._stages_known:
            self._stages_known[key] = _loads(shape, group)
        return self._stages_known[key]

    def _part_times(
        self, shape: ModelShape, group: ChoiceGroup, *, is_sharded: bool
    ) -> tuple[list[float], list[float]]:
        """Return the seconds of one micro-batch on each part: if it is recomputed, and if not."""
        compiles = self._compiles and not SCHEDULES[group.schedule].splits_backward
        key = (
            *(id(shape), is_sharded, compiles, group.micro_batch, group.recompute, group.tp, group.sequence_parallel),
            *((group.pp, group.dp) if self._syncs_batch_norm else ()),
        )
        if key not in self._times:
            compute, again, once = self._time.compute(shape.compute, recipe=self._recipe), [], []
            for part in shape.parts:
                compiled = compiles and part.kind == "block"
                cost = compute.cost(
                    part,
                    group.micro_batch,
                    tp=group.tp,
                    sequence_parallel=group.sequence_parallel,
                    compiled=compiled,
                )
                extra = cost.again(part.policy(group.recompute)).total
                cost = with_host_operators(cost, part, compute, tp=group.tp, is_sharded=is_sharded, compiled=compiled)
                exchange = self._exchange(part, shape, group)
                once.append(cost.forward.total + cost.backward.total + 2 * exchange)
                again.append(once[-1] + extra + (exchange if part.policy(group.recompute) != "none" else 0.0))
            self._times[key] = (again, once)
        return self._times[key]

    def _exchange(self, part: Part, shape: ModelShape, group: ChoiceGroup) -> float:
        """Return the exposed communication inside one pass, without that of a head whose loss may be fused."""
        wires, samples = self._time.wires, group.micro_batch
        waits = context_exchange(part, samples, Layout(cp=group.cp, tp=group.tp), wires)
        if self._syncs_batch_norm and group.cp == 1:
            waits += batch_norm_exchange(part, Layout(pp=group.pp, replicate=group.dp, tp=group.tp), wires)
        if part.kind == "last" and shape.head is not None:
            return waits
        return waits + tensor_exchange(part, samples, group.tp, wires, sequence_parallel=group.sequence_parallel)

    def least_memory(self, group: ChoiceGroup, *, offload: bool) -> float:
        """Return a lower bound of the memory of all plans of a group, with or without offload."""
        kind = OFFLOADS[-1 if offload else 0]
        leanest = (PlanVariant(group.dp, 3, "every", kind), PlanVariant(group.dp, 1, offload=kind))
        return min(self.memory(group, variant) for variant in leanest)

    def memory(self, group: ChoiceGroup, variant: PlanVariant) -> float:
        """Return a lower bound of a plan's memory: states in the update, or states and activations before backward.

        It assumes equal stages, which bounds the largest from below. The batches of two steps are on the device always.
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
        gathered = self._gathered_bytes * numel if variant.zero == 2 else 0.0
        batch = shape.input.at(group.micro_batch, tp=group.tp, sequence_parallel=group.sequence_parallel)
        allocated = 2 * group.accumulation * batch + parameters + states
        allocated += max(gradients, stay + gathered + self._activations(shape, group))
        return FRAGMENTED * allocated + self._context

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
        last, activations = self._last_activations.get(id(shape), (None, 0.0))
        if last is not group:
            activations = self._sum_activations(shape, group)
            self._last_activations[id(shape)] = (group, activations)
        return activations

    def _sum_activations(self, shape: ModelShape, group: ChoiceGroup) -> float:
        key = (id(shape), group.tp, group.micro_batch, group.recompute, group.sequence_parallel)
        if key not in self._saved:
            again, once = [], []
            for part in shape.parts:
                is_block = part.kind == "block"
                again.append(self._saved_bytes(part, group.recompute, group) if is_block else 0.0)
                once.append(self._saved_bytes(part, "none", group) if is_block else 0.0)
            self._saved[key] = (again, once)
        stages = self._stages(shape, group).first
        actions = PipelineShape(group.pp, group.schedule, group.accumulation, len(stages))
        saved_bytes = self._saved[key]
        return sum(actions.in_flight(0, chunk) * load.total(*saved_bytes) for chunk, load in enumerate(stages))

    def _saved_bytes(self, part: Part, policy: Recompute, group: ChoiceGroup) -> float:
        """Return the bytes that a block saves for backward; compiled ones save no results of pointwise operators."""

        def at(amount: Amount) -> float:
            return amount.at(group.micro_batch, tp=group.tp, sequence_parallel=group.sequence_parallel)

        saved = at(part.footprints[policy].saved)
        if policy != "none" or not self._compiles:
            return saved
        elements = group.micro_batch * compiled_saves(part, group.tp, quantized=float(bool(self._recipe)))
        return min(saved, at(part.footprints["selective"].saved) + self._compute_bytes * elements)


def _loads(shape: ModelShape, group: ChoiceGroup) -> Stages:
    """Return the loads of a group's stages."""
    bounds = stage_bounds(shape.num_blocks, group.pp, group.schedule, group.split)
    num_parts = len(shape.parts)  # a part may occur several times, and counts at its last position then
    index = {id(part): position for position, part in enumerate(shape.parts)}
    stages, of_rank = [], dict[int, list[Load]]()
    for stage in stages_between(shape, bounds, group.pp, group.schedule):
        recomputed, others = [0] * num_parts, [0] * num_parts
        left = group.recompute_blocks or shape.num_blocks
        for part, count in stage.parts:
            again = min(left, count) if part.kind == "block" else 0
            left -= again
            recomputed[index[id(part)]] = again
            others[index[id(part)]] = count - again
        stages.append(Load(tuple(recomputed), tuple(others)))
        of_rank.setdefault(stage.rank, []).append(stages[-1])
    loads = [_summed(of_rank[rank], num_parts) for rank in range(group.pp)]
    last = sorted({load: rank for rank, load in enumerate(loads)}.values())
    before = [_summed(stages[start:end], num_parts) for start, end in itertools.pairwise([0, *last])]
    return Stages(tuple(before), tuple(loads[rank] for rank in last), tuple(of_rank[0]))


def _summed(loads: Iterable[Load], num_parts: int) -> Load:
    recomputed, others = [0] * num_parts, [0] * num_parts
    for load in loads:
        recomputed = list(map(operator.add, recomputed, load.recomputed))
        others = list(map(operator.add, others, load.others))
    return Load(tuple(recomputed), tuple(others))
