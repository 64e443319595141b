"""The result of a drill: who was named, after how long, and whether the run recovered; pure decisions."""

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
"""How far a loss may be from that of the undisturbed run, relative: a few steps, sums in any order."""
_SIGNS: Mapping[Kind, str] = {
    "kill": r"(?P<who>rank {rank}) failed first: SIGKILL",
    "freeze": r"waits? in .*; (?P<who>rank {rank}) is stopped by a signal",
    "slow": r"(?P<who>rank {rank}) is slow",
    "mismatch": r"ranks differ in the dtype .*(?P<who>rank {rank}): all_reduce #\d+ .* at \S+:\d+",
    "link": r"(?P<who>rank \d+) failed first: (?=.*(?:{lost}))",
    "checkpoint": r"passed over: .*(?P<who>{file})",
    "disk": r"not saved: .* failed on (?P<who>rank \d+) .*No space left on device",
}
"""What must be reported of each fault. Of a link either end may be named: none of them is to blame."""
_SENTENCES: Mapping[Kind, str] = {
    "kill": "rank {rank} was killed after step {step}",
    "freeze": "rank {rank} was frozen after step {step}",
    "slow": "rank {rank} slept from step {step} on",
    "mismatch": "rank {rank} had another dtype after step {step}",
    "link": "rank {rank} lost its connections after step {step}",
    "checkpoint": "{file} was damaged, and rank {rank} killed, after step {step}",
    "disk": "the disk was full in the save after step {step}",
}
_RESTARTS: tuple[Kind, ...] = ("kill", "link", "checkpoint")
_CONTINUES: tuple[Kind, ...] = ("freeze", "slow", "disk")


@dataclass(frozen=True, kw_only=True)
class DrillEvidence:
    """What a drilled run left behind."""

    mark: FaultMark | None
    """None if the fault never came."""
    events: Sequence[Event]
    """Of launcher, guard and ranks, by time."""
    failure: str = ""
    """Why it did not come to its end; empty if it did."""
    left: Sequence[int] = ()
    """Processes that outlived it."""
    sound: Sequence[int] = ()
    """Steps of whole checkpoints after the end."""
    damages: Sequence[str] = ()
    """What is wrong with checkpoints newer than the newest whole one, after the end."""


class DrillResult(msgspec.Struct, frozen=True, kw_only=True):
    """One drill: the fault, what was reported of it, how the run recovered, and what went wrong."""

    drill: str
    fault: str
    who: str = ""
    """Who or what was named; empty if nothing was."""
    said: str = ""
    detected_s: float | None = None
    """From the fault until it was named."""
    recovery: str = ""
    recovered_s: float | None = None
    """From the fault until the step after it was done; of a script, until its end."""
    problems: tuple[str, ...] = ()
    run: str = ""
    """Its run directory."""

    @property
    def passed(self) -> bool:
        """Whether detection and recovery work."""
        return not self.problems

    @property
    def status(self) -> str:
        """The verdict in a word."""
        return "passed" if self.passed else "failed"


class DrillReport(Report, frozen=True, kw_only=True):
    """What `shardwise doctor drill` answers."""

    drills: tuple[DrillResult, ...]
    passed: bool

    def to_text(self) -> str:
        """Return a table of the drills, and below it what went wrong."""
        rows = [("drill", "fault", "named", "after", "recovery", "after", "")]
        problems = []
        for result in self.drills:
            named, back = result.who or "nobody", result.recovery or "no"
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
class _Story:
    """The events of a drilled run, from the fault on."""

    events: Sequence[Event]
    mark: FaultMark

    def after(self, *kinds: str) -> Iterator[Event]:
        return (event for event in self.events if event.kind in kinds and event.at >= self.mark.at)

    def messages(self) -> Iterator[tuple[float, str]]:
        """Yield each message, and how long after the fault."""
        for event in self.after("verdict", "note", "restart"):
            yield event.at - self.mark.at, str(event.fields.get("text") or event.fields.get("cause") or "")


@dataclass(frozen=True)
class _Recovery:
    text: str = ""
    seconds: float | None = None
    problems: list[str] = field(default_factory=list)


def judge(kind: Kind, evidence: DrillEvidence, reference: Mapping[int, float] | None, *, run: str = "") -> DrillResult:
    """Return whether a fault was named and the run recovered; `reference` are the losses of the undisturbed run.

    None for a script, whose losses are not known.
    """
    mark = evidence.mark
    if mark is None:
        never = "the fault never came: the run had too few optimizer steps, or ended before"
        problems = (never, *((evidence.failure,) if evidence.failure else ()))
        return DrillResult(drill=kind, fault="none", problems=problems, run=run)
    story = _Story(evidence.events, mark)
    facts = {"rank": mark.rank, "step": mark.step, "file": mark.file}
    signs = ((at, text, find_sign(kind, mark, text)) for at, text in story.messages())
    detected_s, message, who = next((each for each in signs if each[2]), (None, "", ""))
    recovery = _recovery(kind, story, evidence, reference)
    unseen = [] if who else [f"it was not reported that {_SENTENCES[kind].format(**facts)}"]
    return DrillResult(
        drill=kind,
        fault=_SENTENCES[kind].format(**facts),
        who=who,
        said=message,
        detected_s=detected_s,
        recovery=recovery.text,
        recovered_s=recovery.seconds,
        problems=(*unseen, *recovery.problems),
        run=run,
    )


