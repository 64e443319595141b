"""The plan "auto" for a job on the machine at hand: searched on GPUs, the simplest on a CPU."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from shardwise.errors import ShardwiseError
from shardwise.hardware.calibration_file import calibration_for
from shardwise.hardware.cluster import this_machine
from shardwise.planner.search.explain import in_gb
from shardwise.planner.search.search import Question, search
from shardwise.planner.search.subject import job_subject

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardwise.hardware.machine import Cluster
    from shardwise.job import Job
    from shardwise.planner.model.forms import Model
    from shardwise.plans.plan import DType, Plan


def _machines(world_size: int) -> Cluster:
    """Return this machine, or so many like it."""
    here = this_machine()
    if world_size > here.num_devices and world_size % here.num_devices == 0:
        return dataclasses.replace(here, num_devices=world_size)
    return this_machine(world_size)


def search_plan(
    job: Job, world_size: int, describe: Callable[[Job, DType], Model], accepts: Callable[[Plan], None]
) -> tuple[Plan | None, str]:
    """Return the best plan for a job on GPUs of machines like this one and why; None, and why, where none was found."""
    try:
        cluster = _machines(world_size)
        subject = job_subject(job, cluster, describe, accepts=accepts)
    except ShardwiseError as error:
        return None, f"could not be searched ({error.fact})"
    question = Question(
        model=subject.model,
        cluster=cluster,
        calibration=calibration_for(cluster.node),
        batch_size=subject.batch_size,
        precision=subject.precision,
        optimizer=subject.optimizer,
        accepts=subject.accepts,
    )
    answer = search(question)
    if answer.best is None:
        return None, "that fits was not found (shardwise plan shows the numbers)"
    best, device = answer.best, cluster.device
    why = (
        f"auto: {best.family} of {answer.num_plans} plans, {in_gb(best.memory.total)} of"
        f" {in_gb(device.memory_bytes)}, {best.time.seconds:.3g} s a step predicted"
    )
    sources = dict.fromkeys(("layout", "zero", "recompute", "micro_batch", "accumulation", "fused_loss"), why)
    return dataclasses.replace(best.plan, sources={**sources, "precision": subject.precision_source}), why
