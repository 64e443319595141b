"""Stragglers: the rank that arrives last at collectives, unless oversubscribed CPU cores explain its lag."""

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


_MIN_CALLS = 10
_MIN_SHARE, _MIN_SHARE_OF_LAG = 0.2, 0.7
"""Minimum share of the time that other ranks wait for a slow rank, and minimum share of all waiting that it causes."""
_OUTLIERS = 3
"""Number of longest lags per window that are ignored, such as a first batch, a checkpoint or an evaluation."""
_MAX_OPEN = 2048


class Skew:
    """Compares the times at which ranks enter the same collective, and reports each straggler once."""

    def __init__(self, *, window_s: float, windows: int = 1) -> None:
        """Measure over windows of `window_s` seconds; a rank must be slow in `windows` consecutive windows."""
        self._window_s, self._windows = window_s, windows
        self._open: dict[tuple[GroupKey, str, int], dict[int, Call]] = {}
        self._slow: dict[int, int] = {}
        """Number of consecutive windows in which each rank was slow."""
        self._data: Mapping[int, float] = {}
        self._core_load = CoreLoad()
        self._window_start = 0.0
        self._reset()

    def _reset(self) -> None:
        self._lags: dict[int, list[float]] = {}
        """Lag of each rank in the collectives that it entered last."""
        self._places: dict[int, Call] = {}
        self._times: list[float] = []

    def feed(self, rank: int, calls: Iterable[Call]) -> None:
        """Add new calls of a rank."""
        for call in calls:
            members = call.group.members
            if call.what.is_message or len(members) < 2:
                continue
            key = (call.group, call.what.channel, call.sequence)
            by_rank = self._open.setdefault(key, {})
            by_rank[rank] = call
            if len(by_rank) == len(members):
                self._measure(self._open.pop(key))
        while len(self._open) > _MAX_OPEN:
            del self._open[next(iter(self._open))]

    def _measure(self, calls: dict[int, Call]) -> None:
        """Add the lag of the rank that entered a collective last."""
        *others, last = sorted(calls, key=lambda rank: calls[rank].entered)
        lag = calls[last].entered - statistics.median([calls[rank].entered for rank in others])
        lags = self._lags.setdefault(last, [])
        if lag > max(lags, default=0.0):
            self._places[last] = calls[last]
        lags.append(lag)
        self._times.append(calls[last].entered)

    def findings(self, data_s: Mapping[int, float], now: float, core_load: CoreLoad | None = None) -> list[str]:
        """Return a sentence for each slow rank at the end of a window.

        `data_s` is the total time that each rank has waited for data; `now` is in seconds of any clock. A rank that is
        late because other threads used its core, according to `core_load`, is not slow.
        """
        core_load = core_load or CoreLoad()
        if not self._data:
            self._data, self._core_load, self._window_start = data_s, core_load, now
        if len(self._times) < _MIN_CALLS:
            return []
        span_s = max(self._times) - min(self._times)
        if span_s < self._window_s:
            return []
        shares = {rank: _typical_sum(lags) / span_s for rank, lags in self._lags.items()}
        min_share = max(_MIN_SHARE, _MIN_SHARE_OF_LAG * sum(shares.values()))
        slow, found = {}, []
        for rank, share in shares.items():
            if share < min_share or self._lacks_cores(rank, share * span_s, data_s, now, core_load):
                continue
            slow[rank] = self._slow.get(rank, 0) + 1
            if slow[rank] == self._windows:
                found.append(self._describe(rank, share, data_s, now))
        self._slow = slow
        self._reset()
        self._data, self._core_load, self._window_start = data_s, core_load, now
        return found

    def _lacks_cores(
        self, rank: int, lag_s: float, data_s: Mapping[int, float], now: float, core_load: CoreLoad
    ) -> bool:
        by_data = self._waits_for_data(rank, lag_s / max(now - self._window_start, lag_s), data_s, now)
        return core_load.explains(self._core_load, rank, lag_s, by_data=by_data)

    def _waits_for_data(self, rank: int, share: float, data_s: Mapping[int, float], now: float) -> bool:
        """Return whether longer waits for data explain over half of a rank's lag, which is `share` of the time."""
        waited = {other: seconds - self._data.get(other, 0.0) for other, seconds in data_s.items()}
        own_s = waited.pop(rank, 0.0)
        median_s = statistics.median(waited.values()) if waited else 0.0
        return own_s - median_s > share / 2 * (now - self._window_start)

    def _describe(self, rank: int, share: float, data_s: Mapping[int, float], now: float) -> str:
        by_data = self._waits_for_data(rank, share, data_s, now)
        why = "it waits longer for data" if by_data else "it computes longer"
        call, lag_s = self._places[rank], _typical_max(self._lags[rank])
        where = call.what.name
        if call.site:
            where += f" at {short(call.site)}"
        return (
            f"rank {rank} is slow: other ranks wait for it {share:.0%} of the time, most in {where}"
            f" ({lag_s * 1e3:.1f} ms each time): {why}"
        )


def _typical_max(lags: list[float]) -> float:
    """Return the longest lag without outliers, not the median: most calls in a step of a slow rank have no lag."""
    return sorted(lags)[-1 - _OUTLIERS] if len(lags) > _OUTLIERS else 0.0


def _typical_sum(lags: list[float]) -> float:
    """Return the sum of lags, with outliers reduced to the longest typical lag."""
    longest = _typical_max(lags)
    return sum(min(lag, longest) for lag in lags)


# Oversubscribed CPU cores, from the kernel's counters of the time that threads were ready to run but not running.


_MIN_EXPLAINED = 0.5
"""A rank is not reported if missing CPU time explains at least this fraction of its lag."""
_OVERSUBSCRIBED = 1.5
"""Runnable threads per core above which data loading is slow on all ranks."""
_STEAL = 8
"""Index of the steal time in the first line of /proc/stat."""


@dataclass(frozen=True, kw_only=True)
class CoreLoad:
    """The load of this machine's CPU cores at one moment; times are totals since the machine or rank started."""

    queued_s: Mapping[int, float] = field(default_factory=dict)
    """Seconds that the main thread of each rank was ready and waited for a core."""
    stolen_s: float = 0.0
    """Seconds that the hypervisor took from this virtual machine, averaged over the cores."""
    runnable_per_core: float = 0.0
    """Running and runnable threads per core."""

    def explains(self, before: CoreLoad, rank: int, lag_s: float, *, by_data: bool) -> bool:
        """Return whether missing CPU time since `before` explains the total lag of `rank`.

        `by_data` is True if the rank was late because it waited for data, which other processes load.
        """
        queued_s = self.queued_s.get(rank, 0.0) - before.queued_s.get(rank, 0.0)
        stolen_s = self.stolen_s - before.stolen_s
        if by_data and min(self.runnable_per_core, before.runnable_per_core) >= _OVERSUBSCRIBED:
            return True
        return queued_s + stolen_s >= _MIN_EXPLAINED * lag_s


def read_core_load(pids: Mapping[int, int]) -> CoreLoad:
    """Return the load of the CPU cores, given the process id of each rank; zeros if the kernel does not report it."""
    return CoreLoad(
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
    """Return the number of running and runnable threads, excluding the calling thread."""
    fields = _read("/proc/loadavg").split()
    return max(0, int(fields[3].partition("/")[0]) - 1) if len(fields) > 3 else 0


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
