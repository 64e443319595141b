"""A job's model for planning: its description, from the user's cache, and its rules; torch is imported when called."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from shardwise.environment import cache_directory

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardwise.job import Job
    from shardwise.planner.model.forms import Model
    from shardwise.plans.plan import DType, Plan


def describe_job(job: Job, compute: DType) -> Model:
    """Return the model of a job as planning sees it, computed in `compute`."""
    from shardwise.planner.trace.described import described

    return described(job, compute, cache_directory() / "models")


def job_rules(job: Job) -> Callable[[Plan], None]:
    """Return the check that `train` makes of a plan for this job; the model is built once, for the first plan."""

    @cache
    def rules() -> Callable[[Plan], None]:
        from shardwise.training.preflight import ModelRules

        return ModelRules(job)

    def check(plan: Plan) -> None:
        rules()(plan)

    return check
