"""Which parts of a model each stage of a pipeline runs, and on which rank; without a pipeline one stage runs all."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from shardwise.planner.model.shape import ModelShape, Part
    from shardwise.plans.plan import Plan

LOOPED = ("looped_bfs", "interleaved_1f1b", "interleaved_zero_bubble")
VEE = ("zbv", "dualpipev")
SPLIT_BACKWARD = ("interleaved_zero_bubble", *VEE)
"""Schedules that compute the gradients of inputs and of weights apart."""
CHUNKS = 2
"""Stages per rank under looped and V-shaped schedules when a plan gives no split."""


class Stage(NamedTuple):
    """Parts in order with how many of each, and the rank along pp that runs them."""

    parts: tuple[tuple[Part, int], ...]
    rank: int

    @property
    def likeness(self) -> tuple[tuple[int, int], ...]:
        """What stages of one model that cost the same have in common."""
        return tuple((id(part), count) for part, count in self.parts)


def cut_stages(shape: ModelShape, plan: Plan) -> tuple[Stage, ...]:
    """Return the stages of a plan by the rule that training follows: the plan's split, else even.

    What is left over of an even split goes to the second stage and those after it, then to the first.
    """
    pp, split, schedule = plan.layout.pp, plan.pipeline.split, plan.pipeline.schedule
    if not split:
        return even_stages(shape, pp, schedule)
    return _stages(shape, (0, *split, shape.num_blocks), pp, schedule)


def even_stages(shape: ModelShape, pp: int, schedule: str) -> tuple[Stage, ...]:
    """Return the stages of a plan that gives no split."""
    return _stages(shape, even_bounds(shape.num_blocks, pp * stages_per_rank(schedule, pp)), pp, schedule)


def _stages(shape: ModelShape, bounds: tuple[int, ...], pp: int, schedule: str) -> tuple[Stage, ...]:
    stages, last = [], len(bounds) - 2
    for stage in range(last + 1):
        parts = _blocks(shape, bounds[stage], bounds[stage + 1])
        if stage == 0:
            parts = [(part, part.count) for part in shape.parts if part.kind == "first"] + parts
        if stage == last:
            parts += [(part, part.count) for part in shape.parts if part.kind == "last"]
        rank = 2 * pp - 1 - stage if schedule in VEE and stage >= pp else stage % pp
        stages.append(Stage(tuple(parts), rank))
    return tuple(stages)


def stages_per_rank(schedule: str, pp: int) -> int:
    """Return how many stages each rank holds when the plan gives no split."""
    return CHUNKS if pp > 1 and schedule in LOOPED + VEE else 1


def even_bounds(num_blocks: int, num_stages: int) -> tuple[int, ...]:
    """Return the first block of each stage of an even split, then the number of blocks.

    What is left over goes one each to the second stage and those after it, then to the first (it has the embedding as
    well), and to the last (it has the head and the loss) never.
    """
    size, left_over = divmod(num_blocks, num_stages)
    served = [*range(1, num_stages - 1), 0][:left_over]
    bounds = [0]
    for stage in range(num_stages):
        bounds.append(bounds[-1] + size + (stage in served))
    return tuple(bounds)


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


class Turns(NamedTuple):
    """How stages take turns: a schedule over ranks and micro-batches, with so many stages a rank."""

    pp: int
    schedule: str
    micro_batches: int
    chunks: int

    def in_flight(self, rank: int, chunk: int) -> int:
        """Return how many micro-batches have gone forward through a stage of a rank and not yet come back, at most."""
        if self.pp == 1:
            return 1
        if self.schedule in {"gpipe", "looped_bfs"}:
            return self.micro_batches
        if self.schedule == "1f1b":
            return min(self.micro_batches, self.pp - rank)
        if self.schedule in VEE:  # down and up again: together two for each rank
            return min(self.micro_batches, rank + 1 if chunk else 2 * self.pp - rank - 1)
        # Interleaved: so often a rank goes forward before its first backward pass, a round through each stage in turn.
        size = self.micro_batches // max(1, self.micro_batches // self.pp)
        forward = (self.chunks - 1) * size + 2 * (self.pp - 1 - rank) + 1
        rounds, rest = divmod(forward, self.chunks * size)
        return min(self.micro_batches, rounds * size + max(0, min(size, rest - chunk * size)))
