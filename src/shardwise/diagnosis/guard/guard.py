"""The guard: watches running ranks, and reports which hang, which differ and which are slow."""

from __future__ import annotations

import contextlib
import math
import time
from typing import TYPE_CHECKING

from shardwise.diagnosis.guard.hang import decide, describe_ends, missing_ranks, waiting_ranks
from shardwise.diagnosis.guard.looking import RankView
from shardwise.diagnosis.guard.mismatch import CallComparison
from shardwise.diagnosis.guard.neighbours import Neighbours
from shardwise.diagnosis.guard.replicas import describe_partition
from shardwise.diagnosis.guard.straggler import Skew, look_at_cores
from shardwise.runs import EventLog
from shardwise.runs.calls import ENOUGH_SEPARATE_STEPS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from shardwise.diagnosis.guard.hang import RankStatus
    from shardwise.diagnosis.guard.neighbours import Exchange
    from shardwise.launcher.spec import HangSpec
    from shardwise.runs import RunDirectory


_LOOK_S = 1.0
_LOOKS_PER_LIMIT = 8
_SAMPLE = 0.25
"""Part of the limit between two looks at the stack of a rank that is missed; once it was reported, they are rarer."""
_WINDOW_S, _TORCH_WINDOW_S = 5.0, 0.5
"""Slow ranks are judged over so long; of what torch counts, only the last calls are seen now and then."""
_STACKS_S = 0.3
"""For ranks to write their stacks down."""
GOES_ON = "the ranks that waited go on"
"""The note that takes a verdict on a hang back."""


