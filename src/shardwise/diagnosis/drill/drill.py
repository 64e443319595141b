"""Drills: run the user's job without a fault, then once with each fault, and check detection and recovery."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise import checkpoint
from shardwise.diagnosis.drill.faults import Fault, read_mark
from shardwise.diagnosis.drill.judge import DrillEvidence, DrillReport, find_sign, judge, read_losses
from shardwise.diagnosis.drill.target import DrillSpec, drill_target, make_target
from shardwise.diagnosis.guard.guard import Guard
from shardwise.diagnosis.run.facts import read_run
from shardwise.errors import InputError, RankFailedError
from shardwise.launcher.explain import explain_outcome, verdict
from shardwise.launcher.local.attempts import Launched, launch, node_environment, starter_for
from shardwise.launcher.local.target import Program
from shardwise.launcher.policy import Finish
from shardwise.launcher.spec import HangSpec
from shardwise.runs import create_run
from shardwise.runs.console import CHECK_FAILED, DONE, echo_error
from shardwise.spec import spec_function

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.diagnosis.drill.faults import Kind
    from shardwise.diagnosis.drill.judge import DrillResult
    from shardwise.diagnosis.drill.target import DrillTarget
    from shardwise.diagnosis.run.facts import RunFacts
    from shardwise.launcher.local.attempts import LocalLaunch
    from shardwise.launcher.local.starters import Starter
    from shardwise.launcher.local.supervise import Observer
    from shardwise.runs import RunDirectory

_SCRIPT_STEP = 4
_SLOW_S = 10.0
"""Total sleep of a slow rank: longer than the 5 s window of the straggler check, since the first steps are uneven."""
_SCRIPT_SLEEP_S = 0.2
_MISMATCH_SLEEP_S = 3.0
"""Sleep after a mismatch, so that the guard, which checks once per second, runs before a short job ends."""
_MISMATCH_HANG_FACTOR = 20
_TIME_LIMIT_S = 60.0
"""Time limit of a drill, in addition to ten times the duration of the run without a fault."""
_EXIT_TIMEOUT_S = 2.0
"""Maximum wait for the child processes of a killed rank to exit."""


@spec_function(DrillSpec)
def doctor_drill(spec: DrillSpec) -> DrillReport:
    """Inject faults into the ranks, links, checkpoints and disk of your job; check detection and recovery.

    The temporary directory of the runs is kept if a drill failed.
    """
    kinds, target = spec.kinds(), make_target(spec)
    folder = spec.run_dir
    if folder is not None and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(
            f"--run-dir {folder} is not empty", code="run.directory-not-empty", fix="pass an empty directory"
        )
    drills: list[DrillResult] = []
    runs = folder or Path(tempfile.mkdtemp(prefix="shardwise-drill-"))
    try:
        drills += run_drills(target, kinds, runs, hang_after_s=spec.hang_after)
    finally:
        passed = all(result.passed for result in drills)
        if folder is None and passed:
            shutil.rmtree(runs, ignore_errors=True)
    return DrillReport(drills=tuple(drills), passed=passed, exit_code=DONE if passed else CHECK_FAILED)


def run_drills(
    subject: DrillTarget,
    kinds: Sequence[Kind],
    folder: Path,
    *,
    hang_after_s: float,
) -> list[DrillResult]:
    """Run a job or script without a fault, then once with each fault, and return the results in order.

    The run directories are below `folder`. `hang_after_s` is the time after which a rank that blocks other ranks is
    reported; 0 disables hang detection. Raises RankFailedError if `subject` fails without a fault.
    """
    run = create_run(folder / "undisturbed", subject.name)
    spec = subject.launch(run)
    results = []
    with starter_for(spec, node_environment(spec), lambda _: None) as starter:  # one fork parent for all runs
        runner = _DrillRunner(subject, folder, hang_after_s, starter, spec.nproc)
        runner.run_undisturbed(spec, run)
        for kind in kinds:
            results.append(runner.drill(kind))
            echo_error(f"{kind}: {results[-1].status}")
    return results


class _DrillRunner:
    """Runs the reference run without a fault, then the drills, one at a time."""

    def __init__(self, subject: DrillTarget, folder: Path, hang_after_s: float, starter: Starter, nproc: int) -> None:
        self._subject, self._folder, self._hang_after_s = subject, folder, hang_after_s
        self._starter, self._nproc = starter, nproc
        self._losses: dict[int, float] | None = None
        self._seconds = 0.0
        """Duration of the run without a fault, in seconds."""

    def run_undisturbed(self, spec: LocalLaunch, run: RunDirectory) -> None:
        """Run the job without a fault and record its losses as the reference for the drills."""
        began = time.monotonic()
        launched = self._launch(spec, run, [])
        self._seconds = time.monotonic() - began
        if launched.decision != Finish():
            raise RankFailedError(
                f"{explain_outcome(launched.outcome, run)}\nThe job must succeed without a fault, but it failed",
                code="doctor.job-fails",
            )
        if self._subject.steps:
            self._losses = {step: loss for _, step, loss in read_losses(read_run(run.path).events)}

    def drill(self, kind: Kind) -> DrillResult:
        """Run the job with a fault and return whether the fault was reported and the run recovered."""
        run = create_run(self._folder / kind, self._subject.name)
        fault = self._fault(kind, run)
        launched = self._launch_guarded(fault, run)
        facts = read_run(run.path)
        failure = ""
        if launched.decision != Finish():
            failure = verdict(launched.outcome) or "the run was stopped"
        evidence = _collect_evidence(fault, run, facts, failure)
        return judge(kind, evidence, self._losses, run=str(run.path))

    def _fault(self, kind: Kind, run: RunDirectory) -> Fault:
        steps, every = self._subject.steps, self._subject.save_interval
        step, sleep_s, checkpoints = _SCRIPT_STEP, _SCRIPT_SLEEP_S, ""
        if steps:
            if kind != "slow":
                step = 2 * every + max(1, every // 2)
            # The rank sleeps until the job ends, at least as long as it computes. The length of a script is unknown.
            sleep_s = max(_SLOW_S / (steps - step), self._seconds / steps)
            checkpoints = str(run.checkpoints.absolute())
        return Fault(
            kind=kind,
            rank=self._nproc - 1,
            step=step,
            mark=str((run.path / "fault.json").absolute()),
            checkpoints=checkpoints,
            saved=2 * every,
            seconds=sleep_s if kind == "slow" else _MISMATCH_SLEEP_S,
            most_s=_SLOW_S,
        )

    def _launch_guarded(self, fault: Fault, run: RunDirectory) -> Launched:
        spec = self._subject.launch(run)
        assert not isinstance(spec.target, Program)  # noqa: S101 - make_target never returns a program
        spec = dataclasses.replace(spec, target=drill_target(fault, spec.target), max_restarts=1, grace_s=10.0)
        observers: list[Observer] = []
        messages: list[str] = []
        if self._hang_after_s:
            # After a hang the rank is resumed and training continues. After a mismatch the results are wrong, so the
            # ranks are stopped; its longer time limit avoids a false hang during a slow start.
            limits = HangSpec(after_s=self._hang_after_s, on_hang="report")
            if fault.kind == "mismatch":
                limits = HangSpec(after_s=self._hang_after_s * _MISMATCH_HANG_FACTOR, on_hang="stop")
            guard = Guard(run, limits, messages.append)
            guard.follow(range(self._nproc))
            observers.append(guard)
        if fault.kind == "freeze":
            observers.append(_ResumeFrozen(Path(fault.mark), messages, timeout_s=3.0 + 6 * self._hang_after_s))
        return self._launch(spec, run, [*observers, _TimeLimit(_TIME_LIMIT_S + 10 * self._seconds)])

    def _launch(self, spec: LocalLaunch, run: RunDirectory, observers: list[Observer]) -> Launched:
        spec = dataclasses.replace(spec, record=bool(self._hang_after_s))
        launched = launch(spec, run, observers=observers, starter=self._starter)
        if launched.outcome.interrupted:
            raise KeyboardInterrupt
        return launched


class _ResumeFrozen:
    """An observer that sends SIGCONT to a frozen rank after it was reported, or after a timeout."""

    def __init__(self, mark: Path, messages: list[str], *, timeout_s: float) -> None:
        self._mark, self._messages, self._timeout_s = mark, messages, timeout_s
        self._is_done = False

    def tick(self) -> None:
        """Resume the rank if it was reported or the timeout has passed."""
        mark = None if self._is_done else read_mark(self._mark)
        if mark is None:
            return
        is_reported = any(find_sign("freeze", mark, text) for text in self._messages)
        if is_reported or time.time() > mark.at + self._timeout_s:
            with contextlib.suppress(ProcessLookupError):
                os.kill(mark.pid, signal.SIGCONT)
            self._is_done = True


class _TimeLimit:
    """An observer that stops a run that does not end after the fault."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s, self._deadline = limit_s, time.monotonic() + limit_s

    def tick(self) -> str:
        """Return a reason to stop the run if the time limit has passed, otherwise an empty string."""
        return f"the run exceeded {self._limit_s:.0f} s" if time.monotonic() > self._deadline else ""


