"""Stragglers: which rank comes last to collectives, and whether oversubscribed cores explain it."""

from __future__ import annotations

import os
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.runs.console import short

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from shardwise.runs.call_reader import Call
    from shardwise.runs.calls import GroupKey


_FEWEST = 10
_SHARE, _OWN = 0.2, 0.7
"""A rank is slow if the others wait for it this part of the time, and it is behind this part of all waiting."""
_SINGLE = 3
"""Long lags in a window that mean nothing yet: a first batch, a checkpoint, an evaluation."""
_KEPT = 2048


class Skew:
    """Collects when ranks arrive at the same call, and names one that keeps the others waiting; each rank once."""

    def __init__(self, *, window_s: float, windows: int = 1) -> None:
        """Judge over windows of so many seconds; a rank must be slow in so many of them in a row."""
        self._window_s, self._windows = window_s, windows
        self._open: dict[tuple[GroupKey, str, int], dict[int, Call]] = {}
        self._slow: dict[int, int] = {}
        """In how many windows in a row each rank was slow."""
        self._data: Mapping[int, float] = {}
        self._crowding = Crowding()
        self._looked_at = 0.0
        self._begin()

    def _begin(self) -> None:
        self._lags: dict[int, list[float]] = {}
        """By rank, how late it was wherever it came last."""
        self._places: dict[int, Call] = {}
        self._times: list[float] = []

    def feed(self, rank: int, calls: Iterable[Call]) -> None:
        """Take in new calls of a rank."""
        for call in calls:
            members = call.group.members
            if call.what.is_message or len(members) < 2:
                continue
            key = (call.group, call.what.channel, call.sequence)
            there = self._open.setdefault(key, {})
            there[rank] = call
            if len(there) == len(members):
                self._take(self._open.pop(key))
        while len(self._open) > _KEPT:
            del self._open[next(iter(self._open))]

    def _take(self, there: dict[int, Call]) -> None:
        last = max(there, key=lambda rank: there[rank].entered)
        lag = there[last].entered - statistics.median([call.entered for rank, call in there.items() if rank != last])
        lags = self._lags.setdefault(last, [])
        if lag > max(lags, default=0.0):
            self._places[last] = there[last]
        lags.append(lag)
        self._times.append(there[last].entered)

    def findings(self, data_s: Mapping[int, float], now: float, crowding: Crowding | None = None) -> list[str]:
        """Return who is slow, as a sentence, once a window is over; `data_s` is how long ranks have waited for data.

        `now` is in seconds, by any clock. `crowding` is how short of cores the ranks are now: one that is late because
        others had its core is not slow, and every rank takes its turn at that.
        """
        crowding = crowding or Crowding()
        if not self._data:
            self._data, self._crowding, self._looked_at = data_s, crowding, now
        span_s = max(self._times) - min(self._times) if self._times else 0.0
        if span_s < self._window_s or len(self._times) < _FEWEST:
            return []
        late = {rank: _usual_sum(lags) / span_s for rank, lags in self._lags.items()}
        slow = {rank for rank, share in late.items() if share >= _SHARE and share >= _OWN * sum(late.values())}
        slow -= {rank for rank in slow if self._lacks_cores(rank, late[rank] * span_s, data_s, now, crowding)}
        self._slow = {rank: self._slow.get(rank, 0) + 1 for rank in slow}
        found = [
            self._describe(rank, late[rank], data_s, now)
            for rank, times in self._slow.items()
            if times == self._windows
        ]
        self._begin()
        self._data, self._crowding, self._looked_at = data_s, crowding, now
        return found

    def _lacks_cores(
        self, rank: int, lag_s: float, data_s: Mapping[int, float], now: float, crowding: Crowding
    ) -> bool:
        by_data = self._waits_for_data(rank, lag_s / max(now - self._looked_at, lag_s), data_s, now)
        return crowding.explains(self._crowding, rank, lag_s, by_data=by_data)

    def _waits_for_data(self, rank: int, share: float, data_s: Mapping[int, float], now: float) -> bool:
        """Whether a rank is late for that share of the time because it waits longer for batches than others."""
        waited = {other: data_s[other] - self._data.get(other, 0.0) for other in data_s}
        usual = statistics.median([seconds for other, seconds in waited.items() if other != rank] or [0.0])
        return waited.get(rank, 0.0) - usual > share / 2 * (now - self._looked_at)

    def _describe(self, rank: int, share: float, data_s: Mapping[int, float], now: float) -> str:
        by_data = self._waits_for_data(rank, share, data_s, now)
        why = "it waits longer for data" if by_data else "it computes longer"
        call, lag_s = self._places[rank], _usual(self._lags[rank])
        where = f" at {short(call.site)}" if call.site else ""
        return (
            f"rank {rank} is slow: the others wait for it {share:.0%} of the time, most in"
            f" {call.what.name}{where} ({lag_s * 1e3:.1f} ms each time): {why}"
        )


