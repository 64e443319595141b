"""Predicted beside measured time and memory of a training run, in its run directory and in the user's history."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

import msgspec

from shardwise.planner.history import append_record, record_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from shardwise.job import Job
    from shardwise.plans import Plan
    from shardwise.runs import EventLog
    from shardwise.training.spec import TrainResult


LEAST_STEPS = 10
LEAST_S = 10.0
"""Steps and seconds from which a step time is worth comparing with a prediction, which takes about 1 s of tracing."""


def median_step(windows: Sequence[tuple[int, float]]) -> float | None:
    """Return the median over windows of (steps, seconds) of the seconds of a step; None if they are too short."""
    if sum(steps for steps, _ in windows) < LEAST_STEPS or sum(seconds for _, seconds in windows) < LEAST_S:
        return None
    return statistics.median(seconds / steps for steps, seconds in windows)


def compare_prediction(job: Job, plan: Plan, result: TrainResult, path: Path, events: EventLog) -> None:
    """Write the prediction of a plan beside the measurement to `path` and to the history; rank 0 only.

    A run without a measured step time, or of another engine, is not compared. A comparison that fails leaves a note
    and never ends the run, which has already trained.
    """
    if result.step_s is None or plan.engine != "torch":
        return
    try:
        record = record_of(job, plan, step_s=result.step_s, peak_bytes=result.peak_bytes)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1))
        append_record(record)
    except Exception as error:  # noqa: BLE001 - tracing runs the user's code, which may raise anything
        reason = " ".join((str(error) or type(error).__name__).split())
        events.write("note", text=f"the run is not compared with its prediction: {reason}")
