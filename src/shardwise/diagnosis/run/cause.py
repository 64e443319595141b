"""Why a run ended: which rank went first, of what kind its end was, and what to do about it; pure."""

from __future__ import annotations

import re
import signal
from typing import TYPE_CHECKING, Literal

from shardwise.diagnosis.guard.hang import describe_ends
from shardwise.diagnosis.verdicts import Verdict, fail, ok, warn
from shardwise.launcher.explain import find_mismatch
from shardwise.launcher.policy import RankExit, root_cause
from shardwise.runs.console import BAD_INPUT, PREEMPTED, describe_exit, name_ranks, short
from shardwise.runs.failure import translate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.diagnosis.run.facts import RunFacts
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
"""Without a sign for so long, a run whose launcher is elsewhere is taken for gone."""
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_NOT_THEIRS = ("site-packages", "dist-packages", "<frozen", "/shardwise/", "/lib/python")
_ASKED: dict[Kind, str] = {
    "preempted": "saved, and ended with exit code 75",
    "interrupted": "by Ctrl-C or a signal",
}
_OUT_OF_MEMORY = ("device memory", "host memory")


def state_of(facts: RunFacts) -> State:
    """Return how far a run is; "lost" when its launcher ended without a message, "silent" when none can be asked."""
    states = [launcher.finished for launcher in facts.launchers if launcher.finished]
    for state in ("failed", "stopped", "finished"):
        if state in states and (state != "finished" or len(states) == len(facts.launchers)):
            return state
    if not facts.launchers:  # torchrun, srun or mpirun started it
        if facts.failures:
            return "failed"
        if any(event.kind == "end" for event in facts.events):
            return "finished"
    if any(launcher.is_gone for launcher in facts.launchers):
        return "lost"
    return "running" if facts.now - facts.newest < SILENT_S or _is_here(facts) else "silent"


def _is_here(facts: RunFacts) -> bool:
    """Whether ranks of it still run on this machine."""
    return any(status.state != "gone" for status in facts.ranks.values())


def cause_of(facts: RunFacts) -> RankExit | None:
    """Return the exit that explains the others, None when no rank is to blame."""
    exits = [exit_ for launcher in facts.launchers for exit_ in launcher.exits]
    if not facts.launchers:
        exits = [
            RankExit(rank=rank, returncode=failure.exit_code, failure=failure, at=failure.at)
            for rank, failure in facts.failures.items()
        ]
    return root_cause(exits)


def kind_of_end(facts: RunFacts) -> Kind:
    """Return of what kind the end of a run was that did not finish."""
    codes = [exit_.returncode for launcher in facts.launchers for exit_ in launcher.exits]
    state, cause = state_of(facts), cause_of(facts)
    if state == "stopped":
        return "preempted" if PREEMPTED in codes else "interrupted"
    if cause is None:
        return "hang" if _hang(facts) else "lost"
    known = translate(_said(cause, facts), cause.returncode)
    if (known is not None and known.name in _OUT_OF_MEMORY) or (
        cause.returncode == -signal.SIGKILL and "memory ran out" in _verdict(facts)
    ):
        return "oom"
    return "mismatch" if _mismatch(facts) else _kind_of_exit(cause)


def _kind_of_exit(cause: RankExit) -> Kind:
    if cause.returncode < 0:
        return "signal"
    if cause.failure is None:
        return "early exit"
    return "refused input" if cause.failure.exit_code == BAD_INPUT else "exception"


def check_cause(facts: RunFacts) -> list[Verdict]:
    """Return why the run ended, and which ranks failed as a consequence; nothing for one that continues."""
    state = state_of(facts)
    if state == "finished":
        return [ok("cause", "the run has finished: every rank ended with exit code 0")]
    if state in ("running", "silent"):
        return []
    if state == "lost":
        return [_lost(facts)]
    kind, cause = kind_of_end(facts), cause_of(facts)
    if kind in _ASKED:
        return [warn("cause", f"{kind}: it was asked to stop, {_ASKED[kind]}", "continue, as below")]
    if cause is None:
        todo = f"read {facts.path}/stacks" if kind == "hang" else "see the launcher's last lines"
        return [fail("cause", f"{kind}: {_verdict(facts) or 'no rank is to blame'}", todo)]
    found = [fail("cause", f"{kind}: {_words(cause, facts)}", _todo(kind, cause, facts))]
    if cause.failure is None and cause.rank in facts.ranks and (last := describe_ends([facts.ranks[cause.rank]])):
        found.append(ok("last call", last))
    then = [rank for rank in facts.failures if rank != cause.rank]
    if then:
        found.append(
            ok("ranks", f"{name_ranks(then)} failed after it: {_why_too(cause, [facts.failures[n] for n in then])}")
        )
    return found


