"""Time of a pipeline: turns of its stages by schedule, with the bubbles between them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.planner.cost.events import pipeline_turns, run_pipeline
from shardwise.planner.cost.stages import SPLIT_BACKWARD

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.planner.cost.events import Span
    from shardwise.plans.plan import Plan

ROUNDS = 2
"""Rounds of pp micro-batches that are simulated; every further one takes as long as the busiest rank works on it."""
WEIGHT_SHARE = 0.5
"""Of a backward pass, what makes gradients of weights: each matrix product has one for its input and one for those."""


def pipeline_span(
    plan: Plan, forward: Sequence[float], backward: Sequence[float], ranks: Sequence[int], hop: float
) -> float:
    """Return seconds of all micro-batches on all stages; `forward` and `backward` are seconds by stage."""
    schedule, pp, number = plan.pipeline.schedule, plan.layout.pp, plan.accumulation
    simulated = number - max(0, number // pp - ROUNDS) * pp
    while simulated % max(1, simulated // pp):  # rounds of equal size, which interleaving needs
        simulated += pp if simulated < number else 1
    spans = pipeline_spans(plan, forward, backward, hop, micro_batches=simulated)
    span = max(turn[-1].end for turn in spans)
    busy = [sum(forward[s] + backward[s] for s, rank in enumerate(ranks) if rank == each) for each in range(pp)]
    span += (number - simulated) * max(busy)  # or less, where more were needed for a round
    if schedule in SPLIT_BACKWARD:
        # Gradients of weights wait for nobody: they fill the time in which 1F1B idles at the start and at the end
        # (Qi et al. 2023, zero-bubble schedules: (pp - 1)(forward + input - weight) is left of it).
        filled = 2 * (pp - 1) * WEIGHT_SHARE * max(backward)
        span = max(number * max(busy), span - filled)
    return span


def pipeline_spans(
    plan: Plan, forward: Sequence[float], backward: Sequence[float], hop: float, *, micro_batches: int
) -> list[list[Span]]:
    """Return the turns of each rank along pp in their time."""
    schedule, pp = plan.pipeline.schedule, plan.layout.pp
    chunks = len(forward) // pp
    turns = [pipeline_turns(schedule, rank, pp=pp, chunks=chunks, micro_batches=micro_batches) for rank in range(pp)]
    return run_pipeline(turns, forward, backward, lambda _: hop)


def pipeline_floor(busy: Sequence[float], stage_seconds: Sequence[float], micro_batches: int) -> float:
    """Return what no schedule of whole backward passes goes below.

    A rank starts when the stages before its first have seen the first micro-batch, and those must still go back
    through them when it has done its last; `busy` is seconds of one micro-batch by rank, `stage_seconds` by stage.
    """
    before = floor = 0.0
    for rank, seconds in enumerate(busy):
        floor = max(floor, before + micro_batches * seconds)
        before += stage_seconds[rank]
    return floor
