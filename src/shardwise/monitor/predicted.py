"""The memory that planning predicts for a run: worked out by a process of its own, kept in the run directory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec

from shardwise.runs import RunDirectory

_NICE = 19
"""The lowest priority: the run itself may need the cores."""


class Predicted(msgspec.Struct, frozen=True, kw_only=True):
    """What predicted.json holds: bytes, or why there are none."""

    peak_bytes: float | None = None
    why_not: str = ""


def read_predicted(run: RunDirectory) -> tuple[float | None, str]:
    """Return the predicted peak of a rank's tensors in bytes, None where nobody asked; and why not, if that failed."""
    try:
        found = msgspec.json.decode(_path(run).read_bytes(), type=Predicted)
    except (OSError, ValueError):
        return None, ""
    return found.peak_bytes, found.why_not


def start_predicting(run: RunDirectory) -> subprocess.Popen[bytes] | None:
    """Begin to predict in the background, unless the run knows already; `read_predicted` reads what came of it."""
    if read_predicted(run)[0] is not None:
        return None
    command = [sys.executable, "-m", "shardwise.monitor.predicted", str(run.path)]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def predict(run: RunDirectory) -> Predicted:
    """Load the job and the plan of a run and predict its memory; imports torch and the user's file."""
    if not run.job.exists() or not run.plan.exists():
        return Predicted(why_not="only a described job can be predicted")
    from shardwise.bench.step_findings import predict_step
    from shardwise.environment import cache_directory
    from shardwise.job.load import JobReference, load_job
    from shardwise.planner.trace.trace import described
    from shardwise.plans.toml import read_plan

    try:
        job = load_job(msgspec.json.decode(run.job.read_bytes(), type=JobReference))
        found = predict_step(
            job,
            read_plan(run.plan),
            lambda job, compute: described(job, compute, cache_directory() / "models"),
            processes=1,
        )
    except Exception as error:  # noqa: BLE001 - the user's file and model may raise anything, and a view goes on without
        return Predicted(why_not=" ".join((str(error) or type(error).__name__).split()))
    return Predicted(peak_bytes=found["peak_bytes"])


def _path(run: RunDirectory) -> Path:
    return run.path / "predicted.json"


def _main(path: str) -> None:
    os.nice(_NICE)
    run = RunDirectory(Path(path))
    partial = _path(run).with_suffix(".partial")
    partial.write_bytes(msgspec.json.encode(predict(run)))
    partial.replace(_path(run))


if __name__ == "__main__":
    _main(sys.argv[1])
