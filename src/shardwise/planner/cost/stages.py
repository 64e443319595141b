"""Pipeline stages of a plan, and the parameters, gradients and optimizer states of one rank."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from shardwise.plans.pipeline import SCHEDULES, even_bounds, rank_of_stage, stages_per_rank
from shardwise.units import ELEMENT_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.planner.cost.memory import OptimizerShape
    from shardwise.planner.model.shape import Amount, ModelShape, Part, Weight
    from shardwise.plans.plan import Plan


class StageParts(NamedTuple):
    """Parts in order with how many of each, and the rank along pp that runs them."""

    parts: tuple[tuple[Part, int], ...]
    rank: int

    @property
    def likeness(self) -> tuple[tuple[int, int], ...]:
        """What stages of one model that cost the same have in common."""
        return tuple((id(part), count) for part, count in self.parts)


def stages_of_plan(shape: ModelShape, plan: Plan) -> tuple[StageParts, ...]:
    """Return the stages of a plan by the rule that training follows: the plan's split, else even.

    What is left over of an even split goes to the second stage and those after it, then to the first.
    """
    pp, split, schedule = plan.layout.pp, plan.pipeline.split, plan.pipeline.schedule
    if not split:
        return even_stages(shape, pp, schedule)
    return _stages(shape, (0, *split, shape.num_blocks), pp, schedule)


def even_stages(shape: ModelShape, pp: int, schedule: str) -> tuple[StageParts, ...]:
    """Return the stages of a plan that gives no split."""
    return _stages(shape, even_bounds(shape.num_blocks, pp * stages_per_rank(schedule, pp)), pp, schedule)


def _stages(shape: ModelShape, bounds: tuple[int, ...], pp: int, schedule: str) -> tuple[StageParts, ...]:
    stages, last = [], len(bounds) - 2
    for stage in range(last + 1):
        parts = _blocks(shape, bounds[stage], bounds[stage + 1])
        if stage == 0:
            parts = [(part, part.count) for part in shape.parts if part.kind == "first"] + parts
        if stage == last:
            parts += [(part, part.count) for part in shape.parts if part.kind == "last"]
        stages.append(StageParts(tuple(parts), rank_of_stage(schedule, stage, pp)))
    return tuple(stages)


def _blocks(shape: ModelShape, first: int, end: int) -> list[tuple[Part, int]]:
    """Return the blocks from `first` to before `end`, counted over all kinds in order."""
    found, place = [], 0
    for part in shape.parts:
        if part.kind != "block":
            continue
        number = min(end, place + part.count) - max(first, place)
        if number > 0:
            found.append((part, number))
        place += part.count
    return found


class PipelineShape(NamedTuple):
    """A schedule over ranks and micro-batches, with so many stages a rank."""

    pp: int
    schedule: str
    micro_batches: int
    chunks: int

    def in_flight(self, rank: int, chunk: int) -> int:
        """Return how many micro-batches of a stage are in flight at most: forward done, backward not."""
        if self.pp == 1:
            return 1
        schedule = SCHEDULES[self.schedule]
        if schedule.all_forward_first:
            return self.micro_batches
        if schedule.placement == "one":
            return min(self.micro_batches, self.pp - rank)
        if schedule.placement == "v":  # down and up again: together two for each rank
            return min(self.micro_batches, rank + 1 if chunk else 2 * self.pp - rank - 1)
        # Interleaved: the forward passes of a rank before its first backward, a round through each stage in order.
        size = self.micro_batches // max(1, self.micro_batches // self.pp)
        forward = (self.chunks - 1) * size + 2 * (self.pp - 1 - rank) + 1
        rounds, rest = divmod(forward, self.chunks * size)
        return min(self.micro_batches, rounds * size + max(0, min(size, rest - chunk * size)))


# The state of one rank under a plan: its parts, their weights in every measure, and what is always resident.


class Share(NamedTuple):
    """A part on this rank: how many of it, and how many numbers one of them has."""

    part: Part
    number: int
    whole: float
    """Weights, each rank of a tensor-parallel group with its own."""
    trained: float
    owned: float
    """Rows of this rank along the shard axis, filled up to equal rows."""
    owned_trained: float
    cast: float
    """Weights that autocast copies into the compute dtype."""
    unit: float
    """What a gather over the shard axis brings."""
    unit_trained: float
    """What a sum over the shard axis takes."""
    narrow: float
    """Weights stored in the compute dtype; under sharding this rank's rows of them."""


def _share(part: Part, count: int, plan: Plan) -> Share:
    weights = [weight for weight in part.weights if not weight.tied or plan.layout.pp > 1]
    layout = plan.layout.folded
    pairs = [(weight, _rows(weight, layout.tp, layout.shard)) for weight in weights]
    whole = sum(rows.whole for _, rows in pairs)
    return Share(
        part=part,
        number=count,
        whole=whole,
        trained=sum(rows.whole for weight, rows in pairs if weight.trained),
        owned=sum(rows.own for _, rows in pairs),
        owned_trained=sum(rows.own for weight, rows in pairs if weight.trained),
        cast=sum(rows.whole for weight, rows in pairs if weight.cast),
        unit=sum(rows.own for _, rows in pairs) * layout.shard,
        unit_trained=sum(rows.own for weight, rows in pairs if weight.trained) * layout.shard,
        narrow=sum(rows.own if plan.zero >= 2 else rows.whole for weight, rows in pairs if weight.narrow),
    )


