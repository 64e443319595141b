"""Entry point of the ranks of `train`: starts the world, loads job and plan, trains, and records any failure."""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import replace
from pathlib import Path

import msgspec

from shardwise.environment import identify
from shardwise.job import JobReference, load_job
from shardwise.launcher.local.processes import set_title
from shardwise.plans.toml import read_plan
from shardwise.recorder.imports import be_deterministic
from shardwise.runs import RunDirectory
from shardwise.runs.failure import describe_failure, write_failure
from shardwise.runs.recorder import Timeline
from shardwise.training.spec import RunStart, TrainSpec


def main() -> int:
    """Run this rank with the TrainSpec in argv, and return the exit code."""
    spec = TrainSpec.from_json(sys.argv[1])
    run = RunDirectory(spec.run_dir or Path())
    rank = identify().rank
    set_title(Path(spec.job).name, rank)
    try:
        _train(spec, run)
    except BaseException as error:  # noqa: BLE001 - every failure of a rank is recorded
        failure = describe_failure(error, rank)
        with contextlib.suppress(OSError):
            write_failure(run.error(rank), failure)  # not logged as well, because the launcher prints it last
        sys.stdout.flush()
        # Skip the teardown, which could deadlock with peers that wait for this rank.
        os._exit(failure.exit_code)
    return 0


def _train(spec: TrainSpec, run: RunDirectory) -> None:
    start = msgspec.json.decode(run.start.read_bytes(), type=RunStart)
    timeline = Timeline(start.started_at)
    timeline.mark("process")
    if spec.deterministic:
        be_deterministic(seed=None)  # the job has a seed
    # These import torch, which reads the variables of deterministic mode.
    from shardwise.checkpoint.directory import CheckpointDirectory
    from shardwise.dist import world
    from shardwise.training.loop import train

    timeline.mark("import")
    job = load_job(msgspec.json.decode(run.job.read_bytes(), type=JobReference))
    plan = replace(read_plan(run.plan), sources=start.plan_sources)
    timeline.mark("job")
    with world(backend=spec.place.backend, device=spec.place.device) as here:
        timeline.mark("world")
        if plan.layout.world_size != here.size:
            plan = plan.refit(here.size)  # nodes failed or joined since the plan was written
        save = spec.save
        if CheckpointDirectory(run.checkpoints).paths():
            save = save.replace(resume="auto")  # a restart resumes from the checkpoints of earlier attempts
        train(job, plan, here, run=run, show_progress=False, timeline=timeline, save=save, replicas=spec.replicas)


if __name__ == "__main__":
    sys.exit(main())
