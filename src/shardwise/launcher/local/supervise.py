"""The supervisor: waits for ranks, and when one fails stops them all together."""

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
"""After a failure that another may explain, the others get this long to end by themselves."""
GRACE_S = 30.0
"""Between a stop request to a rank and its end by force."""
FAILURE_GRACE_S = 5.0
"""The same after a failure: what a rank could still save needs the one that failed."""
_FORWARDED: Mapping[int, signal.Signals] = {signal.SIGUSR1: signal.SIGUSR1}
"""What ranks get for a signal the launcher got; SIGTERM for all others: Ctrl-C should not print N tracebacks."""


class Observer(Protocol):
    """Something that observes running ranks: a progress view, a guard against hangs."""

    def tick(self) -> str | None:
        """Observe now; called about ten times a second and once after the last rank ended.

        A text that is returned stops the ranks; it is returned once, since the ranks may be started again.
        """


class OtherNodes(Protocol):
    """The other nodes of the run: they get reports of what happens here, and may request a stop."""

    def requested_stop(self) -> int:
        """Return the signal by which they request a graceful stop of the ranks of this node; 0 for none."""

    def report_failure(self, exit_: RankExit) -> None:
        """Report that a rank failed."""

    def report_signal(self, number: int) -> None:
        """Report that this launcher got a signal to stop."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a world of ranks ended."""

    exits: tuple[RankExit, ...]
    interrupted: int = 0
    """Signal that asked the launcher to stop; 0 for none."""
    timed_out: tuple[int, ...] = ()
    """Ranks that were still running at the time limit."""
    lost: str = ""
    """What the ranks could not continue without, and how it ended; empty when nothing else failed."""
    by_verdict: bool = False
    """`lost` is the verdict of an observer that stopped the ranks: another attempt may do better."""
    out_of_memory: bool = False
    """The kernel killed a process of this cgroup for lack of memory meanwhile."""
    mismatch: str = ""
    """Which collectives of the ranks did not match, if that ended them; else empty."""


@dataclass
class _RankWatch:
    """What the supervisor knows while it waits."""

    running: dict[int, RankProcess]
    exits: list[RankExit] = field(default_factory=list)
    signals: list[int] = field(default_factory=list)
    """That this launcher got."""
    asked: int = 0
    """Signal with which the other nodes asked for a stop; 0 for none."""
    stopping_since: float | None = None
    stop_at: float = math.inf
    """When all others are stopped because one failed."""
    killed: bool = False
    num_reported: int = 0
    """How many of the exits the other nodes know."""
    reported_signal: bool = False
    """Whether the other nodes know that this launcher got a signal."""

    @property
    def request(self) -> int:
        """Signal by which anybody requested a graceful stop; 0 for none."""
        return self.signals[0] if self.signals else self.asked


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
    """Wait for all ranks; after a failure, a signal or the time limit, stop all and reap them.

    `failure_of` returns what a rank with this exit code recorded. `ended` is called with each exit as it is seen.
    `lost` returns what else has ended that ranks cannot continue without; empty while all is there. `other_nodes` is
    None when there are none.
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
            missing = missing or lost()  # after the polls: what is lost may have ended ranks with it
            if missing and watch.stopping_since is None:
                watch.stop_at = now  # ranks would wait for each other until a time limit
                _stop_if_needed(watch, now, grace_s)  # before their exits are noted, which explain nothing now
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
    """Take note of the ranks that have ended since the last look, as their exit codes show, and return them."""
    known = len(watch.exits)
    for rank, returncode in codes.items():
        if returncode is None:
            continue
        process = watch.running.pop(rank)
        process.signal(signal.SIGKILL)  # whatever it started and left behind in its process group
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
    """Report what is new to the other nodes, and take their request to stop."""
    for exit_ in watch.exits[watch.num_reported :]:
        if exit_.failed:
            other_nodes.report_failure(exit_)
    watch.num_reported = len(watch.exits)
    watch.asked = watch.asked or other_nodes.requested_stop()
    if watch.signals and not watch.reported_signal:
        watch.reported_signal = True
        other_nodes.report_signal(watch.signals[0])


def _stop_if_needed(watch: _RankWatch, now: float, grace_s: float) -> None:
    """Stop in two steps, ask and kill. A second signal from the user skips to the last."""
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
    """Yield a wait that returns at once when a rank ends (pidfd, Linux), else after the time given."""
    if not hasattr(os, "pidfd_open"):
        yield time.sleep
        return
    with selectors.DefaultSelector() as selector:
        descriptors = []
        for process in processes:
            with contextlib.suppress(ProcessLookupError):  # ended already, and reaped by the fork parent
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
    """Collect SIGINT, SIGTERM, SIGHUP and SIGUSR1 instead of dying from them with ranks still running.

    A SIGHUP that this process inherited as ignored (nohup) stays ignored.
    """

    def remember(number: int, _frame: FrameType | None) -> None:
        seen.append(number)

    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]
    if not ignores_hangup():
        numbers.append(signal.SIGHUP)
    try:
        before = {number: signal.signal(number, remember) for number in numbers}
    except ValueError:  # not the main thread: signals go to another thread
        before = {}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
