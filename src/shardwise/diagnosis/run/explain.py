"""Explanation of a run from its directory: events in order, the cause of its end or hang, and the next command."""

from __future__ import annotations

import shlex
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from shardwise.diagnosis.guard.hang import Stall, decide, waiting_ranks
from shardwise.diagnosis.run.cause import check_cause, current_verdict, kind_of_end, state_of
from shardwise.diagnosis.run.facts import read_run
from shardwise.diagnosis.run.nccl_log import check_transports, effects
from shardwise.diagnosis.verdicts import Verdict, VerdictReport, fail, ok, verdict_lines, warn
from shardwise.runs.console import name_ranks
from shardwise.runs.data_wait import DataWait, faster_data
from shardwise.runs.recorder import PHASES
from shardwise.spec import Spec, argument, spec_function

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from shardwise.diagnosis.guard.hang import Wait
    from shardwise.diagnosis.run.facts import Event, RunFacts
    from shardwise.runs.recorder import Mark

_OF_EVERY_NODE = ("note", "verdict", "finish")
"""Kinds of events that each node writes."""
_MAX_EVENTS = 40
"""Events in the text output; the JSON output contains all."""
STUCK_S = 10.0
"""Seconds in a collective after which ranks that have not entered it are reported as missing."""


class RunSpec(Spec, frozen=True, kw_only=True):
    """The request of `shardwise doctor run`."""

    path: Annotated[Path, argument("RUN")]
    """Run directory."""


class RunReport(VerdictReport, frozen=True, kw_only=True):
    """The report of `shardwise doctor run`."""

    state: str
    """"finished", "failed", "stopped", "lost", "silent", "running", or "stuck"."""
    kind: str
    """The kind of end, one of `cause.Kind`; empty if the run has not ended or has finished."""
    story: tuple[str, ...]
    """The events as sentences, in order."""
    commands: tuple[str, ...]
    """Commands to run next."""

    def to_text(self) -> str:
        """Return the state, the last events, the verdicts and the next commands."""
        lines = [f"state: {self.state} ({self.kind})" if self.kind else f"state: {self.state}"]
        num_hidden = len(self.story) - _MAX_EVENTS
        if num_hidden > 0:
            lines.append(f"... {num_hidden} earlier events: add --json")
        lines += [*self.story[-_MAX_EVENTS:], "", *verdict_lines(self.verdicts)]
        if self.commands:
            lines += ["", *self.commands]
        return "\n".join(lines)


@spec_function(RunSpec)
def doctor_run(spec: RunSpec) -> RunReport:
    """Explain the run directory RUN: events, cause of the end, lost steps, and the next command."""
    return explain(read_run(spec.path))


def explain(facts: RunFacts) -> RunReport:
    """Return a report on the events, the cause of the end, the lost steps and the next command."""
    state: str = state_of(facts)
    verdicts = check_cause(facts)
    if state in ("running", "silent"):
        live = check_progress(facts)
        verdicts += live
        if any(verdict.name == "hang" for verdict in live):
            state = "stuck"
    has_ended_early = state in ("failed", "stopped", "lost")
    if has_ended_early:
        verdicts += check_lost(facts)
    verdicts += check_data(facts.events)
    verdicts += check_transports(facts.nccl, facts.hosts)
    if not facts.nccl.is_empty:
        verdicts += effects(facts.variables, facts.nccl)
    return RunReport(
        state=state,
        kind=kind_of_end(facts) if has_ended_early else "",
        story=describe_events(facts.events),
        verdicts=tuple(verdicts),
        commands=next_commands(facts, state),
    )


def check_progress(facts: RunFacts) -> list[Verdict]:
    """Return the phase of each rank of a running run, ranks missing in a collective, and ranks that lag."""
    age_s = facts.now - facts.newest
    phases = _phases(facts.marks, facts.now)
    found = [ok("ranks", phases)] if phases else []
    stall = decide(facts.ranks, STUCK_S)
    message, behind = current_verdict(facts.events), _behind(facts.marks)
    if stall is not None:  # the verdict of a guard has the stacks too
        fix = f"read {facts.path}/stacks if it exists; end the run with Ctrl-C in its launcher"
        found.append(fail("hang", message or stall.text, fix))
    elif message:
        found.append(fail("verdict", message, "end the run with Ctrl-C in its launcher, and correct the cause"))
    elif waiting := waiting_ranks(facts.ranks, STUCK_S):
        found += _check_elsewhere(facts, waiting)
    elif behind and age_s > STUCK_S:
        marks = facts.marks
        place = f"{marks[behind[0]].phase} of step {marks[behind[0]].shown_step}"
        fact = f"{name_ranks(behind)} lags: still in {place}, and no rank has made progress for {age_s:.0f} s"
        found.append(warn("hang", fact, f"inspect it with py-spy dump on its host, and read {facts.path}/logs"))
    elif facts.newest:
        found.append(ok("progress", f"the last event is {age_s:.0f} s old"))
    else:
        found.append(ok("progress", "no rank has written an event yet"))
    return found


