"""What planning says of a step that is about to be measured, under the names of what is measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.hardware.calibration_file import calibration_for
from shardwise.hardware.cluster import this_machine
from shardwise.planner.cost.memory import predict_memory
from shardwise.planner.cost.time import WAITING, predict_time
from shardwise.planner.search.subject import optimizer_shape

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardwise.job import Job
    from shardwise.planner.model.forms import Model
    from shardwise.plans import Plan
    from shardwise.plans.plan import DType


def predict_step(job: Job, plan: Plan, describe: Callable[[Job, DType], Model], *, processes: int) -> dict[str, float]:
    """Return predicted figures of one rank on this machine, where `processes` of them run; in a fake world 1.

    What compute waits for others is left out in a fake world, since nothing is sent there.
    """
    cluster = this_machine(processes)
    shape = describe(job, plan.precision.compute).for_plan(plan)
    optimizer = optimizer_shape(job.optimizer)
    calibration = calibration_for(cluster.node)
    memory = predict_memory(shape, plan, optimizer=optimizer, context=calibration.context_bytes.value)
    time = predict_time(shape, plan, cluster, calibration, optimizer=optimizer)
    alone = processes < plan.layout.world_size
    seconds = time.seconds - (sum(time.parts.get(name, 0.0) for name in WAITING) if alone else 0.0)
    return {"step_s": seconds, "peak_bytes": memory.peak}
