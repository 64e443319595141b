"""What options that the search leaves alone would take off the chosen plan's step."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from shardwise.planner.cost.memory import predict_memory
from shardwise.planner.cost.stages import SPLIT_BACKWARD
from shardwise.planner.cost.time import TimeModel
from shardwise.planner.search.search import refused_by_rule

if TYPE_CHECKING:
    from shardwise.planner.search.search import Answer

ROUND = 25
"""Steps between syncs for which low communication is offered."""


def compile_gain(answer: Answer) -> float:
    """Return what compiling blocks would take off the best plan's step, as a fraction; 0 without such a plan."""
    best = answer.best
    if best is None or best.plan.compile != "none" or best.plan.pipeline.schedule in SPLIT_BACKWARD:
        return 0.0
    return _gain(answer, compile="blocks")


def capture_gain(answer: Answer) -> float:
    """Return what capturing the step as one graph would take off; 0 where that cannot be: shapes must stay the same."""
    best = answer.best
    if best is None or best.plan.layout.world_size > 1 or answer.question.cluster.device.kind == "cpu":
        return 0.0
    return _gain(answer, capture="step")


def rounds_gain(answer: Answer) -> float:
    """Return what replicas that meet every ROUND steps only would take off, which changes numbers; 0 where refused."""
    best = answer.best
    if best is None or best.plan.layout.replicate == 1:
        return 0.0
    if answer.question.model.plain.ties_samples and best.plan.batch_norm == "sync":
        return 0.0
    return _gain(answer, communication=dataclasses.replace(best.plan.communication, sync_every=ROUND))


def _gain(answer: Answer, **changes: Any) -> float:
    question, best = answer.question, answer.best
    if best is None:
        return 0.0
    plan = dataclasses.replace(best.plan, **changes)
    if refused_by_rule(question, plan):
        return 0.0
    shape = question.model.for_plan(plan)
    memory = predict_memory(shape, plan, optimizer=question.optimizer, context=question.context)
    if memory.total > question.room:
        return 0.0
    times = TimeModel(question.cluster, question.calibration, optimizer=question.optimizer)
    return 1 - times.predict(shape, plan).seconds / best.time.seconds
