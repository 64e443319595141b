"""The report of `train`: the result of a training run, or the reason why it failed or stopped."""

from __future__ import annotations

import shlex
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from shardwise.errors import InputError, JobError, with_code
from shardwise.job import Job, JobReference, load_job, refer
from shardwise.launcher.explain import explain_outcome
from shardwise.launcher.policy import Finish, root_cause
from shardwise.runner.local import resume_argv
from shardwise.runs import RunDirectory
from shardwise.runs.console import BAD_INPUT, DONE, INTERRUPTED, JOB_FAILED, PREEMPTED
from shardwise.runs.failure import NOT_SAVED
from shardwise.spec import Report
from shardwise.training.spec import TrainResult

if TYPE_CHECKING:
    from torch import Tensor, nn

    from shardwise.launcher.local.attempts import Launched
    from shardwise.training.spec import TrainSpec


class TrainReport(Report, frozen=True, kw_only=True):
    """The result of a training run: exit code, run directory, metrics and failure."""

    exit_code: int = DONE
    run: str = ""
    """The run directory; empty if no ranks ran on this machine."""
    result: TrainResult | None = None
    """Metrics and steps; None if the run failed, was stopped, or was submitted to other machines."""
    failure: str = ""
    """The failed rank, its traceback and the fix, or the command that resumes a stopped training."""
    traceback: str = ""
    """Traceback of an input error on a rank, for --debug."""

    @property
    def weights(self) -> Path | None:
        """The file of the trained weights, which torch.load and Job.weights read; None without a result."""
        return RunDirectory(Path(self.run)).weights if self.result is not None else None

    def state_dict(self) -> dict[str, Tensor]:
        """Return the trained weights: the full state dict of the user's model, in host memory."""
        import torch

        if self.weights is None:
            raise InputError(
                f"no trained weights are available: {self.failure or 'the ranks did not run on this machine'}",
                code="train.no-weights",
                fix="run train again, until it completes on this machine",
            )
        weights: dict[str, Tensor] = torch.load(self.weights, map_location="cpu", weights_only=True)
        return weights

    def load_model(self, job: Job | None = None) -> nn.Module:
        """Return the trained model in eval mode, in host memory: `job.model()` with the trained weights.

        Without `job`, the job file of the run is loaded again, with the overrides that the run had.
        """
        weights = self.state_dict()
        job = job or _job_of(RunDirectory(Path(self.run)))
        if job.engine != "torch":
            raise JobError(
                f"load_model requires Job.engine torch, got {job.engine}",
                code="support.load-model-engine",
                fix=f"pass the weights to a new job: Job(weights={str(self.weights)!r})",
            )
        model = job.model()
        dtypes = {value.dtype for value in weights.values() if value.is_floating_point()}
        if len(dtypes) == 1:
            model.to(dtypes.pop())  # such as fp64, in which the whole model was trained
        model.load_state_dict(weights)
        return model.eval()

    def to_text(self) -> str:
        """Return the summary of a training run: metrics, time and output files."""
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
        """Return the text for standard error."""
        return self.failure


def _job_of(run: RunDirectory) -> Job:
    """Load the job of a run from its job file; raises JobError if the job was passed as a Job object."""
    if not run.job.exists():
        raise JobError(
            f"{run.path} has no job file, because train received a Job object",
            code="train.no-job-file",
            fix="pass the job: report.load_model(job)",
        )
    known = msgspec.json.decode(run.job.read_bytes(), type=JobReference)
    # A new reference skips the digest check: an edited file may define the same model, and load_state_dict checks it.
    return load_job(refer(f"{known.path}:{known.attribute}", known.overrides))


def read_result(run: RunDirectory) -> TrainReport:
    """Return the report of a finished training run from its run directory."""
    found = msgspec.json.decode(run.report_json.read_bytes())["result"]
    for values in (found, found["evaluation"]):  # JSON has no NaN; a resumed run without further steps has no loss
        values |= {name: float("nan") for name, value in values.items() if value is None}
    return TrainReport(run=str(run.path), result=msgspec.convert(found, TrainResult))


def conclude(spec: TrainSpec, launched: Launched, run: RunDirectory, *, is_first: bool) -> TrainReport:
    """Return the report of a training run; remove its run directory after an input error before the first step."""
    outcome, where = launched.outcome, str(run.path)
    if isinstance(launched.decision, Finish) and launched.decision.exit_code == PREEMPTED:
        code = INTERRUPTED if outcome.interrupted == signal.SIGINT else PREEMPTED
        is_saved = not any(each.failure and NOT_SAVED in each.failure.message for each in outcome.exits)
        state = "stopped and saved" if is_saved else "stopped, but the last state was not saved"
        command = shlex.join(resume_argv(spec, run.path))
        return TrainReport(exit_code=code, run=where, failure=f"shardwise: {state}; continue with: {command}")
    if outcome.interrupted:
        # SIGUSR1 is a preemption, so the batch system should run the job again even if nothing was saved.
        code = PREEMPTED if outcome.interrupted == signal.SIGUSR1 else INTERRUPTED
        return TrainReport(exit_code=code, run=where, failure=f"shardwise: interrupted; the run is in {where}")
    cause = root_cause(outcome.exits)
    if cause is None and isinstance(launched.decision, Finish):
        return read_result(run) if is_first else TrainReport(run=where)
    failure = cause.failure if cause is not None else None
    if failure is not None and failure.exit_code == BAD_INPUT and not run.has_trained:
        run.remove()  # nothing was trained, so this is an input error of the command
        message = with_code(failure.message.replace("JOB.py", spec.job), failure.code)
        return TrainReport(exit_code=BAD_INPUT, failure=f"shardwise: {message}", traceback=failure.traceback)
    explanation = f"{explain_outcome(outcome, run)}\nshardwise: the run is in {where}"
    return TrainReport(exit_code=JOB_FAILED, run=where, failure=explanation)
