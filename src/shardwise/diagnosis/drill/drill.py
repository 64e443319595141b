"""Drills: the user's own job is run undisturbed, then once for each fault, and what came of it is judged."""

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

from shardwise.diagnosis.drill.faults import Fault, read_mark
from shardwise.diagnosis.drill.judge import DrillEvidence, DrillReport, find_sign, judge, read_losses
from shardwise.diagnosis.drill.rank import drill_target
from shardwise.diagnosis.drill.target import DrillSpec, make_target
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
"""Slow ranks are judged over 5 s; twice that, since the first steps are never even."""
_NAP_S = 0.2
_HOLD_S = 3.0
"""After a mismatch: for some looks of the guard, one a second, before a short job is over."""
_CALM = 20
_LIMIT_S = 60.0
"""A drill may take so long, and ten times as long as the undisturbed run."""
_LEFT_S = 2.0
"""For what a killed rank had started to end."""


@spec_function(DrillSpec)
def doctor_drill(spec: DrillSpec) -> DrillReport:
    """Inject faults into ranks, links, checkpoints and disk of your own job; check that it is named and recovers.

    A temporary folder of runs stays if a drill failed.
    """
    kinds, target = spec.kinds(), make_target(spec)
    folder = spec.run_dir
    if folder is not None and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"--run-dir {folder} is not empty", code="run.directory-not-empty", fix="name another folder")
    drills: list[DrillResult] = []
    runs = folder or Path(tempfile.mkdtemp(prefix="shardwise-drill-"))
    try:
        drills += run_drills(target, kinds, runs, hang_after_s=spec.hang_after)
    finally:
        if folder is None and all(result.passed for result in drills):
            shutil.rmtree(runs, ignore_errors=True)
    passed = all(result.passed for result in drills)
    return DrillReport(drills=tuple(drills), passed=passed, exit_code=DONE if passed else CHECK_FAILED)


def run_drills(
    subject: DrillTarget,
    kinds: Sequence[Kind],
    folder: Path,
    *,
    hang_after_s: float,
) -> list[DrillResult]:
    """Run the subject undisturbed and with each fault, in run directories below `folder`; results in the same order.

    `hang_after_s` is when a rank that others wait for is reported; with 0 no hang is. A subject that fails by itself
    raises.
    """
    run = create_run(folder / "undisturbed", subject.name)
    spec = subject.launch(run)
    results = []
    with starter_for(spec, node_environment(spec), lambda _: None) as starter:  # one fork parent for all runs
        ground = _Ground(subject, folder, hang_after_s, starter, spec.nproc)
        ground.run_undisturbed(spec, run)
        for kind in kinds:
            results.append(ground.drill(kind))
            echo_error(f"{kind}: {results[-1].status}")
    return results


