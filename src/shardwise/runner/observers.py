"""Observers of running ranks, and the report of `train`: the result of a run, or why it failed or stopped.

Observers show the progress of rank 0, copy output, mirror events to experiment trackers, and detect hangs and
replica drift.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec

from shardwise.diagnosis.catalogue import find_preset
from shardwise.diagnosis.guard.guard import Guard
from shardwise.diagnosis.guard.replicas import ReplicaWatch
from shardwise.diagnosis.run.nccl_log import run_effects
from shardwise.environment import variables
from shardwise.errors import InputError, JobError, with_code
from shardwise.job import Job, JobReference, load_job, refer
from shardwise.launcher.explain import explain_outcome
from shardwise.launcher.policy import Finish, root_cause
from shardwise.runner.local import resume_argv
from shardwise.runs import RunDirectory, Tail
from shardwise.runs.console import BAD_INPUT, DONE, INTERRUPTED, JOB_FAILED, PREEMPTED, echo_error
from shardwise.runs.failure import NOT_SAVED, NOT_UPLOADED
from shardwise.runs.progress import ProgressView
from shardwise.runs.state import RunState
from shardwise.spec import Report
from shardwise.training.spec import TrainResult

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor, nn

    from shardwise.diagnosis.guard.peers import Exchange
    from shardwise.launcher.local.attempts import Launched
    from shardwise.launcher.options import Shown
    from shardwise.launcher.spec import HangSpec
    from shardwise.monitor.sinks import SinkSpec
    from shardwise.runs.drift import ReplicaSpec
    from shardwise.training.spec import TrainSpec


_MIRROR_WAIT_S = 10.0
"""Time limit for mirrors to finish after the run, less than the grace period of batch systems."""
_NICENESS = 10
"""Niceness of mirrors, so that ranks have priority."""


class Follower:
    """Shows the progress bar and the output of rank 0. One writer to the terminal keeps them from mixing."""

    def __init__(self, run: RunDirectory) -> None:
        self._view = ProgressView.on_stderr()
        self._state = RunState(run, listener=self._show)
        self._outputs = (Tail(run.stdout(0)), Tail(run.stderr(0)))
        self._began_at = time.time()
        for output in self._outputs:
            output.read()  # of an earlier part of this run, which --resume auto continues

    def tick(self) -> None:
        """Show new output and events."""
        for output in self._outputs:
            for line in output.lines():
                self._view.line(line.decode(errors="replace"))
        while self._state.refresh_events():
            pass

    def _show(self, writer: str, event: dict[str, Any]) -> None:
        if writer == "rank0" and event["at"] >= self._began_at:
            self._view.show(event)

    def line(self, text: str) -> None:
        """Show a message of the launcher."""
        self._view.line(text)

    def close(self) -> None:
        """Restore the terminal."""
        self._view.close()


@contextlib.contextmanager
def following(run: RunDirectory, sinks: Sequence[SinkSpec]) -> Iterator[list[Follower]]:
    """Show the run and mirror it to `sinks` during a launch; yields the observers for the launcher."""
    mirrors = Mirrors(run, sinks)
    follower = Follower(run)
    try:
        yield [follower]
    finally:
        follower.close()
        mirrors.close()


@dataclass(frozen=True)
class _Copy:
    tail: Tail
    stream: IO[bytes]
    prefix: bytes


class Tee:
    """Copies the output of ranks from their log files to the terminal.

    Ranks write directly to their log files. Without a pipe in between, no output is lost and no rank blocks.
    """

    def __init__(self, run: RunDirectory, shown: list[tuple[Shown, Shown]]) -> None:
        """Copy the output of ranks 0 to N-1, the ranks of a single node."""
        self._run = run
        self._shown = shown
        self._known: dict[tuple[int, int], _Copy] = {}
        self._copies: list[_Copy] = []
        self.ranks: set[int] = set()
        """Ranks whose standard error was shown."""
        self.follow(range(len(shown)))

    def follow(self, ranks: range) -> None:
        """Copy the output of these ranks from now on, without repeating output that was already copied."""
        self._copies = []
        for rank, views in zip(ranks, self._shown, strict=True):
            if views[1].copied or views[1].terminal:
                self.ranks.add(rank)
            for stream, view in enumerate(views):
                if view.copied and not view.terminal:
                    copy = self._known.setdefault((rank, stream), self._copy(rank, stream, view))
                    self._copies.append(copy)

    def _copy(self, rank: int, stream: int, view: Shown) -> _Copy:
        tail = Tail((self._run.stdout, self._run.stderr)[stream](rank))
        tail.read()  # skip the output of an earlier launch of this run
        return _Copy(
            tail, (sys.stdout, sys.stderr)[stream].buffer, f"[rank{rank}]: ".encode() if view.prefixed else b""
        )

    def tick(self) -> None:
        """Copy new output, unchanged or with the rank before each line."""
        for copy in self._copies:
            if copy.prefix:
                new = b"".join(copy.prefix + line + b"\n" for line in copy.tail.lines())
            else:
                new = copy.tail.read()
            if new:
                with contextlib.suppress(OSError):  # the terminal was closed; the log files have the complete output
                    copy.stream.write(new)
                    copy.stream.flush()


class Mirrors:
    """Runs one `shardwise watch RUN --sink SINK` process per sink, with its log in the run directory."""

    def __init__(self, run: RunDirectory, sinks: Sequence[SinkSpec]) -> None:
        self._run = run
        self._children = [(sink, *self._start(sink, number)) for number, sink in enumerate(sinks)]

    def _start(self, sink: SinkSpec, number: int) -> tuple[subprocess.Popen[bytes], Path]:
        self._run.sinks.mkdir(exist_ok=True)
        log = self._run.sinks / f"{sink.kind}-{number}.log"
        command = [sys.executable, "-m", "shardwise", "watch", str(self._run.path), "--sink", str(sink)]
        with log.open("ab") as file:
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
            )
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, child.pid, _NICENESS)
        return child, log

    def close(self) -> None:
        """Wait until the mirrors have copied the finished run; kill and report mirrors that exceed the time limit."""
        deadline = time.monotonic() + _MIRROR_WAIT_S
        for sink, child, log in self._children:
            command = f"shardwise watch {self._run.path} --sink {sink}"
            try:
                if child.wait(max(0.0, deadline - time.monotonic())) != 0:
                    output = log.read_text(errors="replace").strip().splitlines() or ["no output"]
                    reason = output[-1].removeprefix("shardwise: ")
                    echo_error(f"shardwise: {sink} is incomplete ({reason}); complete it with: {command}")
            except subprocess.TimeoutExpired:
                echo_error(f"shardwise: {sink} is incomplete (timeout); complete it with: {command}")
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)  # includes processes started by the tracker
                child.wait()


def start_guard(
    run: RunDirectory,
    spec: HangSpec,
    ranks: range,
    *,
    exchange: Exchange | None = None,
    note: Callable[[str], None] = echo_error,
) -> list[Guard]:
    """Return the guard that detects hangs, mismatched collectives and stragglers, or an empty list if it is disabled.

    `exchange` is the connection to the guards of other nodes, None on a single node.
    """
    if not spec.after_s:
        return []
    guard = Guard(run, spec, note, exchange)
    guard.follow(ranks)
    return [guard]


def start_replica_watch(run: RunDirectory, spec: ReplicaSpec, ranks: range, node: int = 0) -> list[ReplicaWatch]:
    """Return the watch that compares the replicas of a launched script, or an empty list if it is disabled."""
    if not spec.every:
        return []
    watch = ReplicaWatch(run, spec, echo_error, node)
    watch.follow(ranks)
    return [watch]


def failure_text(guards: Sequence[Guard | ReplicaWatch], explanation: str) -> str:
    """Return the text of a failed launch: the last collective of each rank, the explanation, and other verdicts."""
    before = [guard.places() for guard in guards if not guard.verdict]
    after = [guard.verdict for guard in guards if guard.verdict not in explanation]
    return "\n".join(text for text in [*before, explanation, *after] if text)


class TrainReport(Report, frozen=True, kw_only=True):
    """The result of a training run: exit code, run directory, metrics and failure."""

    exit_code: int = DONE
    run: str = ""
    """The run directory; empty if no ranks ran on this machine."""
    result: TrainResult | None = None
    """Metrics and steps; None if the run failed, was stopped, or was submitted to other machines."""
    failure: str = ""
    """The failed rank, its traceback and the fix, or the command that resumes a stopped run."""
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
                fix="run train on this machine until it completes",
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
        if is_saved and spec.save.upload is not None:
            uploaded = not any(each.failure and NOT_UPLOADED in each.failure.message for each in outcome.exits)
            state = f"stopped, saved {'and uploaded' if uploaded else NOT_UPLOADED} to {spec.save.upload}"
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


def report_preset(name: str | None) -> None:
    """Print the variables that a preset sets or leaves unchanged; raises InputError if the preset does not exist."""
    if name is None:
        return
    preset, own = find_preset(name), variables("")
    added = " ".join(f"{key}={value}" for key, value in preset.missing_from(own).items())
    kept = " ".join(f"{key}={value}" for key, value in preset.overridden_by(own).items())
    unchanged = f"; {kept} is already set and unchanged" if kept else ""
    echo_error(f"shardwise: preset {name} sets {added or 'nothing'}{unchanged}")


def report_effects(name: str | None, added: Mapping[str, str], run: RunDirectory) -> None:
    """Print which variables of a preset NCCL read in a finished run; does nothing without a preset."""
    if name is None:
        return
    verdicts = run_effects(added, run)
    unused = [verdict for verdict in verdicts if verdict.state != "ok"]
    if len(unused) < len(verdicts):
        num_read = len(verdicts) - len(unused)
        echo_error(f"shardwise: preset {name}: NCCL read {num_read} of {len(verdicts)} variables")
    for verdict in unused:
        echo_error(f"shardwise: preset {name}: {verdict.name}: {verdict.fact}: {verdict.fix}")
