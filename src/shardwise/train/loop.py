"""The training loop, from the first step to the report."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import msgspec

from shardwise.errors import TrainingError
from shardwise.train.build import build_step
from shardwise.train.evaluate import evaluate
from shardwise.train.start import start_report
from shardwise.train.window import Window

if TYPE_CHECKING:
    from shardwise.job import Job
    from shardwise.plan import Plan
    from shardwise.run import EventLog
    from shardwise.run.timeline import Timeline
    from shardwise.step.step import Step
    from shardwise.world import World


class TrainReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a training came to."""

    steps: int
    samples: int
    skipped: int
    """Steps whose gradient was not finite, on which the optimizer stood still."""
    loss: float
    """Mean over the global batch of the last step."""
    evaluation: dict[str, float]
    """Loss and metrics over the whole test split after the last step; empty without one."""
    training_s: float
    """From the first step's start to the last step's end, evaluations included."""
    samples_per_s: float


def run_loop(job: Job, plan: Plan, world: World, events: EventLog, timeline: Timeline) -> tuple[TrainReport, Step]:
    """Train `job` under `plan` to its end; called on every rank. Returns the report and the step that got there."""
    step = build_step(job, plan, world, note=lambda text: events.write("note", text=text))
    test_set = job.data("test")
    timeline.mark("model and data")
    events.write("start", **start_report(job, plan, world, step))

    window = Window(tells_loss=plan.layout.tells_loss(world.rank))
    samples = skipped = 0
    losses: list[float] = []
    evaluation: dict[str, float] = {}
    began = time.perf_counter()
    for batch in step.feed:
        report = step(batch)
        samples += report.samples
        if job.on_step is not None:
            job.on_step(report)
        if report.number == 0:
            timeline.mark("first step")
        ends_epoch = step.length.ends_epoch(report.number)
        is_last = report.number + 1 == step.length.num_steps
        if window.add(report) or ends_epoch or is_last:
            published = window.publish(world)
            events.write("steps", **published)
            skipped += published["skipped"]
            if all(map(math.isfinite, losses)):
                _note_non_finite(published, events)
            losses = published["losses"]
        if test_set is not None and (ends_epoch or is_last):
            evaluation = evaluate(job, plan, world, step=step, dataset=test_set)
            events.write("evaluation", step=step.number, epoch=report.cursor.epoch, values=evaluation)
            window.restart_clock()
    training_s = time.perf_counter() - began
    if skipped == step.number:
        raise TrainingError(
            f"all {skipped} steps were skipped: no gradient was finite, so nothing was learnt",
            fix="lower the learning rate, set clip_norm, or look for NaN in the data and the loss",
        )
    result = TrainReport(
        steps=step.number,
        samples=samples,
        skipped=skipped,
        loss=losses[-1],
        evaluation=evaluation,
        training_s=training_s,
        samples_per_s=samples / training_s,
    )
    events.write("end", **msgspec.to_builtins(result))
    return result, step


def _note_non_finite(published: dict[str, Any], events: EventLog) -> None:
    """Say once when losses stop being numbers."""
    for number, loss in enumerate(published["losses"], published["first"]):
        if not math.isfinite(loss):
            events.write("note", text=f"the loss of step {number} is {loss}")
            return
