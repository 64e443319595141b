"""A run explained from its directory: what happened in order, why it ended or where it is stuck, what to type; pure."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from shardwise.diagnosis.guard.guard import GOES_ON
from shardwise.diagnosis.guard.hang import decide
from shardwise.diagnosis.run.cause import check_cause, kind_of_end, state_of
from shardwise.diagnosis.run.facts import read_run
from shardwise.diagnosis.run.nccl_log import check_transports, effects
from shardwise.diagnosis.verdicts import Verdict, VerdictReport, fail, ok, verdict_lines, warn
from shardwise.runs.console import name_ranks
from shardwise.runs.recorder import PHASES
from shardwise.spec import Spec, argument, spec_function

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from shardwise.diagnosis.run.facts import Event, RunFacts
    from shardwise.runs.recorder import Mark

_MOST_EVENTS = 40
"""Events that the text shows; JSON has all of them."""
STUCK_S = 10.0
"""Seconds in a collective from which on ranks that do not come are missed."""


class RunSpec(Spec, frozen=True, kw_only=True):
    """What `shardwise doctor run` is asked."""

    path: Annotated[Path, argument("RUN")]
    """Directory of the run."""


class RunReport(VerdictReport, frozen=True, kw_only=True):
    """What `shardwise doctor run` answers."""

    state: str
    """"finished", "failed", "stopped", "lost", "silent", "running", or "stuck"."""
    kind: str
    """Of its end, as `cause.Kind` lists them; else empty."""
    story: tuple[str, ...]
    """What happened, in order."""
    commands: tuple[str, ...]
    """What to type next."""

    def to_text(self) -> str:
        """Return the state, the last events, the verdicts and the next commands."""
        lines = [f"state: {self.state}" + (f" ({self.kind})" if self.kind else "")]
        left_out = len(self.story) - _MOST_EVENTS
        if left_out > 0:
            lines.append(f"... {left_out} lines before: add --json")
        lines += [*self.story[-_MOST_EVENTS:], "", *verdict_lines(self.verdicts)]
        if self.commands:
            lines += ["", *self.commands]
        return "\n".join(lines)


@spec_function(RunSpec)
def doctor_run(spec: RunSpec) -> RunReport:
    """Explain what happened in the run directory RUN, why, what was lost, and what to type next."""
    return explain(read_run(spec.path))


def explain(facts: RunFacts) -> RunReport:
    """Explain what happened, why, what was lost, and what to do."""
    state: str = state_of(facts)
    going = check_going(facts) if state in ("running", "silent") else []
    if any(verdict.name == "hang" for verdict in going):
        state = "stuck"
    over = state in ("failed", "stopped", "lost")
    verdicts = [
        *check_cause(facts),
        *going,
        *(check_lost(facts) if over else []),
        *check_transports(facts.nccl, facts.hosts),
        *([] if facts.nccl.is_empty else effects(facts.variables, facts.nccl)),
    ]
    return RunReport(
        state=state,
        kind=kind_of_end(facts) if over else "",
        story=describe_events(facts.events),
        verdicts=tuple(verdicts),
        commands=next_commands(facts, state),
    )


def check_going(facts: RunFacts) -> list[Verdict]:
    """Return where the ranks of a live run are, which rank is missing in which collective, and which lags."""
    age_s = facts.now - facts.newest
    found = [ok("ranks", text) for text in [_phases(facts.marks, facts.now)] if text]
    stall = decide(facts.ranks, STUCK_S)
    message, behind = _standing_verdict(facts.events), _behind(facts.marks)
    if stall is not None:  # the verdict of a guard has the stacks too
        fix = f"read {facts.path}/stacks, if there; end it with Ctrl-C at its launcher"
        found.append(fail("hang", message or stall.text, fix))
    elif message:
        found.append(fail("verdict", message, "end it with Ctrl-C at its launcher, and correct that"))
    elif behind and age_s > STUCK_S:
        marks = facts.marks
        place = f"{marks[behind[0]].phase} of step {marks[behind[0]].step}"
        fact = f"{name_ranks(behind)} lags: still in {place}, and no rank has made progress for {age_s:.0f} s"
        found.append(warn("hang", fact, f"see what it does: py-spy dump on its host, {facts.path}/logs"))
    elif facts.newest:
        found.append(ok("going on", f"the last sign of life is {age_s:.0f} s old"))
    else:
        found.append(ok("going on", "no rank has written an event yet"))
    return found


def check_lost(facts: RunFacts) -> list[Verdict]:
    """Return what was lost since the last checkpoint."""
    bad = [
        warn("checkpoint", f"left out as damaged: {damage}", "see: shardwise checkpoint ls") for damage in facts.damages
    ]
    if facts.job is None:
        return [*bad, ok("lost", "a plain script: what it saved, and where, it knows itself")]
    done = max([_done(facts.events), *(mark.step for mark in facts.marks.values())])
    if facts.saved is None:
        if not done:
            return [*bad, ok("lost", "nothing: no step was done")]
        fact = f"all {done} steps: there is no checkpoint"
        return [*bad, warn("lost", fact, "save more often: --save-every STEPS")]
    lost = max(0, done - facts.saved)
    if not lost:
        return [*bad, ok("lost", f"nothing: the checkpoint of step {facts.saved} is the last step")]
    fact = f"{lost} steps since the checkpoint of step {facts.saved}"
    return [*bad, warn("lost", fact, "save more often: --save-every STEPS")]


def next_commands(facts: RunFacts, state: str) -> tuple[str, ...]:
    """Return what to type next: how to continue, or how to watch it."""
    if state == "finished":
        return ()
    if state in ("running", "stuck", "silent"):
        return (f"shardwise watch {facts.path}",)
    nproc = max((len(launcher.pids) for launcher in facts.launchers), default=1)
    nodes = max((launcher.nodes for launcher in facts.launchers), default=1)
    if facts.job is not None:
        lines = [shlex.join(_train_argv(facts, facts.job, nproc))]
    else:
        target = next((launcher.target for launcher in facts.launchers if launcher.target), "SCRIPT")
        lines = [
            f"shardwise launch --nproc-per-node {nproc} {target} ...",
            "# ... are its own arguments, not written down",
        ]
    if nodes > 1:
        lines.append(f"# on {nodes} nodes: with the --hosts, or --nnodes, --node-rank and --master-addr, of before")
    return tuple(lines)


def _train_argv(facts: RunFacts, job: Mapping[str, Any], nproc: int) -> list[str]:
    attribute = str(job.get("attribute", "job"))
    name = _below_here(str(job.get("path", "JOB.py"))) + ("" if attribute == "job" else f":{attribute}")
    argv = ["shardwise", "train", name, "--nproc", str(nproc)]
    if (facts.path / "plan.toml").is_file():
        argv += ["--plan", str(facts.path / "plan.toml")]
    for key, value in dict(job.get("overrides") or {}).items():
        argv += ["--set", f"{key}={value}"]
    return argv + (["--resume", str(facts.path)] if facts.saved is not None else [])


def _below_here(path: str) -> str:
    here = Path.cwd()
    return str(Path(path).relative_to(here)) if Path(path).is_relative_to(here) else path


def describe_events(events: Sequence[Event]) -> tuple[str, ...]:
    """Return the story: seconds since the first event, and what happened; of steps and saves only the last in a row."""
    if not events:
        return ()
    lines: list[str] = []
    pending: dict[str, str] = {}
    for event in events:
        sentence = _SENTENCES.get(event.kind)
        if sentence is None or (event.rank and event.kind != "note"):
            continue  # of what all ranks write, rank 0's is enough
        try:
            text = sentence(event.fields)
        except (KeyError, TypeError, ValueError, IndexError):
            continue  # written by another version
        line = f"+{event.at - events[0].at:8.1f} s  {text}"
        if event.kind in ("steps", "save"):
            pending[event.kind] = line
        elif text and not any(line.partition("  ")[2] == before.partition("  ")[2] for before in lines[-3:]):
            lines += sorted(pending.values())
            pending.clear()
            lines.append(line)
    return (*lines, *sorted(pending.values()))


def _exit(fields: Mapping[str, Any]) -> str:
    if fields["code"] == 0 or fields["stopped"]:
        return ""
    return f"rank {fields['rank']} ended: {fields['words']}"


def _attempt(fields: Mapping[str, Any]) -> str:
    ranks = name_ranks([int(rank) for rank in fields["ranks"]])
    again = f", restart {fields['number']}" if fields["number"] else ""
    return f"{ranks} started on {fields['host']}: {fields['target']}{again}"


def _finish(fields: Mapping[str, Any]) -> str:
    return {"finished": "the run has finished", "stopped": "the run was stopped"}.get(
        fields["state"], "the run has failed"
    )


_SENTENCES: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "attempt": _attempt,
    "start": lambda fields: f"training starts: {fields['num_steps']} steps to do",
    "steps": lambda fields: f"step {fields['first'] + len(fields['losses'])} is done",
    "save": lambda fields: f"a checkpoint of step {fields['step']} is begun",
    "note": lambda fields: str(fields["text"]),
    "exit": _exit,
    "restart": lambda fields: f"restart {fields['number']} of {fields['most']}",
    "verdict": lambda fields: f"verdict: {fields['text']}",
    "end": lambda fields: f"training ends after {fields['steps']} steps",
    "finish": _finish,
}


def _standing_verdict(events: Sequence[Event]) -> str:
    """Return what was found of the ranks as they are now: of this attempt, and not taken back since."""
    for event in reversed(events):
        if event.kind == "attempt" or (event.kind == "note" and event.fields.get("text") == GOES_ON):
            return ""
        if event.kind == "verdict":
            return str(event.fields.get("text", ""))
    return ""


def _done(events: Sequence[Event]) -> int:
    """Return how many steps were done when the run ended, by rank 0's last event."""
    for event in reversed(events):
        if event.kind == "steps" and event.rank == 0:
            return int(event.fields.get("first", 0)) + len(event.fields.get("losses", ()))
    return 0


def _place(mark: Mark) -> tuple[int, int]:
    return mark.step, PHASES.index(mark.phase)


def _phases(marks: Mapping[int, Mark], now: float) -> str:
    """Return where ranks are by their marks, those in one place together."""
    places: dict[tuple[int, int], list[int]] = {}
    for rank, mark in marks.items():
        places.setdefault(_place(mark), []).append(rank)
    parts = []
    for (step, phase), ranks in sorted(places.items()):
        since_s = now - max(marks[rank].at for rank in ranks)
        parts.append(f"{name_ranks(ranks)} in {PHASES[phase]} of step {step} for {since_s:.0f} s")
    return "; ".join(parts)


def _behind(marks: Mapping[int, Mark]) -> list[int]:
    """Return the ranks that are furthest behind; none where all are in one place."""
    places = {rank: _place(mark) for rank, mark in marks.items()}
    if len(set(places.values())) < 2:
        return []
    last = min(places.values())
    return [rank for rank, place in places.items() if place == last]
