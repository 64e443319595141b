"""The supervisor: waits for ranks to exit, and stops all of them when one fails."""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import signal
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from shardwise.hardware import oom_kills
from shardwise.launcher.local.processes import ignores_hangup
from shardwise.launcher.policy import RankExit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import FrameType

    from shardwise.launcher.local.processes import RankProcess
    from shardwise.runs.failure import Failure

TICK_S = 0.1
SETTLE_S = 0.5
"""Seconds to wait for the root cause after a failure that a different rank may have caused."""
GRACE_S = 30.0
"""Seconds from a stop request to SIGKILL."""
FAILURE_GRACE_S = 5.0
"""Seconds from SIGTERM to SIGKILL after a failure; shorter, because no checkpoint is saved without the failed rank."""
_FORWARDED: Mapping[int, signal.Signals] = {signal.SIGUSR1: signal.SIGUSR1}
"""Signals that are forwarded to ranks unchanged; others become SIGTERM, so that Ctrl-C does not print N tracebacks."""


class Observer(Protocol):
    """The interface of observers of running ranks, such as the progress view and the hang detector."""

    def tick(self) -> str | None:
        """Observe the ranks; called about ten times a second and once after the last rank exited.

        If it returns a string, the supervisor stops the ranks with that string as the reason.
        """


class OtherNodes(Protocol):
    """The connection to the other nodes of the run, which receive reports and may request a stop."""

    def requested_stop(self) -> int:
        """Return the signal of a graceful stop that another node requested; 0 without a request."""

    def report_failure(self, exit_: RankExit) -> None:
        """Report that a rank of this node failed."""

    def report_signal(self, number: int) -> None:
        """Report that this launcher received a stop signal."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The exits of all ranks of an attempt, and the other reasons for which they were stopped."""

    exits: tuple[RankExit, ...]
    interrupted: int = 0
    """Stop signal that the launcher received; 0 without one."""
    timed_out: tuple[int, ...] = ()
    """Ranks that were still running at the time limit."""
    lost: str = ""
    """Description of a required process or node whose loss stopped the ranks; empty if none was lost."""
    by_verdict: bool = False
    """Whether `lost` is the verdict of an observer that stopped the ranks; a restart may then succeed."""
    out_of_memory: bool = False
    """Whether the kernel's OOM killer killed a process of this cgroup during the attempt."""
    mismatch: str = ""
    """Description of mismatched collectives that caused the failure, or empty."""


@dataclass
class _RankWatch:
    """The state of the supervisor while it waits for ranks."""

    running: dict[int, RankProcess]
    exits: list[RankExit] = field(default_factory=list)
    signals: list[int] = field(default_factory=list)
    """Stop signals that this launcher received."""
    remote_request: int = 0
    """Signal of a stop that another node requested; 0 without a request."""
    stopping_since: float | None = None
    stop_at: float = math.inf
    """Time at which all ranks are stopped because one failed."""
    killed: bool = False
    num_reported: int = 0
    """Number of exits that were reported to the other nodes."""
    reported_signal: bool = False
    """Whether the stop signal was reported to the other nodes."""

    @property
    def request(self) -> int:
        """Signal of a graceful stop requested here or on another node; 0 without a request."""
        return self.signals[0] if self.signals else self.remote_request


def supervise(
    processes: Sequence[RankProcess],
    *,
    failure_of: Callable[[int, int], Failure | None],
    ended: Callable[[RankExit], None] = lambda _: None,
    observers: Sequence[Observer] = (),
    lost: Callable[[], str] = lambda: "",
    other_nodes: OtherNodes | None = None,
    grace_s: float = GRACE_S,
    timeout_s: float | None = None,
    before_kill: Callable[[RankProcess], None] | None = None,
) -> Outcome:
    """Wait for all ranks to exit; after a failure, a stop signal or the time limit, stop and reap all of them.

    `failure_of(rank, exit code)` returns the exception that a rank recorded. `ended` is called with each exit. `lost`
    returns a description of a required process that exited, else an empty string. `other_nodes` is None on one node.
    """
    watch = _RankWatch({process.rank: process for process in processes})
    kills_before = oom_kills()
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    timed_out: tuple[int, ...] = ()
    missing, by_verdict = "", False
    with _wakeups(processes) as wait, caught_signals(watch.signals):
        while watch.running:
            wait(TICK_S)
            now = time.monotonic()
            codes = {rank: process.poll() for rank, process in watch.running.items()}
            missing = missing or lost()  # after the polls, because a lost process may have ended ranks
            if missing and watch.stopping_since is None:
                watch.stop_at = now  # the ranks would wait for each other until a timeout
                _stop_if_needed(watch, now, grace_s)  # first, so that exits seen now are not taken for the cause
            for exit_ in _reap(watch, codes, now, failure_of):
                ended(exit_)
            if other_nodes is not None:
                _synchronize(watch, other_nodes)
            for observer in observers:
                if verdict := observer.tick():
                    missing, by_verdict = verdict, True
            if deadline is not None and now > deadline and watch.running and not timed_out:
                timed_out = tuple(sorted(watch.running))
                for process in watch.running.values():
                    if before_kill is not None:
                        before_kill(process)
                _kill(watch)
            _stop_if_needed(watch, now, grace_s)
    exits = tuple(sorted(watch.exits, key=lambda exit_: exit_.rank))
    return Outcome(
        exits=exits,
        interrupted=watch.request,
        timed_out=timed_out,
        lost=missing,
        by_verdict=by_verdict,
        out_of_memory=(oom_kills() or 0) > (kills_before or 0),
    )


