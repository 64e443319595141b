"""Floors: what a plan needs at least, in memory and time, found in microseconds, so that few need a prediction."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.layout import Layout
from shardwise.planner.cost.pipeline_time import pipeline_floor
from shardwise.planner.cost.stage_costs import context_exchange, numel_of, tensor_exchange
from shardwise.planner.cost.stages import SPLIT_BACKWARD, VEE, Turns, even_stages, stages_per_rank
from shardwise.planner.model.shape import ELEMENT_BYTES

if TYPE_CHECKING:
    from shardwise.planner.cost.stages import Stage
    from shardwise.planner.cost.time import TimeModel
    from shardwise.planner.model.shape import ModelShape, Part
    from shardwise.planner.search.choices import Group, Variant
    from shardwise.planner.search.search import Question


class Floors:
    """Floors of the plans of one question."""

    def __init__(self, question: Question, time: TimeModel) -> None:
        self._model = question.model
        self._time = time
        self._held = ELEMENT_BYTES[question.precision.parameter]
        self._used = ELEMENT_BYTES[question.precision.compute]
        self._reduced = ELEMENT_BYTES[question.precision.reduce]
        self._states = question.optimizer.states * ELEMENT_BYTES[question.precision.optimizer]
        self._numels: dict[tuple[int, int], tuple[float, float, float]] = {}
        self._cuts: dict[tuple[object, ...], tuple[Stage, ...]] = {}
        self._saved: dict[tuple[object, ...], float] = {}
        self._busy: dict[tuple[object, ...], float] = {}

    def seconds(self, group: Group) -> float:
        """Return seconds that no plan of a group goes below: its compute, exchanges of cut matrices, and bubbles."""
        return min(self._seconds(self._shape(group, gathered=gathered), group) for gathered in (False, True))

    def _shape(self, group: Group, *, gathered: bool) -> ModelShape:
        return self._model.sliced(group.cp, group.tp, gathered=gathered)

    def _seconds(self, shape: ModelShape, group: Group) -> float:
        stages = self._stages(shape, group)
        by_stage = [
            sum(count * self._part_seconds(part, shape, group) for part, count in stage.parts) for stage in stages
        ]
        busy = [0.0] * group.pp
        for stage, seconds in zip(stages, by_stage, strict=True):
            busy[stage.rank] += seconds
        if group.schedule in SPLIT_BACKWARD:
            return group.accumulation * max(busy)
        return pipeline_floor(busy, by_stage, group.accumulation)

    def _stages(self, shape: ModelShape, group: Group) -> tuple[Stage, ...]:
        key = (id(shape), group.pp, stages_per_rank(group.schedule, group.pp), group.schedule in VEE)
        if key not in self._cuts:
            self._cuts[key] = even_stages(shape, group.pp, group.schedule)
        return self._cuts[key]

    def _part_seconds(self, part: Part, shape: ModelShape, group: Group) -> float:
        key = (id(part), group.tp, group.micro_batch, group.recompute, group.sequence_parallel)
        if key not in self._busy:
            cost = self._time.compute(shape.compute).cost(
                part, group.micro_batch, tp=group.tp, sequence_parallel=group.sequence_parallel, compiled=False
            )
            again = part.kind == "block" and group.recompute != "none"
            exchange = self._exchange(part, shape, group)
            self._busy[key] = (
                cost.forward.total
                + cost.backward.total
                + (cost.again(group.recompute).total if again else 0.0)
                + (3 if again else 2) * exchange
            )
        return self._busy[key]

    def _exchange(self, part: Part, shape: ModelShape, group: Group) -> float:
        """Return what one pass waits for inside; nothing for a last part whose loss may be fused."""
        wires, samples = self._time.wires, group.micro_batch
        waits = context_exchange(part, samples, Layout(cp=group.cp, tp=group.tp), wires)
        if part.kind == "last" and shape.head is not None:
            return waits
        return waits + tensor_exchange(part, samples, group.tp, wires, sequence_parallel=group.sequence_parallel)

    def memory(self, group: Group, variant: Variant) -> float:
        """Return bytes that a plan needs at least: states during the update, or states and activations before backward.

        Stages are taken as equal: the fullest is no smaller.
        """
        cuts, shard = variant.zero >= 2, variant.shard * group.cp
        shape = self._shape(group, gathered=cuts)
        numel, trained, narrow = (total / group.pp for total in self._numel(shape, group.tp))
        cut = shard if cuts else 1
        held = self._held * numel - (self._held - self._used) * narrow
        parameters = 0.0 if variant.offload[0] != "none" else held / cut
        states = 0.0 if variant.offload[1] != "none" else self._states * trained / (shard if variant.zero else 1)
        gradients = self._held * trained / cut if variant.offload[0] == "none" else 0.0
        # Between micro-batches gradients stay, whole unless each is summed; DDP's buckets stay always.
        stay = 0.0
        if group.accumulation > 1 or (not cuts and group.pp == group.tp == 1 and group.dp * group.cp > 1):
            whole = cuts and variant.gradient_sync == "last" and group.accumulation > 1
            stay = self._reduced * trained if whole else gradients
        gathered = self._used * numel if variant.zero == 2 else 0.0
        return parameters + states + max(gradients, stay + gathered + self._activations(shape, group))

    def _numel(self, shape: ModelShape, tp: int) -> tuple[float, float, float]:
        """Return parameters of all stages on ranks of a tensor-parallel group, those trained, those held narrow."""
        key = (id(shape), tp)
        if key not in self._numels:
            layout = Layout(tp=tp)
            self._numels[key] = (
                sum(part.count * numel_of(part, layout) for part in shape.parts),
                sum(part.count * numel_of(part, layout, trained=True) for part in shape.parts),
                sum(
                    part.count * weight.numel / (tp if weight.cut else 1)
                    for part in shape.parts
                    for weight in part.weights
                    if weight.narrow
                ),
            )
        return self._numels[key]

    def _activations(self, shape: ModelShape, group: Group) -> float:
        """Return what blocks keep of the micro-batches that the first rank has under way."""
        key = (id(shape), group.pp, group.tp, group.micro_batch, group.recompute, group.sequence_parallel)
        if key not in self._saved:
            kept = [
                (
                    part.count,
                    part.footprints[group.recompute].saved.at(
                        group.micro_batch, tp=group.tp, sequence_parallel=group.sequence_parallel
                    ),
                )
                for part in shape.parts
                if part.kind == "block"
            ]
            blocks = shape.num_blocks // group.pp
            whole = sum(count * size for count, size in kept)
            least = blocks * min((size for _, size in kept), default=0.0)
            self._saved[key] = whole if group.pp == 1 else least
        chunks = stages_per_rank(group.schedule, group.pp)
        turns = Turns(group.pp, group.schedule, group.accumulation, chunks)
        return self._saved[key] * sum(turns.in_flight(0, chunk) for chunk in range(chunks)) / chunks