def _check_elsewhere(facts: RunFacts, waiting: Sequence[tuple[int, Wait]]) -> list[Verdict]:
    """Return a warning if ranks wait in a collective for ranks of other nodes, whose calls cannot be read here."""
    absent = set(waiting[0][1].call.group.members) - facts.ranks.keys()
    text = Stall(waiting=tuple(waiting), missing=(), is_verdict=False).text
    if not absent:
        return [ok("progress", text)]
    hosts = ", ".join(sorted({facts.hosts.get(rank, "another node") for rank in absent}))
    fix = f"run shardwise doctor run on {hosts}; the launchers report a hang with its cause"
    return [warn("hang", f"{text}; {name_ranks(sorted(absent))} on {hosts} may not have arrived", fix)]


def check_data(events: Sequence[Event]) -> list[Verdict]:
    """Return a warning if steps of a rank wait for data, with the rank that waits longest."""
    waits: dict[int, DataWait] = {}
    is_first: dict[int, bool] = {}
    for event in events:
        if event.rank is None:
            continue
        if event.kind == "start":
            is_first[event.rank] = True
        # The first steps after a start include compilation and the start of loader workers.
        if event.kind == "steps" and not is_first.pop(event.rank, False):
            waits[event.rank] = waits.get(event.rank, DataWait()) + _data_wait(event.fields)
    worst = max(waits, key=lambda rank: waits[rank].share, default=None)
    if worst is None or not waits[worst].is_notable:
        return []
    return [warn("data", f"rank {worst}: {waits[worst].text}", faster_data(None))]


def _data_wait(fields: Mapping[str, Any]) -> DataWait:
    try:
        return DataWait(steps=len(fields["losses"]), seconds=float(fields["seconds"]), waited_s=float(fields["data_s"]))
    except (KeyError, TypeError, ValueError):
        return DataWait()  # written by a different version of shardwise


def check_lost(facts: RunFacts) -> list[Verdict]:
    """Return the steps that were lost since the last checkpoint, and damaged checkpoints."""
    found = []
    for damage in facts.damages:
        fact = f"ignored because it is damaged: {damage}"
        found.append(warn("checkpoint", fact, "list the checkpoints with shardwise checkpoint ls"))
    if facts.job is None:
        found.append(ok("lost", "unknown: a script saves its own state"))
        return found
    done = max([_last_step(facts.events), *(mark.step for mark in facts.marks.values())])
    if facts.saved is None and not done:
        found.append(ok("lost", "nothing: no step was completed"))
    elif facts.saved is None:
        fact = f"all {done} steps, because no checkpoint exists"
        found.append(warn("lost", fact, "save more often: --save-every STEPS"))
    elif done <= facts.saved:
        found.append(ok("lost", f"nothing: the checkpoint of step {facts.saved} is the last step"))
    else:
        fact = f"{done - facts.saved} steps since the checkpoint of step {facts.saved}"
        found.append(warn("lost", fact, "save more often: --save-every STEPS"))
    return found


def next_commands(facts: RunFacts, state: str) -> tuple[str, ...]:
    """Return the commands to resume or to watch the run."""
    if state == "finished":
        return ()
    if state in ("running", "stuck", "silent"):
        return (f"shardwise watch {facts.path}",)
    nproc = max((len(launcher.pids) for launcher in facts.launchers), default=1)
    nodes = max((launcher.nodes for launcher in facts.launchers), default=1)
    first = [launcher.host for launcher in facts.launchers if launcher.node == 0]
    node_options = f"--nnodes {nodes} --node-rank NODE --master-addr {first[0] if first else 'HOST'} "
    if facts.job is not None:
        lines = [shlex.join(_train_argv(facts, facts.job, nproc))]
    else:
        targets = filter(None, (launcher.target for launcher in facts.launchers))
        target = next(targets, "SCRIPT")
        lines = [
            f"shardwise launch {node_options if nodes > 1 else ''}--nproc-per-node {nproc} {target} ...",
            "# ... are the arguments of the script, which are not recorded",
        ]
    if nodes > 1:
        lines.append(f"# on each of {nodes} nodes, with its own --node-rank; a run of --hosts, with the same --hosts")
    return tuple(lines)


