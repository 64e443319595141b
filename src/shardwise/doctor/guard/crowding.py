"""Cores that too many want: how long ranks were ready to run and did not, from the kernel's own counters."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

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
    """Return how crowded the cores are, for these processes by rank; zeros where the kernel does not tell."""
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
