"""Which layers each pipeline stage runs, on which rank, and what a schedule asks of a plan; no torch here."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from shardwise.errors import PlanError
from shardwise.planner.cost.stages import CHUNKS, LOOPED, SPLIT_BACKWARD, VEE, even_bounds, stages_per_rank

if TYPE_CHECKING:
    from shardwise.plans import Plan


@dataclass(frozen=True, kw_only=True)
class StageCut:
    """Which layers every stage runs, and which rank of the pipeline holds which stages."""

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
        return tuple(stage for stage, holder in enumerate(self.ranks) if holder == rank)


_UNSPLIT = (
    ("compile", "none", "compiled blocks cannot"),
    ("recompute", "none", "recompute would do twice"),
    ("fused_loss", False, "a fused loss, whose gradients are there once, cannot"),
)


def check_pipeline(plan: Plan, num_layers: int | None = None) -> None:
    """Refuse a plan whose pipeline cannot run, with the nearest that can; `num_layers` None checks all but layers."""
    if plan.layout.pp == 1:
        return
    schedule = plan.pipeline.schedule
    if schedule in SPLIT_BACKWARD and plan.zero >= 2:
        raise PlanError(
            f"schedule {schedule!r} splits backward, and on sharded stages (zero = {plan.zero}) that trains wrongly",
            code="support.split-backward-sharded",
            fix='use schedule = "interleaved_1f1b", or zero 1 or replicas instead of shards',
        )
    for name, off, why in _UNSPLIT:
        if schedule in SPLIT_BACKWARD and getattr(plan, name) != off:
            raise PlanError(
                f"schedule {schedule!r} splits backward, which {why}",
                code="support.split-backward-option",
                fix=f'use {name} = {json.dumps(off)}, or schedule = "interleaved_1f1b"',
            )
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
        cut_layers(plan, num_layers)


def cut_layers(plan: Plan, num_layers: int) -> StageCut:
    """Return which stage runs which layers: by the plan's split, else evenly.

    Layers that are left over in an even split go one each to the second stage and those after it, then to the first
    (it has the embedding as well), and to the last (it has the head and the loss) never.
    """
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
            f"pipeline split {list(split)} does not rise within {num_layers} layers",
            code="plan.pipeline-split-invalid",
            fix=f"use rising numbers from 1 to {num_layers - 1}, such as split = {list(even[1:-1])}",
        )
    vee = plan.pipeline.schedule in VEE
    ranks = tuple(2 * pp - 1 - stage if vee and stage >= pp else stage % pp for stage in range(num_stages))
    return StageCut(bounds=bounds, ranks=ranks)


def _num_stages(plan: Plan) -> int:
    """Stages over all ranks: one per rank, or by schedule several."""
    pp, schedule, split = plan.layout.pp, plan.pipeline.schedule, plan.pipeline.split
    usual = pp * stages_per_rank(schedule, pp)
    if not split:
        return usual
    given = len(split) + 1
    if given == usual or (schedule in LOOPED and given % pp == 0):
        return given
    raise PlanError(
        f"pipeline split {list(split)} makes {given} stages, schedule {schedule!r} on pp = {pp} takes {usual}",
        code="plan.pipeline-split-count",
        fix=f"give {usual - 1} boundaries, or none",
    )


def _check_accumulation(plan: Plan) -> None:
    pp, schedule, number = plan.layout.pp, plan.pipeline.schedule, plan.accumulation
    if _takes(schedule, pp, number):
        return
    samples = plan.micro_batch * number
    fits = [n for n in range(1, samples + 1) if samples % n == 0 and _takes(schedule, pp, n)]
    nearest = min(fits, key=lambda n: abs(n - number), default=None)
    if nearest is not None:
        fix = f"use accumulation = {nearest} with micro_batch = {samples // nearest}"
    else:
        wanted = next(n for n in range(number + 1, number + 4 * pp + 1) if _takes(schedule, pp, n))
        fix = f"use accumulation = {wanted} (a batch of {wanted * plan.layout.dp} at least), or another schedule"
    raise PlanError(
        f"schedule {schedule!r} on pp = {pp} {_RULES[schedule]}, the plan accumulates {number}",
        code="plan.pipeline-accumulation",
        fix=fix,
    )


_RULES = {
    "1f1b": "needs a micro-batch per stage",
    "interleaved_1f1b": "needs micro-batches in rounds of equal size, one round per pp of them",
    "interleaved_zero_bubble": "needs micro-batches in rounds of equal size, one round per pp of them",
    "dualpipev": "needs a micro-batch per stage, two stages a rank",
}


def _takes(schedule: str, pp: int, number: int) -> bool:
    """Whether torch's schedule runs this many micro-batches."""
    if schedule == "1f1b":
        return number >= pp
    if schedule == "dualpipev":
        return number >= CHUNKS * pp
    if schedule in {"interleaved_1f1b", "interleaved_zero_bubble"}:
        return number % max(1, number // pp) == 0
    return True