def _why_too(cause: RankExit, others: Sequence[Failure]) -> str:
    """Return why other ranks failed too."""
    if all(failure.peer_lost for failure in others):
        return "the connection to it was gone"
    first = cause.failure
    if first is not None and all((one.kind, one.message) == (first.kind, first.message) for one in others):
        return "by the same error"
    return "not only because the connection to it was gone"


def _hang(facts: RunFacts) -> str:
    """Return what a guard found that had the launcher stop the ranks; empty if that was not why."""
    texts = [str(event.fields.get("text", "")) for event in facts.events if event.kind == "verdict"]
    return next((text for text in texts[:-1] if text and text in texts[-1]), "")


def _lost(facts: RunFacts) -> Verdict:
    launcher = next(launcher for launcher in facts.launchers if launcher.is_gone)
    before = f"; before that, {launcher.verdict}" if launcher.verdict else ""
    where = f"the launcher (pid {launcher.pid} on {launcher.host})"
    fact = f"lost: {where} ended without a message, and its ranks with it{before}"
    return fail("cause", fact, "see who killed it: dmesg | tail, the batch system, a terminal that was closed")


def _words(cause: RankExit, facts: RunFacts) -> str:
    host = cause.node_name or (cause.failure.host if cause.failure is not None else facts.hosts.get(cause.rank, ""))
    name = f"rank {cause.rank}" + (f" on {host}" if host else "")
    if mismatch := _mismatch(facts):
        return f"{mismatch}; so {name} ended first: {describe_exit(cause.returncode)}"
    if cause.returncode == 0:
        return f"{name} left with exit code 0 while its peers still needed it"
    if cause.failure is None:
        return f"{name} ended first: {describe_exit(cause.returncode)}"
    first = (cause.failure.message.splitlines() or [""])[0]
    where = place_of(cause.failure)
    return f"{name} failed first: {cause.failure.kind}: {first}" + (f" at {short(where)}" if where else "")


def _mismatch(facts: RunFacts) -> str:
    """Return which collectives of the ranks did not match, if that ended them."""
    return find_mismatch([exit_ for launcher in facts.launchers for exit_ in launcher.exits])


def place_of(failure: Failure) -> str:
    """Return FILE:LINE of the innermost frame that is the user's own, else of the innermost; empty without frames."""
    frames = _FRAME.findall(failure.traceback)
    own = [frame for frame in frames if _is_users(frame[0])]
    return ":".join((own or frames)[-1]) if frames else ""


def _is_users(file: str) -> bool:
    return not any(part in file for part in _NOT_THEIRS)


def _todo(kind: Kind, cause: RankExit, facts: RunFacts) -> str:
    known = translate(_said(cause, facts), cause.returncode)
    if known is not None and kind != "mismatch":
        return f"{known.means}: {known.todo}"
    log = f"{facts.path}/logs/rank{cause.rank}.err"
    todo: dict[Kind, str] = {
        "mismatch": "correct the call that differs, then start it again",
        "oom": "use fewer ranks, fewer DataLoader workers, smaller batches, or a larger memory limit",
        "signal": f"read the end of {log}, and dmesg on its host",
        "refused input": "correct what it names, then start it again",
        "early exit": f"read the end of {log}; have every rank leave together",
    }
    return todo.get(kind, f"correct that line; the traceback is in {facts.path}/errors/rank{cause.rank}.json")


def _said(cause: RankExit, facts: RunFacts) -> str:
    """Return the last line of a rank."""
    if cause.failure is not None:
        return f"{cause.failure.kind}: {cause.failure.message}"
    return facts.tails.get(cause.rank, "")


def _verdict(facts: RunFacts) -> str:
    return next((launcher.verdict for launcher in facts.launchers if launcher.verdict), "")
