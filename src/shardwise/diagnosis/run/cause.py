"""The cause of a run's end: the rank that failed first, the kind of failure, and the fix; pure functions."""

from __future__ import annotations

import re
import signal
from typing import TYPE_CHECKING, Literal

from shardwise.diagnosis.guard.guard import RANKS_CONTINUE
from shardwise.diagnosis.guard.hang import describe_ends
from shardwise.diagnosis.verdicts import Verdict, fail, ok, warn
from shardwise.launcher.explain import EARLY_EXIT_FIX, find_mismatch
from shardwise.launcher.policy import RankExit, root_cause
from shardwise.runs.console import BAD_INPUT, PREEMPTED, describe_exit, name_ranks, short
from shardwise.runs.failure import HOST_MEMORY_FIX, HOST_MEMORY_SPENT, translate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.diagnosis.run.facts import Event, RunFacts
    from shardwise.runs.failure import Failure

Kind = Literal[
    "exception",
    "signal",
    "mismatch",
    "oom",
    "refused input",
    "preempted",
    "interrupted",
    "early exit",
    "hang",
    "lost",
]
State = Literal["finished", "failed", "stopped", "lost", "silent", "running"]
SILENT_S = 120.0
"""Seconds without an event after which a run whose launcher is on another host is reported as silent."""
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_LIBRARY_PATHS = ("site-packages", "dist-packages", "<frozen", "/shardwise/", "/lib/python")
_REQUESTED_STOPS: dict[Kind, str] = {
    "preempted": "a checkpoint was saved and the exit code is 75",
    "interrupted": "by Ctrl-C or a signal",
}
_WAITING = re.compile(r"\bwaits? in ")
"""Text in every hang verdict; other verdicts report mismatched collectives or replicas that differ."""
_OUT_OF_MEMORY = ("device memory", "host memory")


def state_of(facts: RunFacts) -> State:
    """Return the state: "lost" if a launcher ended without a message, "silent" without recent events or local ranks."""
    launchers = facts.last_launchers
    states = [launcher.finished for launcher in launchers if launcher.finished]
    for state in ("failed", "stopped", "finished"):
        if state in states and (state != "finished" or len(states) == len(launchers)):
            return state
    if not launchers:  # started by torchrun, srun or mpirun
        if facts.failures:
            return "failed"
        if any(event.kind == "end" for event in facts.events):
            return "finished"
    if any(launcher.is_gone for launcher in launchers):
        return "lost"
    return "running" if facts.now - facts.newest < SILENT_S or _has_running_ranks(facts) else "silent"


def _has_running_ranks(facts: RunFacts) -> bool:
    """Return whether a rank still runs on this machine."""
    return any(status.state != "gone" for status in facts.ranks.values())


def _all_exits(facts: RunFacts) -> list[RankExit]:
    exits: list[RankExit] = []
    for launcher in facts.last_launchers:
        exits += launcher.exits
    return exits


def cause_of(facts: RunFacts) -> RankExit | None:
    """Return the rank exit that caused all other exits; None if no rank caused the end of the run."""
    exits = _all_exits(facts)
    if not facts.launchers:
        for rank, failure in facts.failures.items():
            exit_ = RankExit(rank=rank, returncode=failure.exit_code, failure=failure, at=failure.at)
            exits.append(exit_)
    return root_cause(exits)


def kind_of_end(facts: RunFacts) -> Kind:
    """Return the kind of failure or stop of a run that did not finish."""
    state, cause = state_of(facts), cause_of(facts)
    if state == "stopped":
        if PREEMPTED in [exit_.returncode for exit_ in _all_exits(facts)]:
            return "preempted"
        return "hang" if _WAITING.search(current_verdict(facts.events)) else "interrupted"
    if cause is None:
        return "hang" if _hang_verdict(facts) else "lost"
    known = translate(_error_text(cause, facts), cause.returncode)
    was_killed = cause.returncode == -signal.SIGKILL and HOST_MEMORY_SPENT in _verdict(facts)
    if was_killed or (known is not None and known.name in _OUT_OF_MEMORY):
        return "oom"
    return "mismatch" if _mismatch(facts) else _kind_of_exit(cause)


def _kind_of_exit(cause: RankExit) -> Kind:
    if cause.failed and cause.returncode < 0:
        return "signal"
    if cause.failure is None or not cause.failed:
        return "early exit"
    return "refused input" if cause.failure.exit_code == BAD_INPUT else "exception"