class _Rows(NamedTuple):
    whole: float
    own: float


def _rows(weight: Weight, tp: int, shard: int) -> _Rows:
    """Return the numbers of a weight on a tensor-parallel rank, and in its share of the rows."""
    numel, rows = float(weight.numel), weight.rows
    if weight.split:
        numel, rows = numel / tp, math.ceil(rows / tp)
    return _Rows(numel, numel * math.ceil(rows / shard) / rows)


class RankState:
    """Parameters, gradients and optimizer states of one rank along pp."""

    def __init__(self, shape: ModelShape, plan: Plan, optimizer: OptimizerShape, stages: Sequence[StageParts]) -> None:
        """`stages` are those of the rank, in order."""
        self.shape = shape
        self.plan = plan
        self.optimizer = optimizer
        self.rank = stages[0].rank
        self.shares = [_share(part, count, plan) for stage in stages for part, count in stage.parts]
        self.chunks = [chunk for chunk, stage in enumerate(stages) for _ in stage.parts]
        """Which of the rank's stages each share is of."""
        actions = PipelineShape(plan.layout.pp, plan.pipeline.schedule, plan.accumulation, len(stages))
        self.in_flight = [actions.in_flight(self.rank, chunk) for chunk in self.chunks]
        """Micro-batches whose activations each share keeps at once."""
        self.sharded = plan.zero >= 2
        self.compute_bytes = ELEMENT_BYTES[plan.precision.compute]
        self.parameter_bytes = ELEMENT_BYTES[plan.precision.parameter]
        self.reduce_bytes = ELEMENT_BYTES[plan.precision.reduce]
        self.sheds_gradients = self.sharded and plan.offload.parameters != "none"
        """Whether shards of gradients are on the host: FSDP2 sends each there as soon as it is reduced."""
        self.root = sum(share.unit for share in self.shares if share.part.kind != "block")
        """Weights outside the blocks, which sharding gathers as one unit."""
        self.saved = [self.amount(share.part.footprints[plan.recompute].saved) for share in self.shares]
        self.uses_buckets = uses_ddp(plan)
        """Whether DDP keeps all gradients in buckets of its own."""

    def kept(self, index: int) -> float:
        """Return what all parts keep for backward while the part at `index` is at work on its newest micro-batch."""
        chunk = self.chunks[index]
        rows = zip(range(len(self.shares)), self.shares, self.saved, self.chunks, self.in_flight, strict=True)
        return sum(
            saved * share.number * (number - (owner == chunk and position >= index))
            for position, share, saved, owner, number in rows
        )

    def amount(self, amount: Amount) -> float:
        """Return an amount for the plan's micro-batch on one rank."""
        return amount.at(self.plan.micro_batch, tp=self.plan.layout.tp, sequence_parallel=self.plan.sequence_parallel)

    def total(self, name: str) -> float:
        """Add up a number of the shares."""
        return add_up(self.shares, name)

    def at_rest(self, *, on_gpu: bool) -> dict[str, float]:
        """Return what is on the device all the time."""
        plan = self.plan
        # The feed brings all micro-batches of a step to a GPU while the step before it trains.
        batches = 2 * plan.accumulation if on_gpu else min(2, plan.accumulation)
        batches += plan.accumulation if on_gpu and plan.is_captured else 0  # a graph reads copies of its own
        rest = {"input": self.amount(self.shape.input) * batches}
        if plan.offload.parameters == "none":
            rest["parameters"] = self.parameters()
        if plan.offload.optimizer == "none":
            owned = self.total("owned_trained" if plan.zero else "trained")
            rest["optimizer states"] = ELEMENT_BYTES[plan.precision.optimizer] * self.optimizer.states * owned
        if self.uses_buckets:
            rest["gradients"] = self.parameter_bytes * self.total("trained")
        if plan.communication.sync_every > 1:
            copies = 1 + (plan.communication.outer_momentum > 0)
            rest["anchor and momentum"] = copies * self.trained_bytes()
        return rest

    def trained_bytes(self) -> float:
        """Return the bytes of what one rank trains."""
        return self.parameter_bytes * self.total("owned_trained" if self.sharded else "trained")

    def parameters(self) -> float:
        """Return the bytes of this rank's parameters."""
        whole = self.parameter_bytes * self.total("owned" if self.sharded else "whole")
        return whole - (self.parameter_bytes - self.compute_bytes) * self.total("narrow")

    def host(self) -> float:
        """Return what offload keeps on the host: parameters, their gradients and the optimizer's states."""
        if self.plan.offload.optimizer == "none":
            return 0.0
        states = ELEMENT_BYTES[self.plan.precision.optimizer] * self.optimizer.states
        trained = (2 * self.parameter_bytes + states) * self.total("owned_trained" if self.plan.zero else "trained")
        if self.plan.offload.parameters == "none":
            return trained
        return trained + self.parameters() - self.trained_bytes()


def uses_ddp(plan: Plan) -> bool:
    """Whether DDP sums gradients in buckets: replicated parameters, no pp or tp, a sync in every step."""
    layout = plan.layout.folded
    return plan.communication.sync_every == 1 and plan.zero < 2 and layout.dp > 1 and layout.pp == layout.tp == 1


def add_up(shares: Sequence[Share], name: str) -> float:
    """Add up a measure of shares, each as often as it is there."""
    return sum(float(getattr(share, name)) * share.number for share in shares)