def find_sign(kind: Kind, mark: FaultMark, text: str) -> str:
    """Return whom or what a sentence names as it should name this fault; empty if it is about something else."""
    sign = _SIGNS[kind].format(rank=mark.rank, file=re.escape(mark.file), lost=PEER_LOST.pattern)
    found = re.search(sign, text, re.DOTALL)
    return found["who"] if found else ""


def read_losses(events: Sequence[Event]) -> list[tuple[float, int, float]]:
    """Return when each loss was published, its step and its value, in order; steps done again are there again."""
    published = [event for event in events if event.kind == "steps" and event.rank == 0]
    return [
        (event.at, number, math.nan if loss is None else float(loss))
        for event in published
        for number, loss in enumerate(event.fields["losses"], event.fields["first"])
    ]


def _recovery(kind: Kind, story: _Story, evidence: DrillEvidence, reference: Mapping[int, float] | None) -> _Recovery:
    """Return how the run recovered, and what went wrong."""
    if evidence.failure:
        return _Recovery(problems=[f"it did not come to its end: {evidence.failure}", *_leftovers(evidence)])
    resumed, is_job = _resumed(story), reference is not None
    text, seconds = _way_back(story, resumed, is_job=is_job), _back_after(story, is_job=is_job)
    problems = _leftovers(evidence)
    was_started = any(story.after("attempt"))
    if was_started and kind in _CONTINUES:
        problems.append("it was restarted, and should have continued")
    if not was_started and kind in _RESTARTS:
        problems.append("it was not restarted")
    if reference is not None:
        if was_started:
            problems += _wrong_resume(story.mark, resumed)
        problems += _other_losses(evidence, reference)
        if kind == "disk" and story.mark.saved not in evidence.sound:
            problems.append(f"the checkpoint of step {story.mark.saved}, saved before, is gone")
        if not any(step > story.mark.step for step in evidence.sound):
            problems.append(f"no whole checkpoint was saved after step {story.mark.step}")
    return _Recovery(text=text, seconds=seconds, problems=problems)


def _resumed(story: _Story) -> int | None:
    """Return the step of the checkpoint that the run resumed from after the fault, None if from none."""
    found = (re.search(r"resumed from .* at step (\d+)", text) for _, text in story.messages())
    return next((int(match[1]) for match in found if match), None)


def _way_back(story: _Story, resumed: int | None, *, is_job: bool) -> str:
    if not any(story.after("attempt")):
        return "continued"
    if not is_job:
        return "restarted"
    return f"restarted, resumed at step {resumed}" if resumed is not None else "restarted from the beginning"


def _back_after(story: _Story, *, is_job: bool) -> float | None:
    """Return seconds until a later step was published, by the ranks that were started last; of a script to the end."""
    if not is_job:
        return next((event.at - story.mark.at for event in story.after("finish")), None)
    since = max((event.at for event in story.after("attempt")), default=story.mark.at)
    times = (at for at, number, _ in read_losses(story.events) if at >= since and number >= story.mark.step)
    return next((at - story.mark.at for at in times), None)


def _wrong_resume(mark: FaultMark, resumed: int | None) -> list[str]:
    """Return a problem when the run resumed from another checkpoint than the newest whole one."""
    if resumed is None:
        return [f"it began anew, though step {mark.saved} was saved"] if mark.saved else ["nothing was saved before"]
    if mark.file and resumed >= mark.saved:
        return [f"it took the damaged checkpoint of step {mark.saved}"]
    if not mark.file and resumed < mark.saved:
        return [f"it resumed from step {resumed}, though step {mark.saved} was saved"]
    return []


def _other_losses(evidence: DrillEvidence, reference: Mapping[int, float]) -> list[str]:
    """Return where losses first differ from the undisturbed run, and whether steps are missing."""
    found = read_losses(evidence.events)
    for _, step, loss in found:
        wanted = reference.get(step, math.inf)
        if not (math.isclose(loss, wanted, rel_tol=LOSS_LIMIT) or (math.isnan(loss) and math.isnan(wanted))):
            return [f"the loss of step {step} is {loss:.6g}, undisturbed {wanted:.6g}"]
    missing = sorted(set(reference) - {step for _, step, _ in found})
    return [f"step {missing[0]} is missing"] if missing else []


def _leftovers(evidence: DrillEvidence) -> list[str]:
    left = [f"processes were left running: {', '.join(map(str, evidence.left))}"] if evidence.left else []
    return left + [f"a torn checkpoint is the newest: {damage}" for damage in evidence.damages[:1]]
