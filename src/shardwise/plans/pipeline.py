"""Pipeline schedules: one table of what each asks of a plan, and which layers and ranks its stages get; no torch.

Search, cost model, refusals and training all read `SCHEDULES`, so a schedule is added in one row here and by its order
of turns in planner/cost/events.py. Invariant: every stage has at least one layer, and stages are numbered along the
model, so stage s sends to stage s + 1. Looped schedules place stage s on rank s mod pp; V-shaped ones fold the row in
the middle, so that the first and the last stage share rank 0. References: GPipe (Huang et al. 2019), 1F1B and
interleaving (Narayanan et al. 2021), zero bubble and ZB-V (Qi et al. 2023, 2024), DualPipe (DeepSeek-V3, 2024).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from shardwise.errors import PlanError

if TYPE_CHECKING:
    from shardwise.plans.plan import Plan

ScheduleName = Literal["gpipe", "1f1b", "looped_bfs", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev"]

STAGES_PER_RANK = 2
"""Stages on each rank of looped and V-shaped schedules when a plan gives no split."""


@dataclass(frozen=True, kw_only=True)
class PipelineSchedule:
    """What one schedule asks of a plan, and how its stages lie on ranks."""

    torch_class: str
    """In torch.distributed.pipelining.schedules."""
    placement: Literal["one", "loop", "v"] = "one"
    """One stage a rank; several, rank by rank and round again; or down the ranks and up again."""
    all_forward_first: bool = False
    """Whether every micro-batch has gone forward before the first backward."""
    splits_backward: bool = False
    """Whether it computes the gradients of inputs and of weights apart."""
    micro_batches: Literal["any", "per_stage", "rounds"] = "any"
    """Any number; at least one per stage; or rounds of equal size, one round per pp of them."""
    is_searched: bool = False
    """Whether `plan` proposes it; the others are like one that it does propose."""

    @property
    def stages_per_rank(self) -> int:
        """Stages on each rank when a plan gives no split."""
        return 1 if self.placement == "one" else STAGES_PER_RANK

    def accepts(self, pp: int, num_micro_batches: int) -> bool:
        """Whether torch's schedule runs this many micro-batches."""
        if self.micro_batches == "per_stage":
            return num_micro_batches >= pp * self.stages_per_rank
        if self.micro_batches == "rounds":
            return num_micro_batches % max(1, num_micro_batches // pp) == 0
        return True


SCHEDULES: dict[str, PipelineSchedule] = {
    "gpipe": PipelineSchedule(torch_class="ScheduleGPipe", all_forward_first=True),
    # The least memory of those with one stage a rank.
    "1f1b": PipelineSchedule(torch_class="Schedule1F1B", micro_batches="per_stage", is_searched=True),
    "looped_bfs": PipelineSchedule(torch_class="ScheduleLoopedBFS", placement="loop", all_forward_first=True),
    # Half the bubble of 1f1b.
    "interleaved_1f1b": PipelineSchedule(
        torch_class="ScheduleInterleaved1F1B", placement="loop", micro_batches="rounds", is_searched=True
    ),
    "interleaved_zero_bubble": PipelineSchedule(
        torch_class="ScheduleInterleavedZeroBubble", placement="loop", micro_batches="rounds", splits_backward=True
    ),
    # Hardly any bubble.
    "zbv": PipelineSchedule(torch_class="ScheduleZBVZeroBubble", placement="v", splits_backward=True, is_searched=True),
    "dualpipev": PipelineSchedule(
        torch_class="ScheduleDualPipeV", placement="v", micro_batches="per_stage", splits_backward=True
    ),
}
"""By the name that plans give, the simplest first."""

_RULES = {
    "per_stage": "needs at least one micro-batch per stage",
    "rounds": "needs micro-batches in rounds of equal size, one round per pp of them",
}


def stages_per_rank(schedule: str, pp: int) -> int:
    """Return how many stages each rank has when the plan gives no split."""
    return SCHEDULES[schedule].stages_per_rank if pp > 1 else 1


def rank_of_stage(schedule: str, stage: int, pp: int) -> int:
    """Return the rank along pp that runs a stage."""
    if SCHEDULES[schedule].placement == "v" and stage >= pp:
        return 2 * pp - 1 - stage
    return stage % pp


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


@dataclass(frozen=True, kw_only=True)
class StageSplit:
    """Which layers every stage runs, and which rank of the pipeline has which stages."""

    bounds: tuple[int, ...]
    """First layer of each stage, then the number of layers."""
    ranks: tuple[int, ...]
    """Rank along pp of each stage."""

    @property
    def num_stages(self) -> int:
        """Stages over all ranks."""
        return len(self.ranks)

    @property
    def num_layers(self) -> int:
        """Layers over all stages."""
        return self.bounds[-1]

    def layers(self, stage: int) -> range:
        """Return the layers of a stage."""
        return range(self.bounds[stage], self.bounds[stage + 1])

    def stage_of(self, layer: int) -> int:
        """Return the stage that runs a layer."""
        return next(stage for stage in range(self.num_stages) if layer in self.layers(stage))

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of a rank along pp, in order."""
        return tuple(stage for stage, owner in enumerate(self.ranks) if owner == rank)


def split_layers(plan: Plan, num_layers: int) -> StageSplit:
    """Return which stage runs which layers: by the plan's split, else evenly as `even_bounds` does."""
    num_stages, pp, split = _num_stages(plan), plan.layout.pp, plan.pipeline.split
    if num_stages > num_layers:
        most = num_layers // (num_stages // pp)
        raise PlanError(
            f"schedule {plan.pipeline.schedule!r} on pp = {pp} makes {num_stages} stages of {num_layers} layers",
            code="plan.pipeline-too-many-stages",
            fix=f"use pp = {most}" if most > 1 else 'use schedule = "1f1b", fewer stages, or pp = 1',
        )
    even = even_bounds(num_layers, num_stages)
    bounds = (0, *split, num_layers) if split else even
    if any(first >= second for first, second in pairwise(bounds)):
        raise PlanError(
            f"pipeline split {list(split)} is not strictly increasing within {num_layers} layers",
            code="plan.pipeline-split-invalid",
            fix=f"use increasing numbers from 1 to {num_layers - 1}, such as split = {list(even[1:-1])}",
        )
    ranks = tuple(rank_of_stage(plan.pipeline.schedule, stage, pp) for stage in range(num_stages))
    return StageSplit(bounds=bounds, ranks=ranks)


def _num_stages(plan: Plan) -> int:
    """Stages over all ranks: one per rank, or by schedule several."""
    pp, schedule, split = plan.layout.pp, plan.pipeline.schedule, plan.pipeline.split
    usual = pp * stages_per_rank(schedule, pp)
    if not split:
        return usual
    given = len(split) + 1
    if given == usual or (SCHEDULES[schedule].placement == "loop" and given % pp == 0):
        return given
    raise PlanError(
        f"pipeline split {list(split)} makes {given} stages, schedule {schedule!r} on pp = {pp} takes {usual}",
        code="plan.pipeline-split-count",
        fix=f"give {usual - 1} boundaries, or none",
    )


# What a pipeline excludes.


_NEEDS_WHOLE_BACKWARD = (
    ("compile", "none", "compiled blocks cannot"),
    ("recompute", "none", "recompute would do twice"),
    ("fused_loss", False, "a fused loss, whose gradients are there once, cannot"),
)


def check_pipeline(plan: Plan, num_layers: int | None = None) -> None:
    """Refuse a plan whose pipeline cannot run, with the nearest that can; `num_layers` None checks all but layers."""
    if plan.layout.pp == 1:
        return
    if SCHEDULES[plan.pipeline.schedule].splits_backward:
        _check_split_backward(plan)
    if plan.compile == "model":
        raise PlanError(
            "a pipeline leaves the model's forward in its middle, so it has no one graph",
            code="support.pipeline-whole-compile",
            fix='use compile = "blocks"',
        )
    if plan.gradient_sync == "every":
        raise PlanError(
            "a pipeline sums gradients after the last micro-batch, the plan asks for every one",
            code="support.pipeline-gradient-sync",
            fix='set gradient_sync = "last"',
        )
    _check_accumulation(plan)
    if num_layers is None:
        _num_stages(plan)
    else:
        split_layers(plan, num_layers)


def _check_split_backward(plan: Plan) -> None:
    schedule = plan.pipeline.schedule
    if plan.zero >= 2:
        raise PlanError(
            f"schedule {schedule!r} splits backward, and on sharded stages (zero = {plan.zero}) that trains wrongly",
            code="support.split-backward-sharded",
            fix='use schedule = "interleaved_1f1b", or zero 1 or replicas instead of shards',
        )
    for name, off, why in _NEEDS_WHOLE_BACKWARD:
        if getattr(plan, name) != off:
            raise PlanError(
                f"schedule {schedule!r} splits backward, which {why}",
                code="support.split-backward-option",
                fix=f'use {name} = {json.dumps(off)}, or schedule = "interleaved_1f1b"',
            )


def _check_accumulation(plan: Plan) -> None:
    pp, name, number = plan.layout.pp, plan.pipeline.schedule, plan.accumulation
    schedule = SCHEDULES[name]
    if schedule.accepts(pp, number):
        return
    samples = plan.micro_batch * number
    fits = [n for n in range(1, samples + 1) if samples % n == 0 and schedule.accepts(pp, n)]
    nearest = min(fits, key=lambda n: abs(n - number), default=None)
    if nearest is not None:
        fix = f"use accumulation = {nearest} with micro_batch = {samples // nearest}"
    else:
        wanted = next(n for n in range(number + 1, number + 4 * pp + 1) if schedule.accepts(pp, n))
        fix = f"use accumulation = {wanted} (a batch of {wanted * plan.layout.dp} at least), or another schedule"
    raise PlanError(
        f"schedule {name!r} on pp = {pp} {_RULES[schedule.micro_batches]}, the plan accumulates {number}",
        code="plan.pipeline-accumulation",
        fix=fix,
    )