def _collect_evidence(fault: Fault, run: RunDirectory, facts: RunFacts, failure: str) -> DrillEvidence:
    """Read the events, checkpoints and remaining processes of a finished run."""
    pids: set[int] = set()
    for event in facts.events:
        if event.kind == "attempt":
            pids.update(map(int, event.fields["ranks"].values()))
    return DrillEvidence(
        mark=read_mark(Path(fault.mark)),
        events=facts.events,
        failure=failure,
        left=_remaining_processes(pids),
        sound=_valid_steps(run) if fault.checkpoints else (),
        damages=facts.damages,
    )


def _valid_steps(run: RunDirectory) -> list[int]:
    """Return the steps of the checkpoints whose checksums are all correct."""
    entries = checkpoint.CheckpointDirectory(run.checkpoints).entries()
    return [entry.step for entry in entries if not checkpoint.find_damage(entry.path, deep=True)]


def _remaining_processes(ranks: set[int]) -> list[int]:
    """Return the processes still running in the process groups that the ranks lead."""
    deadline = time.monotonic() + _EXIT_TIMEOUT_S
    while (remaining := _members(ranks)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return remaining


def _members(groups: set[int]) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit():
                state, _, group, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(group) in groups and state != "Z":
                    found.append(int(entry.name))
    return found
