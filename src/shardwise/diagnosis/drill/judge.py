"""The result of a drill: the reported verdict, the time to detection, and whether the run recovered; pure functions."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from shardwise.diagnosis.verdicts import table_lines
from shardwise.runs.failure import PEER_LOST
from shardwise.spec import Report

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from shardwise.diagnosis.drill.faults import FaultMark, Kind
    from shardwise.diagnosis.run.facts import Event

LOSS_LIMIT = 1e-5
"""Relative tolerance between the losses with and without the fault, since floating-point sums may be reordered."""
_SIGNS: Mapping[Kind, str] = {
    "kill": r"(?P<who>rank {rank}) failed first: SIGKILL",
    "freeze": r"waits? in .*; (?P<who>rank {rank}) is stopped by a signal",
    "slow": r"(?P<who>rank {rank}) is slow",
    "mismatch": r"ranks differ in the dtype .*(?P<who>rank {rank}): all_reduce #\d+ .* at \S+:\d+",
    "link": r"(?P<who>rank \d+) failed first: (?=.*(?:{lost}))",
    "checkpoint": r"skipped checkpoint: .*(?P<who>{file})",
    "disk": r"(?P<who>rank \d+)\b.*No space left on device",
}
"""Pattern of the message that must be reported for each fault. For a link, either end may be named."""
_SENTENCES: Mapping[Kind, str] = {
    "kill": "rank {rank} was killed after step {step}",
    "freeze": "rank {rank} was frozen after step {step}",
    "slow": "rank {rank} slept from step {step} onward",
    "mismatch": "rank {rank} used a different dtype after step {step}",
    "link": "rank {rank} lost its connections after step {step}",
    "checkpoint": "{file} was damaged and rank {rank} was killed after step {step}",
    "disk": "the disk was full during the save after step {step}",
}
_RESTARTS: tuple[Kind, ...] = ("kill", "link", "checkpoint")
_CONTINUES: tuple[Kind, ...] = ("freeze", "slow", "disk")


@dataclass(frozen=True, kw_only=True)
class DrillEvidence:
    """The events of a run with an injected fault, and its processes and checkpoints after the run."""

    mark: FaultMark | None
    """The record of the fault; None if the fault was never injected."""
    events: Sequence[Event]
    """Events of the launcher, the guard and the ranks, sorted by time."""
    failure: str = ""
    """Why the run did not complete; empty if it did."""
    left: Sequence[int] = ()
    """Processes that were still running after the run."""
    sound: Sequence[int] = ()
    """Steps of the undamaged checkpoints after the run."""
    damages: Sequence[str] = ()
    """Damage of checkpoints that are newer than the newest undamaged one, after the run."""


class DrillResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one drill: the fault, its detection, the recovery and all problems."""

    drill: str
    fault: str
    who: str = ""
    """The rank or file that was reported; empty if the fault was not reported."""
    said: str = ""
    detected_s: float | None = None
    """Seconds from the fault until it was reported."""
    recovery: str = ""
    recovered_s: float | None = None
    """Seconds from the fault until the next step completed; for a script, until it ended."""
    problems: tuple[str, ...] = ()
    run: str = ""
    """The run directory."""

    @property
    def passed(self) -> bool:
        """Whether the fault was detected and the run recovered."""
        return not self.problems

    @property
    def status(self) -> str:
        """`passed` or `failed`."""
        return "passed" if self.passed else "failed"


class DrillReport(Report, frozen=True, kw_only=True):
    """The report of `shardwise doctor drill`."""

    drills: tuple[DrillResult, ...]
    passed: bool

    def to_text(self) -> str:
        """Return a table of the drills, followed by the problems."""
        rows = [("drill", "fault", "named", "after", "recovery", "after", "")]
        problems = []
        for result in self.drills:
            named, back = result.who or "nothing", result.recovery or "no"
            times = _in_seconds(result.detected_s), _in_seconds(result.recovered_s)
            rows.append((result.drill, result.fault, named, times[0], back, times[1], result.status))
            problems += [f"{result.drill}: {problem}" for problem in result.problems]
            if result.problems:
                problems.append(f"{result.drill}: shardwise doctor run {result.run}")
        passed = sum(result.passed for result in self.drills)
        return "\n".join([*table_lines(rows), "", *problems, f"{passed} of {len(self.drills)} drills passed"])


def _in_seconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.1f} s"


@dataclass(frozen=True)
class _EventsAfterFault:
    """The events of a run since the fault was injected."""

    events: Sequence[Event]
    mark: FaultMark

    def after(self, *kinds: str) -> Iterator[Event]:
        """Return the events of the given kinds since the fault."""
        return (event for event in self.events if event.kind in kinds and event.at >= self.mark.at)

    def messages(self) -> Iterator[tuple[float, str]]:
        """Yield the seconds since the fault and the text of each message."""
        for event in self.after("verdict", "note", "restart"):
            yield event.at - self.mark.at, str(event.fields.get("text") or event.fields.get("cause") or "")


@dataclass(frozen=True)
class _Recovery:
    text: str = ""
    seconds: float | None = None
    problems: list[str] = field(default_factory=list)


