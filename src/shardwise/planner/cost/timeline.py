"""One optimizer step as a row of spans: streams of one rank, or the stages of a pipeline."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.planner.cost.events import Span, run_streams
from shardwise.planner.cost.passes import COMPUTE, WIRE, backward_tasks, forward_tasks
from shardwise.planner.cost.pipeline_time import pipeline_spans

if TYPE_CHECKING:
    from shardwise.planner.cost.time import TimeModel
    from shardwise.planner.model.shape import ModelShape
    from shardwise.plans.plan import Plan

SHOWN_ROUNDS = 2
"""Micro-batches per stage that a picture of a pipeline shows; the others repeat its middle."""


def timeline(model: TimeModel, shape: ModelShape, plan: Plan) -> list[Span]:
    """Return what runs when, in seconds from the start, in the plan's last micro-batch and its update.

    Of a pipeline: the turns of all stages, over as many micro-batches as show its rhythm.
    """
    if plan.layout.pp > 1:
        return _stages(model, shape, plan)
    (cost,) = model.stages(shape, plan)
    ahead = plan.communication.prefetch
    spans = run_streams(forward_tasks(cost.units, prefetch=ahead, gathers=plan.zero >= 2))
    middle = max(span.end for span in spans)
    tasks = backward_tasks(cost.units, prefetch=ahead, gathers=plan.zero == 3, reduces=True)
    spans += [span._replace(start=span.start + middle, end=span.end + middle) for span in run_streams(tasks)]
    return spans + _after(model, shape, plan, max(span.end for span in spans))


def _after(model: TimeModel, shape: ModelShape, plan: Plan, start: float) -> list[Span]:
    """Return what follows the last backward pass, one after the other."""
    spans = []
    parts = model.predict(shape, plan).parts
    for name, stream in (("sum", WIRE), ("update", COMPUTE), ("meet", WIRE), ("collect", WIRE)):
        if name in parts:
            spans.append(Span(stream, name, start, start + parts[name]))
            start += parts[name]
    return spans


def _stages(model: TimeModel, shape: ModelShape, plan: Plan) -> list[Span]:
    costs = model.stages(shape, plan)
    shown = min(plan.accumulation, SHOWN_ROUNDS * plan.layout.pp)
    ranks = pipeline_spans(
        plan,
        [sum(unit.forward for unit in cost.units) for cost in costs],
        [sum(unit.backward for unit in cost.units) for cost in costs],
        model.hop(shape, plan),
        micro_batches=shown,
    )
    return [span._replace(stream=f"pp rank {rank}") for rank, spans in enumerate(ranks) for span in spans]