def _reap(
    watch: _RankWatch, codes: Mapping[int, int | None], now: float, failure_of: Callable[[int, int], Failure | None]
) -> list[RankExit]:
    """Move ranks with an exit code from `watch.running` to `watch.exits`, and return their exits."""
    known = len(watch.exits)
    for rank, returncode in codes.items():
        if returncode is None:
            continue
        process = watch.running.pop(rank)
        process.signal(signal.SIGKILL)  # kills child processes that remain in its process group
        exit_ = RankExit(
            rank=rank,
            returncode=returncode,
            failure=failure_of(rank, returncode),
            stopped=watch.stopping_since is not None,
            at=now,
        )
        watch.exits.append(exit_)
        if exit_.failed:
            watch.stop_at = min(watch.stop_at, now if exit_.is_certain else now + SETTLE_S)
    return watch.exits[known:]


def _synchronize(watch: _RankWatch, other_nodes: OtherNodes) -> None:
    """Report new failures and signals to the other nodes, and read their stop request."""
    for exit_ in watch.exits[watch.num_reported :]:
        if exit_.failed:
            other_nodes.report_failure(exit_)
    watch.num_reported = len(watch.exits)
    watch.remote_request = watch.remote_request or other_nodes.requested_stop()
    if watch.signals and not watch.reported_signal:
        watch.reported_signal = True
        other_nodes.report_signal(watch.signals[0])


def _stop_if_needed(watch: _RankWatch, now: float, grace_s: float) -> None:
    """Stop the ranks by SIGTERM, then by SIGKILL after the grace period or a second signal from the user."""
    limit_s = grace_s if watch.request else min(grace_s, FAILURE_GRACE_S)
    if watch.stopping_since is None:
        if watch.request or now >= watch.stop_at:
            watch.stopping_since = now
            for process in watch.running.values():
                process.signal(_FORWARDED.get(watch.request, signal.SIGTERM))
    elif not watch.killed and (now - watch.stopping_since > limit_s or len(watch.signals) > 1):
        _kill(watch)


def _kill(watch: _RankWatch) -> None:
    watch.killed = True
    watch.stopping_since = watch.stopping_since or time.monotonic()
    for process in watch.running.values():
        process.signal(signal.SIGKILL)


@contextlib.contextmanager
def _wakeups(processes: Sequence[RankProcess]) -> Iterator[Callable[[float], object]]:
    """Yield a function that waits for a timeout, or on Linux until a rank exits (pidfd), if that is earlier."""
    if not hasattr(os, "pidfd_open"):
        yield time.sleep
        return
    with selectors.DefaultSelector() as selector:
        descriptors = []
        for process in processes:
            with contextlib.suppress(ProcessLookupError):  # already reaped by the fork parent
                descriptors.append(os.pidfd_open(process.pid))
                selector.register(descriptors[-1], selectors.EVENT_READ)

        def wait(timeout_s: float) -> None:
            for key, _ in selector.select(timeout_s):
                selector.unregister(key.fd)

        try:
            yield wait
        finally:
            for descriptor in descriptors:
                os.close(descriptor)


@contextlib.contextmanager
def caught_signals(seen: list[int]) -> Iterator[None]:
    """Append SIGINT, SIGTERM, SIGHUP and SIGUSR1 to `seen` instead of terminating while ranks run.

    SIGHUP stays ignored if this process ignores it, as under nohup.
    """

    def remember(number: int, _frame: FrameType | None) -> None:
        seen.append(number)

    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]
    if not ignores_hangup():
        numbers.append(signal.SIGHUP)
    try:
        before = {number: signal.signal(number, remember) for number in numbers}
    except ValueError:  # only the main thread can handle signals
        before = {}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
