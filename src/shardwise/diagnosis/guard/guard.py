"""The guard: observes running ranks and reports hangs, mismatched collectives and stragglers."""

from __future__ import annotations

import contextlib
import math
import socket
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from shardwise.diagnosis.guard.hang import decide, describe_ends, missing_ranks, waiting_ranks
from shardwise.diagnosis.guard.mismatch import CallComparison
from shardwise.diagnosis.guard.peers import PeerGuards
from shardwise.diagnosis.guard.rank_view import RankView
from shardwise.diagnosis.guard.replicas import describe_partition
from shardwise.diagnosis.guard.straggler import Skew, read_core_load
from shardwise.runs import EventLog
from shardwise.runs.calls import ENOUGH_SEPARATE_STEPS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from shardwise.diagnosis.guard.hang import RankStatus
    from shardwise.diagnosis.guard.peers import Exchange
    from shardwise.launcher.spec import HangSpec
    from shardwise.runs import RunDirectory


_POLL_S = 1.0
_POLLS_PER_LIMIT = 8
_SAMPLE_FRACTION = 0.25
"""Interval between stack samples of a missing rank before a hang is reported, as a fraction of the hang limit."""
_WINDOW_S, _TORCH_WINDOW_S = 5.0, 0.5
"""Windows in seconds for straggler detection; the second is shorter, since torch's flight recorder keeps few calls."""
_STACKS_S = 0.3
"""Seconds that ranks have for writing their stacks after a request."""
RANKS_CONTINUE = "the ranks that waited continue"
"""The note that withdraws a hang verdict."""


class Guard:
    """Detects hangs, mismatched collectives and stragglers in running ranks; uses about 1 ms per second for 8 ranks."""

    def __init__(
        self, run: RunDirectory, limits: HangSpec, report: Callable[[str], None], exchange: Exchange | None = None
    ) -> None:
        """Observe the ranks passed to `follow`; findings are passed to `report` and written to this node's events.

        `exchange` connects the guards of all nodes; None on a single node.
        """
        self._run, self._limits, self._report = run, limits, report
        self._views: dict[int, RankView] = {}
        self._poll_s = min(_POLL_S, limits.after_s / _POLLS_PER_LIMIT)
        self._peers: PeerGuards | None = None
        self._log_path = run.launcher_events(0)
        if exchange is not None:
            self._peers = PeerGuards(exchange, self._poll_s)
            self._log_path = run.launcher_events(exchange.node)
        self._next_poll = self._next_sample = 0.0
        self._reported_separate = False
        """Whether ranks that train separate models were reported."""
        self._reset()

    def follow(self, ranks: range) -> None:
        """Observe `ranks` from now on, in place of earlier ranks."""
        self._views = {rank: RankView(self._run, rank) for rank in ranks}
        if self._peers is not None:
            self._peers.forget()
        self._reset()

    def _reset(self) -> None:
        """Discard findings about earlier processes."""
        self._comparison = CallComparison(late=self._peers is not None)
        self._skew = Skew(window_s=_WINDOW_S)
        self._torch_skew = Skew(window_s=_TORCH_WINDOW_S, windows=2)
        self._verdict = ""
        self._stop_at = math.inf
        self._reported: tuple[object, ...] | None = None
        """Key of the stall that was reported, and whether it was reported as a verdict."""

    def tick(self) -> str:
        """Check the ranks if a check is due; return the verdict once if the ranks must be stopped, otherwise ''."""
        now = time.monotonic()
        if self._views and (now >= self._next_poll or self._is_over()):
            self._next_poll = now + self._poll_s
            with contextlib.suppress(OSError):  # a full disk or a removed directory must not end a launch
                self._poll(now)
        if not self._limits.stops or now < self._stop_at:
            return ""
        self._stop_at = math.inf  # restarted ranks must not be stopped for the same verdict
        return self._verdict

    def _is_over(self) -> bool:
        """Return whether all ranks have ended."""
        return all(view.is_gone for view in self._views.values())

    def _poll(self, now: float) -> None:
        news = {}
        was_restarted = False
        for rank, view in self._views.items():
            pid = view.pid
            news[rank] = view.refresh()
            was_restarted |= pid not in {0, view.pid}
        if was_restarted:
            self._reset()
        for rank, new in news.items():
            self._comparison.feed(rank, new)
            self._skew.feed(rank, new)
            self._torch_skew.feed(rank, self._views[rank].arrivals())
            self._views[rank].take_sample()
        for text in self._comparison.findings(last=self._is_over()):
            self._record("verdict", text)
        self._check_stragglers(now)
        self._check_separate()
        ranks = {rank: view.status() for rank, view in self._views.items()}
        if self._peers is not None:
            self._peers.share_calls(news)
            ranks = self._exchange_status(self._peers, ranks, now)
        if self._peers is None or self._peers.decides:
            self._check_stall(ranks, now)

    def _check_stragglers(self, now: float) -> None:
        data_s, pids = {}, {}
        for rank, view in self._views.items():
            data_s[rank] = view.data_s
            if view.pid:
                pids[rank] = view.pid
        load = read_core_load(pids)
        for skew in (self._skew, self._torch_skew):
            for text in skew.findings(data_s, now, load):
                self._record("note", text)

    def _check_separate(self) -> None:
        if self._reported_separate:
            return
        steps = {rank: view.separate_steps for rank, view in self._views.items()}
        text = describe_separate(steps, has_peers=self._peers is not None, is_over=self._is_over())
        if text:
            self._reported_separate = True
            self._record("note", text)

    def _exchange_status(self, peers: PeerGuards, local: dict[int, RankStatus], now: float) -> dict[int, RankStatus]:
        """Exchange the status of ranks with other nodes, follow requests of node 0, and return all known ranks."""
        host = socket.gethostname()
        local = {rank: replace(status, host=host) for rank, status in local.items()}
        peers.receive(now)
        peers.share(local, self._limits.after_s / 4)
        if waiting_ranks(local, self._limits.after_s / 2):
            peers.share_links([view.pid for view in self._views.values()], now)
        for rank in peers.missed & set(self._views):
            self._views[rank].request_stacks()
        for text in peers.verdicts:
            self._conclude(text)
        remote = peers.ranks(now)
        for rank, status in remote.items():
            self._comparison.feed(rank, [wait.call for wait in status.waits if not wait.by_torch])
        for run in peers.calls:
            self._comparison.feed(run.rank, run.calls())
        return {**remote, **local}

    def _check_stall(self, ranks: dict[int, RankStatus], now: float) -> None:
        limit_s = self._limits.after_s
        suspects = set()
        for rank, wait in waiting_ranks(ranks, limit_s / 2):
            suspects |= {status.rank for status in missing_ranks(ranks, rank, wait) if not status.waits}
        if suspects and now >= self._next_sample:
            self._next_sample = now + limit_s * (_SAMPLE_FRACTION if self._reported is None else 1.0)
            self._sample(suspects)
        network = ""
        if self._peers is not None:
            network = describe_partition(self._peers.links(now))
        stall = decide(ranks, limit_s, network)
        if stall is None:
            self._record_progress()
            return
        reported_key, reported_verdict = self._reported or (None, False)
        if reported_key == stall.key and (reported_verdict or not stall.is_verdict):
            return
        self._reported = stall.key, stall.is_verdict
        if not stall.is_verdict:
            self._record("note", stall.text)
            return
        if self._peers is not None:
            self._peers.relay(stall.text)
        self._conclude(stall.text)

    def _sample(self, suspects: set[int]) -> None:
        """Request the stacks of missing ranks on this node and, as node 0, on other nodes."""
        for rank in suspects & set(self._views):
            self._views[rank].request_stacks()
        remote = suspects - set(self._views)
        if self._peers is not None and remote:
            self._peers.request_activity(remote)

    def _record_progress(self) -> None:
        """Record that the ranks continue after a reported stall."""
        if self._reported is not None and not self._is_over() and not (self._verdict and self._limits.stops):
            self._record("note", RANKS_CONTINUE)
        self._reported = None

    def _conclude(self, text: str) -> None:
        """Store the stacks of all ranks and record the verdict."""
        if self._store_stacks():
            text = f"{text}; {_describe_stacks(self._run, is_single=self._peers is None)}"
        self._record("verdict", text)

    def _store_stacks(self) -> bool:
        """Make all ranks of this node write their stacks; return False if no rank can."""
        requested = [view for view in self._views.values() if view.request_stacks()]
        if requested:
            time.sleep(_STACKS_S)
        for view in requested:
            view.store_stacks()
        return bool(requested)

    def _record(self, kind: str, text: str) -> None:
        self._report(f"shardwise: {text}")
        if kind == "verdict" and not self._verdict:
            self._verdict = text
            self._stop_at = time.monotonic()
            if self._peers is not None:  # other nodes need time to store their stacks before ranks are stopped
                self._stop_at += 2 * self._poll_s + _STACKS_S
        log = EventLog(self._log_path)
        log.write(kind, text=text)
        log.close()

    @property
    def verdict(self) -> str:
        """The first verdict on the current or most recent processes; empty if there is none."""
        return self._verdict

    def places(self) -> str:
        """Return the last recorded collective of each rank that ended; empty if no rank was inside one."""
        return _describe_places([view.status() for view in self._views.values()])