def check_cause(facts: RunFacts) -> list[Verdict]:
    """Return why the run ended and which ranks failed as a consequence; empty for a run that continues."""
    state = state_of(facts)
    if state == "finished":
        return [ok("cause", "the run has finished: every rank exited with code 0")]
    if state in ("running", "silent"):
        return []
    if state == "lost":
        return [_lost(facts)]
    kind, cause = kind_of_end(facts), cause_of(facts)
    if kind in _REQUESTED_STOPS:
        return [
            warn("cause", f"{kind}: a stop was requested, {_REQUESTED_STOPS[kind]}", "resume with the command below")
        ]
    if cause is None:
        hosts = ", ".join(sorted(set(facts.hosts.values())))
        fix = f"check dmesg, memory and network on {hosts}, then start the run again"
        if kind == "hang":
            fix = f"read {facts.path}/stacks, and correct the line at which the missing rank is"
        return [fail("cause", f"{kind}: {_verdict(facts) or 'no rank failed'}", fix)]
    found = [fail("cause", f"{kind}: {_describe(cause, facts)}", _fix(kind, cause, facts))]
    if cause.failure is None and cause.rank in facts.ranks:
        last_call = describe_ends([facts.ranks[cause.rank]])
        if last_call:
            found.append(ok("last call", last_call))
    others = {rank: failure for rank, failure in facts.failures.items() if rank != cause.rank}
    if others:
        reason = _why_too(cause, list(others.values()))
        found.append(ok("ranks", f"{name_ranks(list(others))} failed after it: {reason}"))
    return found


def _why_too(cause: RankExit, others: Sequence[Failure]) -> str:
    """Return why the other ranks failed after the first rank."""
    if all(failure.peer_lost for failure in others):
        return "they lost the connection to it"
    first = cause.failure
    if first is not None and all((one.kind, one.message) == (first.kind, first.message) for one in others):
        return "with the same error"
    return "not only because they lost the connection to it"


def _hang_verdict(facts: RunFacts) -> str:
    """Return the guard's verdict that made the launcher stop the ranks; empty if they ended for another reason."""
    texts = []
    for event in facts.events:
        if event.kind == "verdict":
            text = str(event.fields.get("text", ""))
            texts.append(text)
    for text in texts[:-1]:
        if text and text in texts[-1]:
            return text
    return ""


def current_verdict(events: Sequence[Event]) -> str:
    """Return the verdict on the current attempt that has not been withdrawn; empty if there is none."""
    for event in reversed(events):
        if event.kind == "attempt" or (event.kind == "note" and event.fields.get("text") == RANKS_CONTINUE):
            return ""
        if event.kind == "verdict":
            return str(event.fields.get("text", ""))
    return ""


def _lost(facts: RunFacts) -> Verdict:
    launcher = next(launcher for launcher in facts.last_launchers if launcher.is_gone)
    fact = f"lost: the launcher (pid {launcher.pid} on {launcher.host}) and its ranks ended without a message"
    if launcher.verdict:
        fact += f"; before that, {launcher.verdict}"
    return fail("cause", fact, "check dmesg and the logs of the batch system, and whether the terminal was closed")


def _describe(cause: RankExit, facts: RunFacts) -> str:
    host = cause.node_name or facts.hosts.get(cause.rank, "")
    if cause.failure is not None:
        host = cause.node_name or cause.failure.host
    name = f"rank {cause.rank} on {host}" if host else f"rank {cause.rank}"
    if mismatch := _mismatch(facts):
        return f"{mismatch}; so {name} ended first: {describe_exit(cause.returncode)}"
    if not cause.failed:
        what = "destroyed its process group" if cause.left_at else "exited with code 0"
        return f"{name} {what} while other ranks still needed it"
    if cause.failure is None:
        return f"{name} ended first: {describe_exit(cause.returncode)}"
    message = cause.failure.message.partition("\n")[0]
    text = f"{name} failed first: {cause.failure.kind}: {message}"
    where = place_of(cause.failure)
    return f"{text} at {short(where)}" if where else text


def _mismatch(facts: RunFacts) -> str:
    """Return the mismatched collectives that ended the ranks; empty if all collectives match."""
    return find_mismatch(_all_exits(facts))


def place_of(failure: Failure) -> str:
    """Return FILE:LINE of the innermost frame in user code, otherwise of the innermost frame; empty without frames."""
    frames = _FRAME.findall(failure.traceback)
    if not frames:
        return ""
    user_frames = [frame for frame in frames if _is_user_code(frame[0])]
    return ":".join((user_frames or frames)[-1])


def _is_user_code(file: str) -> bool:
    return not any(part in file for part in _LIBRARY_PATHS)


def _fix(kind: Kind, cause: RankExit, facts: RunFacts) -> str:
    if not cause.failed:
        return EARLY_EXIT_FIX
    known = translate(_error_text(cause, facts), cause.returncode)
    if known is not None and kind != "mismatch":
        return f"{known.means}: {known.todo}"
    log = f"{facts.path}/logs/rank{cause.rank}.err"
    fixes: dict[Kind, str] = {
        "mismatch": "correct the call that differs, then start the run again",
        "oom": HOST_MEMORY_FIX,
        "signal": f"read the end of {log}, and dmesg on its host",
        "refused input": "correct the value that the error names, then start the run again",
        "early exit": f"read the end of {log}; make all ranks exit together",
    }
    return fixes.get(kind, f"correct that line; the traceback is in {facts.path}/errors/rank{cause.rank}.json")


def _error_text(cause: RankExit, facts: RunFacts) -> str:
    """Return the exception of a rank, otherwise the end of its standard error."""
    if cause.failure is not None:
        return f"{cause.failure.kind}: {cause.failure.message}"
    return facts.tails.get(cause.rank, "")


def _verdict(facts: RunFacts) -> str:
    for launcher in facts.last_launchers:
        if launcher.verdict:
            return launcher.verdict
    return ""
