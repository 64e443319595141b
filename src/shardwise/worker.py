"""What every rank of a described job runs: world, job, plan, train, and one funnel for failure."""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import replace
from pathlib import Path

import msgspec

from shardwise.environment import identify
from shardwise.job import JobReference  # noqa: TC001 - read at run time by msgspec
from shardwise.recorder.imports import be_deterministic
from shardwise.runs import RunDirectory
from shardwise.runs.failure import describe_failure, write_failure
from shardwise.runs.recorder import Timeline


class WorkerOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What the launcher tells a rank."""

    run: str
    job: JobReference
    started_at: float
    """Seconds since the epoch when the launcher began."""
    plan_sources: dict[str, str]
    """Where the launcher had each value of the plan from."""
    backend: str | None = None
    device: str | None = None
    save_every: int = 0
    """Optimizer steps between checkpoints; 0 saves only when asked to stop."""
    keep: str = "3"
    """Which checkpoints stay, as `--keep` says it."""
    must_save: bool = False
    """Whether a save that fails ends the training."""
    resume: str = "auto"
    """What a run without checkpoints of its own goes on from."""
    check_replicas: int = 1000
    """Optimizer steps between comparisons of what should be equal over ranks; 0 makes none."""
    on_drift: str = "report"
    """What follows when it is not: "report" or "stop"."""
    deterministic: bool = False


def main() -> int:
    """Run the rank that the environment and the order on the command line describe; returns its exit code."""
    order = msgspec.json.decode(sys.argv[1], type=WorkerOrder)
    run = RunDirectory(Path(order.run))
    timeline = Timeline(order.started_at)
    rank = identify().rank
    try:
        _train(order, run, timeline)
    except BaseException as error:  # noqa: BLE001 - the funnel: whatever ended this rank is written down
        failure = describe_failure(error, rank)
        with contextlib.suppress(OSError):
            write_failure(run.error(rank), failure)  # the launcher shows it last, so it is not in the log as well
        sys.stdout.flush()
        # No teardown after a failure: it could wait for peers that wait for us.
        os._exit(failure.exit_code)
    return 0


def _train(order: WorkerOrder, run: RunDirectory, timeline: Timeline) -> None:
    timeline.mark("process")
    if order.deterministic:
        be_deterministic(seed=None)  # the job has one
    from shardwise.checkpoint import CheckpointFolder
    from shardwise.dist import world
    from shardwise.job import load_job
    from shardwise.plans.toml import read_plan
    from shardwise.training.train import train

    timeline.mark("import")
    job = load_job(order.job)
    plan = replace(read_plan(run.plan), sources=order.plan_sources)
    timeline.mark("job")
    with world(backend=order.backend, device=order.device) as here:
        timeline.mark("world")
        if plan.layout.world_size != here.size:
            plan = plan.refit(here.size)  # nodes were lost, or have joined
        # A restart finds what the attempt before it saved, if that was one whole checkpoint at least.
        resume = "auto" if CheckpointFolder(run.checkpoints).paths() else order.resume
        train(
            job,
            plan,
            here,
            run=run,
            show_progress=False,
            timeline=timeline,
            save_every=order.save_every,
            keep=order.keep,
            must_save=order.must_save,
            check_replicas=order.check_replicas,
            on_drift=order.on_drift,
            resume=resume,
        )


if __name__ == "__main__":
    sys.exit(main())
