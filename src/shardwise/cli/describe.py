"""A job's model described for planning, from the user's cache where it was traced before; imports torch when called."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.environment import cache_directory

if TYPE_CHECKING:
    from shardwise.job import Job
    from shardwise.plan.model.forms import Model
    from shardwise.plan.plan import DType


def describe_job(job: Job, compute: DType) -> Model:
    """Return the model of a job as planning sees it, computed in `compute`."""
    from shardwise.step.described import described

    return described(job, compute, cache_directory() / "models")