class Guard:
    """An observer of the launcher; costs about a millisecond a second for eight ranks."""

    def __init__(
        self, run: RunDirectory, limits: HangSpec, report: Callable[[str], None], exchange: Exchange | None = None
    ) -> None:
        """Watch ranks that are named by `follow`; what is found is reported and written to the events of this node.

        `exchange` leads to the guards of other nodes, None where there are none.
        """
        self._run, self._limits, self._report = run, limits, report
        self._log_path = run.launcher_events(exchange.node if exchange is not None else 0)
        self._views: dict[int, RankView] = {}
        self._look_s = min(_LOOK_S, limits.after_s / _LOOKS_PER_LIMIT)
        self._neighbours = Neighbours(exchange, self._look_s) if exchange is not None else None
        self._next_look = self._next_sample = 0.0
        self._is_separate = False
        """Whether the note on ranks that train separately was given."""
        self._begin()

    def follow(self, ranks: range) -> None:
        """Watch these ranks from now on."""
        self._views = {rank: RankView(self._run, rank) for rank in ranks}
        if self._neighbours is not None:
            self._neighbours.forget()
        self._begin()

    def _begin(self) -> None:
        """Forget what was found of earlier processes."""
        self._comparison = CallComparison(late=self._neighbours is not None)
        self._skew = Skew(window_s=_WINDOW_S)
        self._torch_skew = Skew(window_s=_TORCH_WINDOW_S, windows=2)
        self._verdict = ""
        self._stop_at = math.inf
        self._told: tuple[object, ...] | None = None
        """The stall that was reported, and whether as a verdict."""

    def tick(self) -> str:
        """Check now, if it is due; returns the verdict if it is to stop the ranks, once, else nothing."""
        now = time.monotonic()
        if self._views and (now >= self._next_look or self._is_over()):
            self._next_look = now + self._look_s
            with contextlib.suppress(OSError):  # a full disk or a folder that was removed must not end a launch
                self._look(now)
        if not self._limits.stops or now < self._stop_at:
            return ""
        self._stop_at = math.inf  # not those that are started again
        return self._verdict

    def _is_over(self) -> bool:
        """Whether all ranks have ended."""
        return all(view.is_gone for view in self._views.values())

    def _look(self, now: float) -> None:
        pids = [view.pid for view in self._views.values()]
        news = {rank: view.refresh() for rank, view in self._views.items()}
        if any(pid and pid != view.pid for pid, view in zip(pids, self._views.values(), strict=True)):
            self._begin()  # ranks were started again
        for rank, new in news.items():
            self._comparison.feed(rank, new)
            self._skew.feed(rank, new)
            self._torch_skew.feed(rank, self._views[rank].arrivals())
            self._views[rank].take_sample()
        ranks = {rank: view.status() for rank, view in self._views.items()}
        for text in self._comparison.findings(last=self._is_over()):
            self._tell("verdict", text)
        data_s = {rank: view.data_s for rank, view in self._views.items()}
        crowding = look_at_cores({rank: view.pid for rank, view in self._views.items() if view.pid})
        for skew in (self._skew, self._torch_skew):
            for text in skew.findings(data_s, now, crowding):
                self._tell("note", text)
        self._look_for_separate()
        if self._neighbours is not None:
            self._neighbours.share_calls(news)
            ranks = self._consult(self._neighbours, ranks, now)
        if self._neighbours is None or self._neighbours.decides:
            self._look_for_stall(ranks, now)

    def _look_for_separate(self) -> None:
        if self._is_separate:
            return
        steps = {rank: view.separate_steps for rank, view in self._views.items()}
        text = describe_separate(steps, has_peers=self._neighbours is not None, is_over=self._is_over())
        if text:
            self._is_separate = True
            self._tell("note", text)

    def _consult(self, neighbours: Neighbours, own: dict[int, RankStatus], now: float) -> dict[int, RankStatus]:
        """Exchange what is seen with the other nodes, do as node 0 asks, and return all ranks that are known of."""
        neighbours.listen(now)
        neighbours.share(own, self._limits.after_s / 4)
        if waiting_ranks(own, self._limits.after_s / 2):
            neighbours.share_links([view.pid for view in self._views.values()], now)
        for rank in neighbours.missed & set(self._views):
            self._views[rank].ask()
        for text in neighbours.verdicts:
            self._conclude(text)
        others = neighbours.ranks(now)
        for rank, status in others.items():
            self._comparison.feed(rank, [wait.call for wait in status.waits if not wait.by_torch])
        for run in neighbours.calls:
            self._comparison.feed(run.rank, run.calls())
        return {**others, **own}

    def _look_for_stall(self, ranks: dict[int, RankStatus], now: float) -> None:
        limit_s = self._limits.after_s
        suspects = set()
        for rank, wait in waiting_ranks(ranks, limit_s / 2):
            suspects |= {status.rank for status in missing_ranks(ranks, rank, wait) if not status.waits}
        if suspects and now >= self._next_sample:
            self._next_sample = now + limit_s * (_SAMPLE if self._told is None else 1.0)
            for rank in suspects & set(self._views):
                self._views[rank].ask()
            if self._neighbours is not None and suspects - set(self._views):
                self._neighbours.ask(suspects - set(self._views))
        network = describe_partition(self._neighbours.links(now)) if self._neighbours is not None else ""
        stall = decide(ranks, limit_s, network)
        if stall is None:
            self._go_on()
            return
        if self._told is not None and self._told[0] == stall.key and (self._told[1] or not stall.is_verdict):
            return
        self._told = stall.key, stall.is_verdict
        if stall.is_verdict:
            if self._neighbours is not None:
                self._neighbours.relay(stall.text)
            self._conclude(stall.text)
        else:
            self._tell("note", stall.text)

    def _go_on(self) -> None:
        """Record that no rank is missing any more."""
        if self._told is not None and not self._is_over() and not (self._verdict and self._limits.stops):
            self._tell("note", GOES_ON)
        self._told = None

    def _conclude(self, text: str) -> None:
        """Keep the stacks of all ranks, and give the verdict."""
        kept = f"; stacks are in {self._run.stacks(0).parent}" if self._keep_stacks() else ""
        self._tell("verdict", f"{text}{kept}")

    def _keep_stacks(self) -> bool:
        """Have all ranks of this machine write their stacks down; False if none can."""
        asked = [view for view in self._views.values() if view.ask()]
        if asked:
            time.sleep(_STACKS_S)
        for view in asked:
            view.keep_stacks()
        return bool(asked)

    def _tell(self, kind: str, text: str) -> None:
        self._report(f"shardwise: {text}")
        if kind == "verdict" and not self._verdict:
            self._verdict = text
            # Other nodes shall have kept their stacks before ranks are stopped.
            self._stop_at = time.monotonic() + (2 * self._look_s + _STACKS_S if self._neighbours is not None else 0.0)
        log = EventLog(self._log_path)
        log.write(kind, text=text)
        log.close()

    @property
    def verdict(self) -> str:
        """The first verdict on the processes that run or ran last; empty while there is none."""
        return self._verdict

    def places(self) -> str:
        """Return where each rank was last, once they have ended; empty if none has made a call."""
        return describe_ends([view.status() for view in self._views.values()])


# Ranks that train separately: each makes optimizer steps, and none has started a process group.


_FIX = (
    "call torch.distributed.init_process_group() and synchronize gradients, for example with"
    " DistributedDataParallel (examples/01-ddp-basics), or use one process if separate models are what you want"
)


def describe_separate(steps: Mapping[int, int], *, has_peers: bool, is_over: bool) -> str:
    """Return the note on ranks that train separately, from their optimizer steps without a process group; or nothing.

    `has_peers` if other nodes have ranks too. While ranks run, some steps may be a warm-up before the group starts.
    """
    if not steps or (len(steps) == 1 and not has_peers):
        return ""
    if min(steps.values()) < (1 if is_over else ENOUGH_SEPARATE_STEPS):
        return ""
    ranks = f"ranks {min(steps)} to {max(steps)} each train" if len(steps) > 1 else f"rank {min(steps)} trains"
    return (
        f"{ranks} a separate copy of the model: the script has not started a process group, so nothing is synchronized,"
        f" and files that ranks write under one name overwrite each other: {_FIX}"
    )