def _usual(lags: list[float]) -> float:
    """Return the longest lag that is not a single one; most calls of a slow rank's step have none at all."""
    return sorted(lags)[-1 - _SINGLE] if len(lags) > _SINGLE else 0.0


def _usual_sum(lags: list[float]) -> float:
    """Sum lags of which single long ones count as much as the usual."""
    most = _usual(lags)
    return sum(min(lag, most) for lag in lags)


# Cores that too many want: how long ranks were ready to run and did not, from the kernel's own counters.


_EXPLAINS = 0.5
"""Part of the lag of a rank that lack of cores must cover, for the rank not to be blamed."""
_CROWDED = 1.5
"""Threads that want to run for each core, from which on data loading is slow everywhere."""
_STEAL = 8
"""Place of the stolen time in the first line of /proc/stat."""


@dataclass(frozen=True, kw_only=True)
class Crowding:
    """The cores of this machine at one moment; times count from the start of the machine or the rank."""

    queued_s: Mapping[int, float] = field(default_factory=dict)
    """By rank, seconds that its main thread was ready and waited for a core."""
    stolen_s: float = 0.0
    """Seconds that the host of this virtual machine took from a core, on average over the cores."""
    runnable_per_core: float = 0.0
    """Threads that run or want to, for each core."""

    def explains(self, before: Crowding, rank: int, lag_s: float, *, by_data: bool) -> bool:
        """Whether lack of cores since `before` is why `rank` was late by `lag_s` in all.

        `by_data` if it was late because it waited for data, which other processes load.
        """
        queued_s = self.queued_s.get(rank, 0.0) - before.queued_s.get(rank, 0.0)
        stolen_s = self.stolen_s - before.stolen_s
        if by_data and min(self.runnable_per_core, before.runnable_per_core) >= _CROWDED:
            return True
        return queued_s + stolen_s >= _EXPLAINS * lag_s


def look_at_cores(pids: Mapping[int, int]) -> Crowding:
    """Return how crowded the cores are, for these processes by rank; zeros where the kernel does not report it."""
    return Crowding(
        queued_s={rank: _queued_s(pid) for rank, pid in pids.items()},
        stolen_s=_stolen_s(),
        runnable_per_core=_runnable() / (os.cpu_count() or 1),
    )


def _queued_s(pid: int) -> float:
    fields = _read(f"/proc/{pid}/schedstat").split()
    return int(fields[1]) / 1e9 if len(fields) > 1 else 0.0


def _stolen_s() -> float:
    fields = _read("/proc/stat").partition("\n")[0].split()
    ticks = int(fields[_STEAL]) if len(fields) > _STEAL else 0
    return ticks / os.sysconf("SC_CLK_TCK") / (os.cpu_count() or 1)


def _runnable() -> int:
    """Return the threads that run now or want to, without the one that asks."""
    fields = _read("/proc/loadavg").split()
    return max(0, int(fields[3].partition("/")[0]) - 1) if len(fields) > 3 else 0


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