def _describe_places(ranks: Sequence[RankStatus]) -> str:
    # If no rank was inside a recorded collective, C++ issued the one in which they ended (DDP): earlier ones mislead.
    return describe_ends(ranks) if any(status.waits for status in ranks) else ""


def _describe_stacks(run: RunDirectory, *, is_single: bool) -> str:
    folder = run.stacks(0).parent
    if is_single:
        return f"stacks are in {folder}"
    # Nodes may have disks of their own.
    return f"stacks of this node are in {folder.resolve()} on {socket.gethostname()}"


_SEPARATE_FIX = (
    "call torch.distributed.init_process_group() and synchronize gradients, for example with"
    " DistributedDataParallel (examples/01-ddp-basics), or use one process if separate models are intended"
)


def describe_separate(steps: Mapping[int, int], *, has_peers: bool, is_over: bool) -> str:
    """Return a note if every rank trains without a process group, otherwise an empty string.

    `steps` counts the optimizer steps of each rank without a process group. `has_peers` is True if other nodes have
    ranks too. While ranks run, a few steps may be a warm-up before the process group is initialized.
    """
    if not steps or (len(steps) == 1 and not has_peers):
        return ""
    min_steps = 1 if is_over else ENOUGH_SEPARATE_STEPS
    if min(steps.values()) < min_steps:
        return ""
    ranks = f"ranks {min(steps)} to {max(steps)} each train" if len(steps) > 1 else f"rank {min(steps)} trains"
    return (
        f"{ranks} a separate copy of the model: the script has not initialized a process group, so gradients are not"
        f" synchronized and ranks overwrite each other's files: {_SEPARATE_FIX}"
    )
