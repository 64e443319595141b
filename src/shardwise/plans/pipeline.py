"""How one step is split: the global batch into micro-batches, and the layers into pipeline stages. No torch.

Global batch size = micro-batch size x gradient accumulation steps x data-parallel size. Search, cost model, checks and
training all use `SCHEDULES`, so a new schedule needs a row here and its order of operations in planner/cost/events.py.
Invariant: every stage has at least one layer, and stages are numbered along the model, so stage s sends to stage s + 1.
Looped schedules place stage s on rank s mod pp. V-shaped schedules assign stages to ranks 0 to pp - 1 and back, so that
rank 0 has the first and the last stage. References: GPipe (Huang et al. 2019), 1F1B and interleaving (Narayanan et al.
2021), zero bubble and ZB-V (Qi et al. 2023, 2024), DualPipe (DeepSeek-V3, 2024).
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from shardwise.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.layout import Layout
    from shardwise.plans.plan import Plan


@dataclass(frozen=True)
class BatchSplit:
    """Split of the samples of an optimizer step on each data-parallel rank."""

    micro_batch: int
    accumulation: int


def split_batch(
    batch_size: int, *, dp: int, accumulation: int | None = None, micro_batch: int | None = None
) -> BatchSplit:
    """Split a global batch over `dp` data-parallel ranks; raises PlanError if it cannot be split evenly.

    With both `accumulation` and `micro_batch`, they must match `batch_size`; with neither, accumulation is 1.
    """
    if batch_size < dp:
        raise PlanError(
            f"batch_size {batch_size} is smaller than the number of data-parallel ranks, {dp}",
            code="plan.batch-too-small",
            fix=f"set batch_size={dp} or more, or use --nproc {batch_size}",
        )
    if micro_batch is None:
        divisor = f"{dp} data-parallel ranks" + (f" x accumulation {accumulation}" if accumulation else "")
        accumulation = accumulation or 1
        return BatchSplit(_divide(batch_size, dp * accumulation, divisor), accumulation)
    split = BatchSplit(
        micro_batch, _divide(batch_size, dp * micro_batch, f"{dp} data-parallel ranks x micro_batch {micro_batch}")
    )
    if accumulation not in {None, split.accumulation}:
        raise PlanError(
            f"micro_batch {micro_batch} x accumulation {accumulation} x dp {dp} does not equal batch_size {batch_size}",
            code="plan.batch-split-mismatch",
            fix=f"set accumulation={split.accumulation}, or omit it",
        )
    return split


def fill_pipeline(batch_size: int | None, layout: Layout) -> int:
    """Return the accumulation steps that fill a pipeline: 4, 2 or 1 x pp, the most that divide the batch evenly."""
    if layout.pp == 1:
        return 1
    for per_stage in (4, 2, 1):
        accumulation = per_stage * layout.pp
        if batch_size is None or batch_size % (layout.dp * accumulation) == 0:
            return accumulation
    return layout.pp


def refit_batch(batch_size: int, *, dp: int, largest_micro_batch: int) -> BatchSplit:
    """Split a global batch over another number of data-parallel ranks; micro_batch is at most `largest_micro_batch`."""
    per_rank = _divide(batch_size, dp, f"{dp} data-parallel ranks")
    for micro_batch in range(min(largest_micro_batch, per_rank), 0, -1):
        if per_rank % micro_batch == 0:
            return BatchSplit(micro_batch, per_rank // micro_batch)
    raise AssertionError("unreachable: a micro-batch of 1 divides every batch")


def _divide(batch_size: int, parts: int, divisor: str) -> int:
    quotient, remainder = divmod(batch_size, parts)
    if remainder or quotient == 0:
        below, above = quotient * parts, (quotient + 1) * parts
        choices = f"{below} or {above}" if below else f"{above}"
        raise PlanError(
            f"batch_size {batch_size} is not divisible by {divisor}",
            code="plan.batch-not-divisible",
            fix=f"set batch_size to {choices}",
        )
    return quotient


ScheduleName = Literal["gpipe", "1f1b", "looped_bfs", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev"]

STAGES_PER_RANK = 2
"""Virtual stages per rank of looped and V-shaped schedules if the plan has no split."""


@dataclass(frozen=True, kw_only=True)
class PipelineSchedule:
    """Properties of a pipeline schedule."""

    torch_class: str
    """Name of the class in torch.distributed.pipelining.schedules."""
    placement: Literal["one", "loop", "v"] = "one"
    """One stage per rank, or virtual stages in a loop or in a V."""
    all_forward_first: bool = False
    """Whether all forward passes precede the first backward pass."""
    splits_backward: bool = False
    """Whether the gradients of inputs and of weights are computed in separate backward passes."""
    micro_batches: Literal["any", "per_stage", "rounds"] = "any"
    """Valid numbers of micro-batches: any, at least one per stage, or rounds of equal size with at least pp each."""
    is_searched: bool = False
    """Whether the planner searches the schedule; each of the others is similar to one that is searched."""

    @property
    def stages_per_rank(self) -> int:
        """Number of stages per rank if the plan has no split."""
        return 1 if self.placement == "one" else STAGES_PER_RANK

    def accepts(self, pp: int, num_micro_batches: int) -> bool:
        """Whether torch's schedule supports this number of micro-batches."""
        if self.micro_batches == "per_stage":
            return num_micro_batches >= pp * self.stages_per_rank
        if self.micro_batches == "rounds":
            return num_micro_batches % max(1, num_micro_batches // pp) == 0
        return True


SCHEDULES: dict[str, PipelineSchedule] = {
    "gpipe": PipelineSchedule(torch_class="ScheduleGPipe", all_forward_first=True),
    # The least memory of the schedules with one stage per rank.
    "1f1b": PipelineSchedule(torch_class="Schedule1F1B", micro_batches="per_stage", is_searched=True),
    "looped_bfs": PipelineSchedule(torch_class="ScheduleLoopedBFS", placement="loop", all_forward_first=True),
    # Half the bubble of 1f1b.
    "interleaved_1f1b": PipelineSchedule(
        torch_class="ScheduleInterleaved1F1B", placement="loop", micro_batches="rounds", is_searched=True
    ),
    "interleaved_zero_bubble": PipelineSchedule(
        torch_class="ScheduleInterleavedZeroBubble", placement="loop", micro_batches="rounds", splits_backward=True
    ),
    # Almost no bubble.
    "zbv": PipelineSchedule(torch_class="ScheduleZBVZeroBubble", placement="v", splits_backward=True, is_searched=True),
    "dualpipev": PipelineSchedule(
        torch_class="ScheduleDualPipeV", placement="v", micro_batches="per_stage", splits_backward=True
    ),
}
"""Schedules by the name that plans use, the simplest first."""

_REQUIREMENTS = {
    "per_stage": "requires at least one micro-batch per stage",
    "rounds": "requires rounds of equal size with at least pp micro-batches each",
}


def stages_per_rank(schedule: str, pp: int) -> int:
    """Return the number of stages per rank if the plan has no split."""
    return SCHEDULES[schedule].stages_per_rank if pp > 1 else 1


def rank_of_stage(schedule: str, stage: int, pp: int) -> int:
    """Return the pipeline rank that runs a stage."""
    if SCHEDULES[schedule].placement == "v" and stage >= pp:
        return 2 * pp - 1 - stage
    return stage % pp


def even_bounds(num_blocks: int, num_stages: int) -> tuple[int, ...]:
    """Return the first block of each stage of an even split, followed by the number of blocks.

    Remaining blocks are added one each to the stages from the second on, then to the first, which has the embedding,
    but never to the last, which has the head and the loss.
    """
    size, remainder = divmod(num_blocks, num_stages)
    larger_stages = [*range(1, num_stages - 1), 0][:remainder]
    bounds = [0]
    for stage in range(num_stages):
        bounds.append(bounds[-1] + size + (stage in larger_stages))
    return tuple(bounds)


def balanced_bounds(blocks: Sequence[float], first: float, last: float, *, num_stages: int) -> tuple[int, ...]:
    """Return the bounds of stages with the least cost of the costliest one, each with at least one block.

    `blocks` are the costs of the blocks; `first` and `last` are added to the first and the last stage, for embedding
    and head. The first stage, which has the most micro-batches in flight, gets what the others leave.
    """
    low, high = max(blocks), first + sum(blocks) + last
    for _ in range(_BISECTIONS):
        limit = (low + high) / 2
        if _filled(blocks, last, num_stages, limit)[0] + first <= limit:
            high = limit
        else:
            low = limit
    return _filled(blocks, last, num_stages, high)[1]


_BISECTIONS = 30
"""Halvings of the interval of a stage's cost; 2^-30 of it is far below one block."""


def _filled(blocks: Sequence[float], last: float, num_stages: int, limit: float) -> tuple[float, tuple[int, ...]]:
    """Fill stages up to `limit` from the last on; return the cost of the blocks left for the first, and all bounds."""
    bounds, end = [len(blocks)], len(blocks)
    for stage in range(num_stages - 1, 0, -1):
        cost = blocks[end - 1] + (last if stage == num_stages - 1 else 0.0)
        end -= 1
        while end > stage and cost + blocks[end - 1] <= limit:
            end -= 1
            cost += blocks[end]
        bounds.append(end)
    return sum(blocks[:end]) + (last if num_stages == 1 else 0.0), (0, *reversed(bounds))


@dataclass(frozen=True, kw_only=True)
class StageSplit:
    """The layers and the pipeline rank of every stage."""

    bounds: tuple[int, ...]
    """First layer of each stage, followed by the number of layers."""
    ranks: tuple[int, ...]
    """Pipeline rank of each stage."""

    @property
    def num_stages(self) -> int:
        """Number of stages of all ranks."""
        return len(self.ranks)

    @property
    def num_layers(self) -> int:
        """Number of layers of all stages."""
        return self.bounds[-1]

    def layers(self, stage: int) -> range:
        """Return the layers of a stage."""
        return range(self.bounds[stage], self.bounds[stage + 1])

    def stage_of(self, layer: int) -> int:
        """Return the stage that runs a layer."""
        return next(stage for stage in range(self.num_stages) if layer in self.layers(stage))

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of a pipeline rank, in ascending order."""
        return tuple(stage for stage, owner in enumerate(self.ranks) if owner == rank)


def split_layers(plan: Plan, num_layers: int) -> StageSplit:
    """Return the layers of each stage: by the plan's split, or evenly by `even_bounds`."""
    num_stages, pp, split = _num_stages(plan), plan.layout.pp, plan.pipeline.split
    if num_stages > num_layers:
        fitting = _fitting_layout(plan, num_layers)
        use_schedule = 'schedule = "1f1b", ' if num_stages > pp else ""
        raise PlanError(
            f"schedule {plan.pipeline.schedule!r} on pp = {pp} has {num_stages} stages, but the model has {num_layers}"
            " layers",
            code="plan.pipeline-too-many-stages",
            fix=f"use pp = {fitting.pp} (layout {fitting})"
            if fitting
            else f"use {use_schedule}fewer stages, or pp = 1",
        )
    even = even_bounds(num_layers, num_stages)
    bounds = (0, *split, num_layers) if split else even
    if any(first >= second for first, second in pairwise(bounds)):
        raise PlanError(
            f"pipeline split {list(split)} must be strictly increasing and below the number of layers, {num_layers}",
            code="plan.pipeline-split-invalid",
            fix=f"use increasing numbers from 1 to {num_layers - 1}, such as split = {list(even[1:-1])}",
        )
    ranks = tuple(rank_of_stage(plan.pipeline.schedule, stage, pp) for stage in range(num_stages))
    return StageSplit(bounds=bounds, ranks=ranks)


def _fitting_layout(plan: Plan, num_layers: int) -> Layout | None:
    """Return a layout of the same ranks with the largest pp above 1 that the layers and the batch allow."""
    for pp in range(plan.layout.pp - 1, 1, -1):
        with suppress(PlanError):
            smaller = replace(plan, layout=replace(plan.layout, pp=pp)).refit(plan.layout.world_size)
            if _num_stages(smaller) <= num_layers:
                check_pipeline(smaller)
                return smaller.layout
    return None


def _num_stages(plan: Plan) -> int:
    """Return the number of stages of all ranks: that of the plan's split, or the default of the schedule."""
    pp, schedule, split = plan.layout.pp, plan.pipeline.schedule, plan.pipeline.split
    default = pp * stages_per_rank(schedule, pp)
    if not split:
        return default
    given = len(split) + 1
    if given == default or (SCHEDULES[schedule].placement == "loop" and given % pp == 0):
        return given
    raise PlanError(
        f"schedule {schedule!r} on pp = {pp} requires {default} stages, but pipeline split {list(split)} has {given}",
        code="plan.pipeline-split-count",
        fix=f"set pipeline.split to {default - 1} boundaries, or remove it",
    )


# Options that are not supported with a pipeline.


_NEEDS_WHOLE_BACKWARD = (
    ("compile", "none", "compiled blocks do not support"),
    ("recompute", "none", "would recompute activations twice"),
    ("fused_loss", False, "a fused loss does not support because it computes its gradients only once"),
)
"""Options that a split backward excludes: name, value without the option, and the reason."""


def check_pipeline(plan: Plan, num_layers: int | None = None) -> None:
    """Raise PlanError if the pipeline of a plan cannot run; with `num_layers` None, layers are not checked."""
    if plan.layout.pp == 1:
        return
    if SCHEDULES[plan.pipeline.schedule].splits_backward:
        _check_split_backward(plan)
    if plan.compile == "model":
        raise PlanError(
            'compile = "model" is not supported with pp, because a pipeline runs the model in separate stages',
            code="support.pipeline-whole-compile",
            fix='use compile = "blocks"',
        )
    if plan.gradient_sync == "every":
        raise PlanError(
            'gradient_sync = "every" is not supported with pp, which reduces gradients after the last micro-batch',
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
            f"schedule {schedule!r} splits backward, which computes wrong gradients with zero = {plan.zero}",
            code="support.split-backward-sharded",
            fix='use schedule = "interleaved_1f1b", zero = 1, or replicate instead of shard',
        )
    for name, off, why in _NEEDS_WHOLE_BACKWARD:
        if getattr(plan, name) != off:
            raise PlanError(
                f"schedule {schedule!r} splits backward, which {why}",
                code="support.split-backward-option",
                fix=f'use {name} = {json.dumps(off)}, or schedule = "interleaved_1f1b"',
            )


def _check_accumulation(plan: Plan) -> None:
    pp, name, accumulation = plan.layout.pp, plan.pipeline.schedule, plan.accumulation
    schedule = SCHEDULES[name]
    if schedule.accepts(pp, accumulation):
        return
    samples = plan.micro_batch * accumulation
    valid = [n for n in range(1, samples + 1) if samples % n == 0 and schedule.accepts(pp, n)]
    nearest = min(valid, key=lambda n: abs(n - accumulation), default=None)
    if nearest is not None:
        fix = f"use accumulation = {nearest} with micro_batch = {samples // nearest}"
    else:
        larger = next(n for n in range(accumulation + 1, accumulation + 4 * pp + 1) if schedule.accepts(pp, n))
        fix = f"use accumulation = {larger} (batch_size {larger * plan.layout.dp} or more), or another schedule"
    raise PlanError(
        f"schedule {name!r} on pp = {pp} {_REQUIREMENTS[schedule.micro_batches]}, got accumulation = {accumulation}",
        code="plan.pipeline-accumulation",
        fix=fix,
    )