def judge(kind: Kind, evidence: DrillEvidence, reference: Mapping[int, float] | None, *, run: str = "") -> DrillResult:
    """Return the result of a drill: whether the fault was reported and the run recovered.

    `reference` contains the losses of the run without a fault; None for a script, whose losses are unknown.
    """
    mark = evidence.mark
    if mark is None:
        problems = ["the fault was never injected: the run had too few optimizer steps, or ended too early"]
        if evidence.failure:
            problems.append(evidence.failure)
        return DrillResult(drill=kind, fault="none", problems=tuple(problems), run=run)
    after = _EventsAfterFault(evidence.events, mark)
    fault = _SENTENCES[kind].format(rank=mark.rank, step=mark.step, file=mark.file)
    detected_s, message, who = _find_report(kind, after)
    recovery = _recovery(kind, after, evidence, reference)
    problems = recovery.problems
    if not who:
        problems = [f"the fault was not reported: {fault}", *problems]
    return DrillResult(
        drill=kind,
        fault=fault,
        who=who,
        said=message,
        detected_s=detected_s,
        recovery=recovery.text,
        recovered_s=recovery.seconds,
        problems=tuple(problems),
        run=run,
    )


def _find_report(kind: Kind, after: _EventsAfterFault) -> tuple[float | None, str, str]:
    """Return the seconds until the fault was reported, the message, and the rank or file that it names."""
    for seconds, text in after.messages():
        who = find_sign(kind, after.mark, text)
        if who:
            return seconds, text, who
    return None, "", ""


def find_sign(kind: Kind, mark: FaultMark, text: str) -> str:
    """Return the rank or file that `text` reports for this fault; empty if `text` does not report it."""
    sign = _SIGNS[kind].format(rank=mark.rank, file=re.escape(mark.file), lost=PEER_LOST.pattern)
    found = re.search(sign, text, re.DOTALL)
    return found["who"] if found else ""


def read_losses(events: Sequence[Event]) -> list[tuple[float, int, float]]:
    """Return the publication time, step and value of each loss, in order; repeated steps are included."""
    losses = []
    for event in events:
        if event.kind != "steps" or event.rank != 0:
            continue
        for number, loss in enumerate(event.fields["losses"], event.fields["first"]):
            losses.append((event.at, number, math.nan if loss is None else float(loss)))
    return losses


def _recovery(
    kind: Kind, after: _EventsAfterFault, evidence: DrillEvidence, reference: Mapping[int, float] | None
) -> _Recovery:
    """Return the kind of recovery (continued or restarted), its duration, and all problems."""
    problems = _leftovers(evidence)
    if evidence.failure:
        return _Recovery(problems=[f"the run did not complete: {evidence.failure}", *problems])
    resumed, is_job = _resumed_step(after), reference is not None
    was_restarted = any(after.after("attempt"))
    if was_restarted and kind in _CONTINUES:
        problems.append("the ranks were restarted, but should have continued")
    if not was_restarted and kind in _RESTARTS:
        problems.append("the ranks were not restarted")
    if reference is not None:
        if was_restarted:
            problems += _wrong_resume(after.mark, resumed)
        problems += _loss_differences(evidence, reference)
        if kind == "disk" and after.mark.saved not in evidence.sound:
            problems.append(f"the checkpoint of step {after.mark.saved}, saved before the fault, is missing")
        if max(evidence.sound, default=0) <= after.mark.step:
            problems.append(f"no undamaged checkpoint was saved after step {after.mark.step}")
    text = "continued"
    if was_restarted:
        text = _restart_text(resumed) if is_job else "restarted"
    return _Recovery(text=text, seconds=_recovery_seconds(after, is_job=is_job), problems=problems)


def _resumed_step(after: _EventsAfterFault) -> int | None:
    """Return the step of the checkpoint that the run resumed from after the fault; None if it did not resume."""
    for _, text in after.messages():
        match = re.search(r"resumed from .* at step (\d+)", text)
        if match:
            return int(match[1])
    return None


def _restart_text(resumed: int | None) -> str:
    return "restarted from the beginning" if resumed is None else f"restarted, resumed at step {resumed}"


def _recovery_seconds(after: _EventsAfterFault, *, is_job: bool) -> float | None:
    """Return the seconds until the most recently started ranks published a later step; for a script, until it ended."""
    if not is_job:
        return next((event.at - after.mark.at for event in after.after("finish")), None)
    restarted_at = max((event.at for event in after.after("attempt")), default=after.mark.at)
    for at, number, _ in read_losses(after.events):
        if at >= restarted_at and number >= after.mark.step:
            return at - after.mark.at
    return None


def _wrong_resume(mark: FaultMark, resumed: int | None) -> list[str]:
    """Return a problem if the run did not resume from the newest undamaged checkpoint."""
    if resumed is None:
        if not mark.saved:
            return ["no checkpoint was saved before the fault"]
        return [f"the run restarted from the beginning, although step {mark.saved} was saved"]
    if mark.file and resumed >= mark.saved:
        return [f"the run loaded the damaged checkpoint of step {mark.saved}"]
    if not mark.file and resumed < mark.saved:
        return [f"the run resumed from step {resumed}, although step {mark.saved} was saved"]
    return []


def _loss_differences(evidence: DrillEvidence, reference: Mapping[int, float]) -> list[str]:
    """Return the first loss that differs from `reference`, or the first missing step."""
    missing = set(reference)
    for _, step, loss in read_losses(evidence.events):
        missing.discard(step)
        expected = reference.get(step, math.inf)
        if not (math.isclose(loss, expected, rel_tol=LOSS_LIMIT) or (math.isnan(loss) and math.isnan(expected))):
            return [f"the loss of step {step} is {loss:.6g}, expected {expected:.6g}"]
    return [f"step {min(missing)} is missing"] if missing else []


def _leftovers(evidence: DrillEvidence) -> list[str]:
    problems = []
    if evidence.left:
        problems.append(f"processes are still running: {', '.join(map(str, evidence.left))}")
    if evidence.damages:
        problems.append(f"the newest checkpoint is damaged: {evidence.damages[0]}")
    return problems
