"""What every rank of a described job runs: world, job, plan, train, and one funnel for failure."""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import replace
from pathlib import Path

import msgspec

from shardwise.environment import identify
from shardwise.job import JobReference, load_job
from shardwise.plans.toml import read_plan
from shardwise.recorder.imports import be_deterministic
from shardwise.runs import RunDirectory
from shardwise.runs.failure import describe_failure, write_failure
from shardwise.runs.recorder import Timeline
from shardwise.training.spec import RunStart, TrainSpec


def main() -> int:
    """Run the rank that the environment and the Spec on the command line describe; returns its exit code."""
    spec = TrainSpec.from_json(sys.argv[1])
    run = RunDirectory(spec.run_dir or Path())
    rank = identify().rank
    try:
        _train(spec, run)
    except BaseException as error:  # noqa: BLE001 - the funnel: whatever ended this rank is written down
        failure = describe_failure(error, rank)
        with contextlib.suppress(OSError):
            write_failure(run.error(rank), failure)  # the launcher shows it last, so it is not in the log as well
        sys.stdout.flush()
        # No teardown after a failure: it could wait for peers that wait for us.
        os._exit(failure.exit_code)
    return 0


def _train(spec: TrainSpec, run: RunDirectory) -> None:
    start = msgspec.json.decode(run.start.read_bytes(), type=RunStart)
    timeline = Timeline(start.started_at)
    timeline.mark("process")
    if spec.deterministic:
        be_deterministic(seed=None)  # the job has one
    # These import torch, which has to find determinism set.
    from shardwise.checkpoint import CheckpointFolder
    from shardwise.dist import world
    from shardwise.training.loop import train

    timeline.mark("import")
    job = load_job(msgspec.json.decode(run.job.read_bytes(), type=JobReference))
    plan = replace(read_plan(run.plan), sources=start.plan_sources)
    timeline.mark("job")
    with world(backend=spec.place.backend, device=spec.place.device) as here:
        timeline.mark("world")
        if plan.layout.world_size != here.size:
            plan = plan.refit(here.size)  # nodes were lost, or have joined
        save = spec.save
        if CheckpointFolder(run.checkpoints).paths():
            save = save.replace(resume="auto")  # a restart finds what the attempt before it saved
        train(job, plan, here, run=run, show_progress=False, timeline=timeline, save=save, replicas=spec.replicas)


if __name__ == "__main__":
    sys.exit(main())