def _train_argv(facts: RunFacts, job: Mapping[str, Any], nproc: int) -> list[str]:
    name, attribute = _relative(str(job.get("path", "JOB.py"))), str(job.get("attribute", "job"))
    if attribute != "job":
        name = f"{name}:{attribute}"
    if facts.options:
        return ["shardwise", "train", name, *facts.options, f"--run-dir={facts.path}", "--resume=auto"]
    argv = ["shardwise", "train", name, "--nproc", str(nproc)]
    if (facts.path / "plan.toml").is_file():
        argv += ["--plan", str(facts.path / "plan.toml")]
    for key, value in dict(job.get("overrides") or {}).items():
        argv += ["--set", f"{key}={value}"]
    if facts.saved is not None:
        argv += ["--resume", str(facts.path)]
    return argv


def _relative(path: str) -> str:
    """Return a path below the current directory as a relative path; other paths are unchanged."""
    directory = Path.cwd()
    return str(Path(path).relative_to(directory)) if Path(path).is_relative_to(directory) else path


def describe_events(events: Sequence[Event]) -> tuple[str, ...]:
    """Return the events as sentences with the seconds since the first event; consecutive steps and saves are merged."""
    if not events:
        return ()
    lines: list[str] = []
    pending: dict[str, str] = {}
    recent: deque[str] = deque(maxlen=3)
    of_node_0 = {_ending(event) for event in events if event.rank is None and not event.node}
    for event in events:
        sentence = _SENTENCES.get(event.kind)
        if sentence is None or (event.rank and event.kind != "note"):
            continue  # all ranks write these events; those of rank 0 are enough
        try:
            text = sentence(event.fields)
        except (KeyError, TypeError, ValueError, IndexError):
            continue  # written by a different version of shardwise
        if event.node and event.kind in ("verdict", "finish") and of_node_0:
            text = "" if _ending(event) in of_node_0 else f"node {event.node}: {text}"
        line = f"+{event.at - events[0].at:8.1f} s  {text}"
        if event.kind in ("steps", "save"):
            pending[event.kind] = line
        elif text and (event.kind not in _OF_EVERY_NODE or text not in recent):
            lines += sorted(pending.values())
            pending.clear()
            lines.append(line)
            recent.append(text)
    return (*lines, *sorted(pending.values()))


def _ending(event: Event) -> tuple[str, object]:
    """Return the verdict, without the place of a node's stacks, or the final state that an event contains."""
    return event.kind, str(event.fields.get("text", event.fields.get("state"))).partition("; stacks of this node")[0]


def _exit(fields: Mapping[str, Any]) -> str:
    if fields["code"] == 0 or fields["stopped"]:
        return ""
    return f"rank {fields['rank']} ended: {fields['words']}"


def _attempt(fields: Mapping[str, Any]) -> str:
    ranks = name_ranks([int(rank) for rank in fields["ranks"]])
    restart = f", restart {fields['number']}" if fields["number"] else ""
    return f"{ranks} started on {fields['host']}: {fields['target']}{restart}"


def _finish(fields: Mapping[str, Any]) -> str:
    return {"finished": "the run has finished", "stopped": "the run was stopped"}.get(
        fields["state"], "the run has failed"
    )


_SENTENCES: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "attempt": _attempt,
    "start": lambda fields: f"training starts: {fields['num_steps']} steps in all",
    "steps": lambda fields: f"step {fields['first'] + len(fields['losses'])} is complete",
    "save": lambda fields: f"saving a checkpoint of step {fields['step']} starts",
    "note": lambda fields: str(fields["text"]),
    "exit": _exit,
    "restart": lambda fields: f"restart {fields['number']} of {fields['most']}",
    "verdict": lambda fields: f"verdict: {fields['text']}",
    "end": lambda fields: f"training ends after {fields['steps']} steps",
    "finish": _finish,
}


def _last_step(events: Sequence[Event]) -> int:
    """Return the number of completed steps, from the last event of rank 0."""
    for event in reversed(events):
        if event.kind == "steps" and event.rank == 0:
            return int(event.fields.get("first", 0)) + len(event.fields.get("losses", ()))
    return 0


def _place(mark: Mark) -> tuple[int, int]:
    return mark.step, PHASES.index(mark.phase)


def _phases(marks: Mapping[int, Mark], now: float) -> str:
    """Return the phases of the ranks as text, ranks in the same phase together."""
    places: dict[tuple[int, int], list[int]] = {}
    for rank, mark in marks.items():
        places.setdefault(_place(mark), []).append(rank)
    parts = []
    for _, ranks in sorted(places.items()):
        since_s = now - max(marks[rank].at for rank in ranks)
        mark = marks[ranks[0]]
        parts.append(f"{name_ranks(ranks)} in {mark.phase} of step {mark.shown_step} for {since_s:.0f} s")
    return "; ".join(parts)


def _behind(marks: Mapping[int, Mark]) -> list[int]:
    """Return the ranks that are furthest behind; empty if all ranks are in the same phase."""
    places = {rank: _place(mark) for rank, mark in marks.items()}
    if len(set(places.values())) < 2:
        return []
    last = min(places.values())
    return [rank for rank, place in places.items() if place == last]
