"""The words in which a failed run ends: the root cause last, with its rank, its traceback and the fix."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from shardwise.launch.policy import RankExit, root_cause
from shardwise.run.exitcodes import describe_exit

if TYPE_CHECKING:
    from shardwise.launch.supervise import Outcome
    from shardwise.run import RunDirectory

_LOG_LINES = 20


def explain_outcome(outcome: Outcome, run: RunDirectory) -> str:
    """Return the closing report of a failed launch, its last line the root cause; empty when all went well."""
    cause = root_cause(outcome.exits)
    if cause is None:
        return f"{outcome.lost}, so all ranks were stopped" if outcome.lost else ""
    others = [exit_ for exit_ in outcome.exits if exit_.failed and exit_.rank != cause.rank]
    parts = [f"rank {exit_.rank} then failed too: {_summary(exit_)}" for exit_ in others]
    parts.append(_evidence(cause, run))
    parts.append(
        f"rank {cause.rank} failed first: {_summary(cause)}"
        if cause.failed
        else f"rank {cause.rank} left first: exit code 0 while its peers still needed it; they lost their connection"
    )
    if cause.returncode == -signal.SIGKILL and outcome.out_of_memory:
        parts[-1] = (
            f"rank {cause.rank} failed first: SIGKILL by the kernel, host memory ran out:"
            " use fewer ranks, fewer DataLoader workers, smaller batches, or a larger memory limit"
        )
    return "\n".join(part for part in parts if part)


def _summary(exit_: RankExit) -> str:
    if exit_.failure is None:
        return describe_exit(exit_.returncode)
    first_line = (exit_.failure.message.splitlines() or [""])[0]
    return f"{exit_.failure.kind}: {first_line} (on {exit_.failure.host})"


def _evidence(cause: RankExit, run: RunDirectory) -> str:
    """The rank's own traceback, or the end of its log when it could not write one."""
    if cause.failure is not None:
        return f"rank {cause.rank}:\n{cause.failure.traceback.rstrip()}"
    log = run.stderr(cause.rank)
    tail = log.read_text(errors="replace").splitlines()[-_LOG_LINES:] if log.exists() else []
    return "\n".join([f"rank {cause.rank}, end of {log}:", *tail]) if tail else ""
