"""The training loop, from the first step to the report."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from shardwise.data.loaders import dataset_of
from shardwise.job.mistakes import explained_mistakes
from shardwise.planner.settle import with_engine
from shardwise.runs import EventLog
from shardwise.runs.drift import CHECK_EVERY, ReplicaSpec
from shardwise.runs.progress import ProgressView, write_report
from shardwise.runs.recorder import Recorder, Timeline
from shardwise.training.build import build_step
from shardwise.training.callbacks import Callbacks, Evaluations
from shardwise.training.comparison import compare_prediction
from shardwise.training.evaluate import export_adapters, write_config, write_weights
from shardwise.training.journal import Journal, start_report
from shardwise.training.replicas import Replicas
from shardwise.training.saving import Saving, StartPoint, stop_requests
from shardwise.training.spec import SaveSpec

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from shardwise.dist import World
    from shardwise.job import Job
    from shardwise.plans import Plan
    from shardwise.runs import RunDirectory
    from shardwise.training.spec import TrainResult
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
    """Train `job` under `plan` to its last step and return the result and the step object; call on every rank.

    With a `checkpoints` directory, the loop resumes and saves as `save` specifies, and exits after a stop signal.
    `mark(phase, step)` is called at the start of each phase of `runs.recorder.PHASES`, except the first and the last.
    """
    callbacks = Callbacks(job, world, events)
    saving = None
    if checkpoints is not None:
        saving = Saving(save, checkpoints, job=job, plan=plan, world=world, events=events, callbacks=callbacks)
    watch = Replicas(replicas, plan, world, events)
    step = _begin(job, plan, world, events, saving, before_update=watch.tap if world.size > 1 else None, mark=mark)
    first_step = step.number
    with stop_requests(is_enabled=saving is not None) as stop:
        evaluations = Evaluations(job, dataset_of(job, "test"), callbacks, events, stop)
        timeline.mark("model and data")
        events.write("start", **start_report(job, plan, world, step))
        watch.start(step)
        if evaluations.before_first_step(step) and saving is not None:
            saving.after(step, evaluations.last, is_stopping=callbacks.has_pending_evaluation)
        journal = Journal(world, events, step)
        began = time.perf_counter()
        step.mark("data", first_step)
        # If callbacks stopped the training before the checkpoint was saved, the resumed run trains no further steps.
        for batch in () if callbacks.has_stopped else step.feed:
            report = step(batch)
            if report.number == first_step:
                timeline.mark("first step")
            is_last = callbacks.after_step(step, report) or step.number == step.length.num_steps
            evaluates = evaluations.is_due(step, is_last=is_last)
            # Steps are logged before the checkpoint that includes them, so a crash leaves no gap in the loss curve.
            is_end = is_last or evaluates or step.length.ends_epoch(report.number)
            is_due = is_end or (saving is not None and saving.is_due(step))
            is_stopping = journal.add(report, publish=is_due, stop=stop.is_set)
            watch.after(step, batch, is_due=is_due)
            if evaluates:
                is_last = evaluations.run(step) or is_last
                journal.restart_clock()
            if saving is not None:
                # A run whose last evaluation was interrupted is not complete: the resumed run evaluates again.
                is_stopping = callbacks.has_pending_evaluation or (is_stopping and not is_last)
                saving.after(step, evaluations.last if evaluates else {}, is_stopping=is_stopping)
            if is_last:
                break
        if saving is not None:
            step.mark("save", step.number)
            saving.finish()
    return journal.close(step, first_step, evaluations.last, time.perf_counter() - began), step


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
    """Build the step and load the checkpoint to resume from, if there is one; call on every rank."""

    def note(text: str) -> None:
        events.write("note", text=text)

    def build(start: StartPoint) -> Step:
        return build_step(
            job,
            start.planned(plan),
            world,
            note=note,
            before_update=before_update,
            first_step=start.step,
            position=start.position,
            mark=mark,
            report_loss=job.on_step is not None or job.on_evaluate is not None,
        )

    if saving is not None:
        resumed = saving.resume(build)
        if resumed is not None:
            return resumed
    return build(StartPoint(step=0))


# Training a job in an existing world, and writing its run directory.


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
    """Train `job` under `plan` in an existing world without starting processes; call on every rank.

    With `run`, the function writes events, recorded phases, checkpoints (as `save` specifies), the trained weights and
    a report to the run directory. Rank 0 shows a progress bar unless `show_progress` is false.
    """
    plan = with_engine(plan, job.engine)
    timeline = timeline or Timeline(time.time())
    view = ProgressView.on_stderr() if show_progress and world.is_main else None
    events = EventLog(run.events(world.rank) if run else None, view.show if view else None)
    recorder = _open_recorder(run, world.rank, events) if run is not None else None
    try:
        with explained_mistakes():
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
        with stop_requests(is_enabled=run is not None):  # a stop signal after the last step does not end the export
            if run is not None:
                write_weights(step.whole_weights(), run.weights)
                if job.lora is not None:
                    export_adapters(step.model, run.adapter, base=job.weights)
            if run is not None and world.is_main:
                timeline.write(run.timeline)
                write_report(run, report, timeline.phases)
                compare_prediction(job, plan, report, run.comparison, events)
                write_config(step.model, run.model, events)
        step.mark("end", step.number)
    finally:
        events.close()
        if recorder is not None:
            recorder.close()
        if view is not None:
            view.close()
    return report


def _open_recorder(run: RunDirectory, rank: int, events: EventLog) -> Recorder | None:
    """Open this rank's phase recorder; return None if its file cannot be created or mapped."""
    try:
        recorder = Recorder(run.recorder(rank))
    except OSError as error:
        events.write("note", text=f"phases are not recorded: {error}")
        return None
    recorder.mark("start", 0)
    return recorder