class _Ground:
    """Where drills take place, one after another."""

    def __init__(self, subject: DrillTarget, folder: Path, hang_after_s: float, starter: Starter, nproc: int) -> None:
        self._subject, self._folder, self._hang_after_s = subject, folder, hang_after_s
        self._starter, self._nproc = starter, nproc
        self._losses: dict[int, float] | None = None
        self._seconds = 0.0
        """What the undisturbed run took."""

    def run_undisturbed(self, spec: LocalLaunch, run: RunDirectory) -> None:
        """Run without a fault; its losses are what others are compared with."""
        began = time.monotonic()
        launched = self._launch(spec, run, [])
        self._seconds = time.monotonic() - began
        if launched.decision != Finish():
            raise RankFailedError(
                f"{explain_outcome(launched.outcome, run)}\nthe job fails by itself: nothing to drill",
                code="doctor.job-fails",
            )
        if self._subject.steps:
            self._losses = {step: loss for _, step, loss in read_losses(read_run(run.path).events)}

    def drill(self, kind: Kind) -> DrillResult:
        """Run with a fault, and judge what came of it."""
        run = create_run(self._folder / kind, self._subject.name)
        fault = self._fault(kind, run)
        launched = self._launch_guarded(fault, run)
        facts = read_run(run.path)
        failure = "" if launched.decision == Finish() else verdict(launched.outcome) or "it was stopped"
        evidence = _evidence(fault, run, facts, failure)
        return judge(kind, evidence, self._losses, run=str(run.path))

    def _fault(self, kind: Kind, run: RunDirectory) -> Fault:
        subject, every = self._subject, self._subject.save_interval
        is_slow = kind == "slow"
        step = 2 * every + max(1, every // 2) if subject.steps and not is_slow else _SCRIPT_STEP
        # A job sleeps until its end, and as long as it works; of a script the length is not known.
        sleep_s = max(_SLOW_S / (subject.steps - step), self._seconds / subject.steps) if subject.steps else _NAP_S
        return Fault(
            kind=kind,
            rank=self._nproc - 1,
            step=step,
            mark=str((run.path / "fault.json").absolute()),
            checkpoints=str(run.checkpoints.absolute()) if subject.steps else "",
            saved=2 * every,
            seconds=sleep_s if is_slow else _HOLD_S,
            most_s=_SLOW_S,
        )

    def _launch_guarded(self, fault: Fault, run: RunDirectory) -> Launched:
        spec = self._subject.launch(run)
        assert not isinstance(spec.target, Program)  # noqa: S101 - programs are refused before
        spec = dataclasses.replace(spec, target=drill_target(fault, spec.target), max_restarts=1, grace_s=10.0)
        observers: list[Observer] = []
        heard: list[str] = []
        if self._hang_after_s:
            # A frozen rank is continued, and all continue; wrong numbers stop the ranks, a slow start does not.
            stop = fault.kind == "mismatch"
            after_s = self._hang_after_s * (_CALM if stop else 1)
            limits = HangSpec(after_s=after_s, on_hang="stop" if stop else "report")
            guard = Guard(run, limits, heard.append)
            guard.follow(range(self._nproc))
            observers.append(guard)
        if fault.kind == "freeze":
            observers.append(_Thaw(Path(fault.mark), heard, patience_s=3.0 + 6 * self._hang_after_s))
        return self._launch(spec, run, [*observers, _TimeLimit(_LIMIT_S + 10 * self._seconds)])

    def _launch(self, spec: LocalLaunch, run: RunDirectory, observers: list[Observer]) -> Launched:
        spec = dataclasses.replace(spec, record=bool(self._hang_after_s))
        launched = launch(spec, run, observers=observers, starter=self._starter)
        if launched.outcome.interrupted:
            raise KeyboardInterrupt
        return launched


class _Thaw:
    """An observer that continues a frozen rank once it was named, or was not named in time."""

    def __init__(self, mark: Path, heard: list[str], *, patience_s: float) -> None:
        self._mark, self._heard, self._patience_s = mark, heard, patience_s
        self._is_done = False

    def tick(self) -> None:
        """Continue it when it is time."""
        mark = None if self._is_done else read_mark(self._mark)
        if mark is None:
            return
        if any(find_sign("freeze", mark, text) for text in self._heard) or time.time() > mark.at + self._patience_s:
            with contextlib.suppress(ProcessLookupError):
                os.kill(mark.pid, signal.SIGCONT)
            self._is_done = True


class _TimeLimit:
    """An observer that stops a run that does not end after the fault."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s, self._deadline = limit_s, time.monotonic() + limit_s

    def tick(self) -> str:
        """Return that it took too long, if it did."""
        return f"it was still running after {self._limit_s:.0f} s" if time.monotonic() > self._deadline else ""


def _evidence(fault: Fault, run: RunDirectory, facts: RunFacts, failure: str) -> DrillEvidence:
    """Read what a run left behind."""
    started = [event.fields["ranks"] for event in facts.events if event.kind == "attempt"]
    pids = {int(pid) for ranks in started for pid in ranks.values()}
    return DrillEvidence(
        mark=read_mark(Path(fault.mark)),
        events=facts.events,
        failure=failure,
        left=_left_running(pids),
        sound=_sound_steps(run) if fault.checkpoints else (),
        damages=facts.damages,
    )


def _sound_steps(run: RunDirectory) -> list[int]:
    """Return the steps of the checkpoints of which every byte is as it was saved."""
    from shardwise.checkpoint import CheckpointFolder
    from shardwise.checkpoint.shard import find_damage

    return [
        entry.step for entry in CheckpointFolder(run.checkpoints).entries() if not find_damage(entry.path, deep=True)
    ]


def _left_running(ranks: set[int]) -> list[int]:
    """Return the processes that live on in the process groups of ranks, which each rank leads with its own pid."""
    deadline = time.monotonic() + _LEFT_S
    while (left := _members(ranks)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def _members(groups: set[int]) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit():
                state, _, group, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(group) in groups and state != "Z":
                    found.append(int(entry.name))
    return found
