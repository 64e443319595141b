"""How a training ended: its result, or why there is none, as the command shows it."""

from __future__ import annotations

import shlex
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from shardwise.errors import with_code
from shardwise.launcher.explain import explain_outcome
from shardwise.launcher.policy import Finish, root_cause
from shardwise.runner.local import resume_argv
from shardwise.runs import RunDirectory
from shardwise.runs.console import BAD_INPUT, DONE, INTERRUPTED, JOB_FAILED, PREEMPTED
from shardwise.runs.failure import NOT_SAVED
from shardwise.spec import Report
from shardwise.training.spec import TrainResult

if TYPE_CHECKING:
    from shardwise.launcher.local.attempts import Launched
    from shardwise.training.spec import TrainSpec


class TrainReport(Report, frozen=True, kw_only=True):
    """How a training ended: its result, or why there is none."""

    exit_code: int = DONE
    run: str = ""
    """The run directory; empty where nothing ran on this machine."""
    result: TrainResult | None = None
    """None for a training that failed, was stopped, or was submitted elsewhere."""
    failure: str = ""
    """Why there is no result: the rank, its traceback and the fix; or how to continue."""
    traceback: str = ""
    """Of a refusal inside a rank, for --debug."""

    def to_text(self) -> str:
        """Return the last lines of a training: what came out, how long it took, where to look."""
        if self.result is None:
            return ""
        result, run = self.result, RunDirectory(Path(self.run))
        lines = []
        for name, value in result.evaluation.items():
            shown = f"{value:.2%}" if "accuracy" in name else f"{value:.4f}"
            lines.append(f"test {name:<10} {shown}")
        resumed = f", resumed at step {result.first_step}" if result.first_step else ""
        num_steps = result.steps - result.first_step
        lines.append(f"training time   {result.training_s:.1f} s for {num_steps} steps{resumed}")
        lines.append(f"weights         {run.weights}")
        if run.adapter.is_dir():
            lines.append(f"adapter         {run.adapter}")
        lines.append(f"run directory   {run.path}")
        return "\n".join(lines)

    def note(self) -> str:
        """Return what standard error gets."""
        return self.failure


def read_result(run: RunDirectory) -> TrainReport:
    """Return the report of a training that has finished, from its run directory."""
    found = msgspec.json.decode(run.report_json.read_bytes())["result"]
    found["evaluation"] = {
        name: float("nan") if value is None else value for name, value in found["evaluation"].items()
    }
    return TrainReport(run=str(run.path), result=msgspec.convert(found, TrainResult))


def conclude(spec: TrainSpec, launched: Launched, run: RunDirectory, *, is_first: bool) -> TrainReport:
    """Return how it ended; a run that was refused before its first step leaves nothing behind."""
    outcome, where = launched.outcome, str(run.path)
    if isinstance(launched.decision, Finish) and launched.decision.exit_code == PREEMPTED:
        code = INTERRUPTED if outcome.interrupted == signal.SIGINT else PREEMPTED
        is_saved = not any(one.failure and NOT_SAVED in one.failure.message for one in outcome.exits)
        state = "stopped and saved" if is_saved else "stopped, its last state not saved"
        again = shlex.join(resume_argv(spec, run.path))
        return TrainReport(exit_code=code, run=where, failure=f"shardwise: {state}; continue with: {again}")
    if outcome.interrupted:
        # By SIGUSR1 a batch system asks for the node, not for an end: it begins again, if nothing was saved yet.
        code = PREEMPTED if outcome.interrupted == signal.SIGUSR1 else INTERRUPTED
        return TrainReport(exit_code=code, run=where, failure=f"shardwise: interrupted; the run is in {where}")
    cause = root_cause(outcome.exits)
    if cause is None and isinstance(launched.decision, Finish):
        return read_result(run) if is_first else TrainReport(run=where)
    failure = cause.failure if cause is not None else None
    if failure is not None and failure.exit_code == BAD_INPUT and not run.has_trained:
        run.remove()  # nothing was trained, so the refusal is the command's own
        sentence = with_code(failure.message.replace("JOB.py", spec.job), failure.code)
        return TrainReport(exit_code=BAD_INPUT, failure=f"shardwise: {sentence}", traceback=failure.traceback)
    why = f"{explain_outcome(outcome, run)}\nshardwise: the run is in {where}"
    return TrainReport(exit_code=JOB_FAILED, run=where, failure=why)
