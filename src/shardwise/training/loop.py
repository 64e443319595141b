"""The training loop, from the first step to the report."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

from shardwise.data.loaders import dataset_of
from shardwise.errors import TrainingError
from shardwise.planner.settle import with_engine
from shardwise.runs import EventLog
from shardwise.runs.drift import CHECK_EVERY, ReplicaSpec
from shardwise.runs.progress import ProgressView, write_report
from shardwise.runs.recorder import Recorder, Timeline
from shardwise.training.build import build_step
from shardwise.training.evaluate import evaluate, export_adapters, write_weights
from shardwise.training.journal import Journal, start_report
from shardwise.training.replicas import Replicas
from shardwise.training.saving import Saving, stop_requests
from shardwise.training.spec import SaveSpec, TrainResult

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from shardwise.dist import World
    from shardwise.job import Job
    from shardwise.plans import Plan
    from shardwise.runs import RunDirectory
    from shardwise.training.step.step import Mark, Step


def run_loop(
    job: Job,
    plan: Plan,
    world: World,
    events: EventLog,
    timeline: Timeline,
    *,
    checkpoints: Path | None = None,
    save: SaveSpec = SaveSpec(),  # noqa: B008 - frozen
    replicas: ReplicaSpec = ReplicaSpec(every=CHECK_EVERY),  # noqa: B008 - frozen
    mark: Mark | None = None,
) -> tuple[TrainResult, Step]:
    """Train `job` under `plan` to its end; called on every rank. Returns the report and the step that got there.

    With a folder for `checkpoints` it resumes and saves as `save` says, and leaves when it is asked to stop.
    `mark(phase, step)` is called when each phase of `run.recorder.PHASES` between the first and the last begins.
    """
    saving = Saving(save, checkpoints, job=job, plan=plan, world=world, events=events) if checkpoints else None
    watch = Replicas(replicas, plan, world, events)
    step = _begin(job, plan, world, events, saving, before_update=watch.tap if world.size > 1 else None, mark=mark)
    first_step = step.number
    test_set = dataset_of(job, "test")
    timeline.mark("model and data")
    events.write("start", **start_report(job, plan, world, step))
    watch.start(step)

    journal = Journal(world, events, step.mark)
    evaluation: dict[str, float] = {}
    began = time.perf_counter()
    step.mark("data", first_step)
    with stop_requests() as stop:
        for batch in step.feed:
            report = step(batch)
            if job.on_step is not None:
                job.on_step(report)
            if report.number == first_step:
                timeline.mark("first step")
            is_last = report.number + 1 == step.length.num_steps
            is_end = is_last or step.length.ends_epoch(report.number)
            # What a checkpoint holds is in the log before it: a crash leaves no gap in the curve.
            is_due = is_end or (saving is not None and saving.is_due(step))
            is_stopping = journal.add(report, publish=is_due, stop=stop.is_set)
            watch.after(step, batch, is_due=is_due)
            if test_set is not None and is_end:
                step.mark("evaluate", step.number)
                evaluation = evaluate(step, test_set)
                events.write("evaluation", step=step.number, epoch=report.cursor.epoch, values=evaluation)
                journal.restart_clock()
                step.mark("data", step.number)
            if saving is not None:
                saving.after(step, evaluation if is_end else {}, is_stopping=is_stopping and not is_last)
    if saving is not None:
        step.mark("save", step.number)
        saving.finish()
    training_s = time.perf_counter() - began
    result = _conclude(journal, step.number, first_step, evaluation, training_s)
    events.write("end", **msgspec.to_builtins(result))
    return result, step


def _begin(
    job: Job,
    plan: Plan,
    world: World,
    events: EventLog,
    saving: Saving | None,
    *,
    before_update: Callable[[], None] | None,
    mark: Mark | None,
) -> Step:
    """Build the step, and put the state of the training that it goes on from into it; on every rank."""

    def note(text: str) -> None:
        events.write("note", text=text)

    def build(first_step: int) -> Step:
        return build_step(
            job,
            plan,
            world,
            note=note,
            before_update=before_update,
            first_step=first_step,
            mark=mark,
            report_loss=job.on_step is not None,
        )

    resumed = saving.resume(build) if saving is not None else None
    return resumed if resumed is not None else build(0)


def _conclude(
    journal: Journal, steps: int, first_step: int, evaluation: dict[str, float], training_s: float
) -> TrainResult:
    """Sum up; a training that learnt nothing is an error."""
    if journal.skipped == steps - first_step > 0:
        raise TrainingError(
            f"all {journal.skipped} steps were skipped: no gradient was finite, so nothing was learnt",
            code="train.no-finite-gradient",
            fix="lower the learning rate, set clip_norm, or look for NaN in the data and the loss",
        )
    return TrainResult(
        steps=steps,
        first_step=first_step,
        samples=journal.samples,
        skipped=journal.skipped,
        loss=journal.loss,
        evaluation=evaluation,
        training_s=training_s,
        samples_per_s=journal.samples / training_s,
    )


# Training a job in this world, and the files it leaves in its run directory.


def train(
    job: Job,
    plan: Plan,
    world: World,
    *,
    run: RunDirectory | None = None,
    show_progress: bool = True,
    timeline: Timeline | None = None,
    save: SaveSpec = SaveSpec(),  # noqa: B008 - frozen
    replicas: ReplicaSpec = ReplicaSpec(every=CHECK_EVERY),  # noqa: B008 - frozen
) -> TrainResult:
    """Train `job` under `plan` in a world that already exists; called on every rank, starts no processes.

    With `run`, events, the last phases, checkpoints as `save` asks for them, the trained weights and a report are
    written there. Rank 0 shows progress unless `show_progress` is false.
    """
    plan = with_engine(plan, job.engine)
    timeline = timeline or Timeline(time.time())
    view = ProgressView.on_stderr() if show_progress and world.is_main else None
    events = EventLog(run.events(world.rank) if run else None, view.show if view else None)
    recorder = _open_recorder(run, world.rank, events) if run is not None else None
    try:
        report, step = run_loop(
            job,
            plan,
            world,
            events,
            timeline,
            checkpoints=run.checkpoints if run else None,
            save=save,
            replicas=replicas,
            mark=recorder.mark if recorder else None,
        )
        if run is not None:
            write_weights(step.whole_weights(), run.weights)
            if job.lora is not None:
                export_adapters(step.model, run.adapter, base=job.weights)
        if run is not None and world.is_main:
            timeline.write(run.timeline)
            write_report(run, report, timeline.phases)
        step.mark("end", step.number)
    finally:
        events.close()
        if recorder is not None:
            recorder.close()
        if view is not None:
            view.close()
    return report


def _open_recorder(run: RunDirectory, rank: int, events: EventLog) -> Recorder | None:
    """Begin this rank's record; where a file cannot be mapped or the disk is full, training continues without."""
    try:
        recorder = Recorder(run.recorder(rank))
    except OSError as error:
        events.write("note", text=f"phases are not recorded: {error}")
        return None
    recorder.mark("start", 0)
    return recorder
