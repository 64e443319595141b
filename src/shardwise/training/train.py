"""Training a job in this world, and the files it leaves in its run directory."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from shardwise.planner.settle import with_engine_of
from shardwise.runs import EventLog
from shardwise.runs.drift import CHECK_EVERY, ReplicaSpec
from shardwise.runs.progress import ProgressView, write_report
from shardwise.runs.recorder import Recorder, Timeline
from shardwise.training.evaluate import export_adapters, write_weights
from shardwise.training.loop import run_loop
from shardwise.training.spec import SaveSpec, TrainResult

if TYPE_CHECKING:
    from shardwise.dist import World
    from shardwise.job import Job
    from shardwise.plans import Plan
    from shardwise.runs import RunDirectory


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
    plan = with_engine_of(plan, job)
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
