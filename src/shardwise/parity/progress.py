"""Detects hangs of the ranks of a plan: a rank without progress for too long writes its location and exits.

The limit is derived from the longest measured pause between two progress marks of training in one process. Ranks share
the processors and wait for each other; a pause that is ten times longer than this explains is a hang. Compilers and
some engines pause while they build, and in the first step of each kind (full, partial, evaluation), so the limit is
longer there. Afterwards a rank may pause twice as long as its own longest pause, because recompilation takes no longer
than the first compilation. Time in which a rank was runnable but had no core, or which the hypervisor used, is not
counted: ranks that wait for a starved rank do not hang. A rank that hangs is not runnable.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec

from shardwise.diagnosis.guard.straggler import CoreLoad, read_core_load
from shardwise.engines.engine import engine_named
from shardwise.errors import RankFailedError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import FrameType

    from shardwise.plans import Plan

LEAST_S = 15.0
"""Shortest limit of a pause in seconds, because machines may stall for seconds."""
_TIMES, _TIMES_OWN = 10, 2
"""Limit of a pause as a multiple of the longest pause of one process, and of the longest pause of the rank."""
_GRACE_S = 1.0
"""Seconds between the report of a hanging rank and its exit, in which the other ranks write their locations."""
_EXIT_CODE = 70
SAVE_S = 60.0
"""Longest pause during a save in seconds; a rank waits for the previous checkpoint and for disks."""


class Stuck(msgspec.Struct, frozen=True, kw_only=True):
    """The location of a rank that makes no progress."""

    rank: int
    place: str
    """FILE:LINE and function of the innermost frame outside torch and Python."""
    inside: str
    """Function of torch that this line called, such as a collective; empty if it called none."""
    pause_s: float
    """Time without progress in seconds."""

    def __str__(self) -> str:
        return f"rank {self.rank} is at {self.place}" + (f" in {self.inside}" if self.inside else "")


class StuckError(RankFailedError):
    """Raised if ranks make no progress for longer than the limit."""

    stuck: tuple[Stuck, ...] = ()

    @classmethod
    def of(cls, stuck: tuple[Stuck, ...], label: str = "") -> StuckError:
        """Return the error with the location of each rank; `label` is the name of the run, such as a segment."""
        places = "; ".join(map(str, stuck))
        longest_s = max(each.pause_s for each in stuck)
        run = f"{label}: " if label else ""
        error = cls(f"{run}ranks made no progress for {longest_s:.0f} s: {places}", code="verify.no-progress")
        error.stuck = stuck
        return error


class PauseLimit(msgspec.Struct, frozen=True, kw_only=True):
    """The longest pause that a rank of a plan may take."""

    usual_s: float
    first_s: float | None = None
    """Limit while the rank builds the step and in its first step of each kind; None if `usual_s` applies there too."""

    def at(self, pulse: Pulse) -> float:
        """Return the limit of the current pause of a rank, in seconds."""
        if pulse.kind == "save":
            return max(self.usual_s, SAVE_S)
        if self.first_s is None:
            return self.usual_s
        if pulse.is_first:
            return self.first_s
        return min(self.first_s, max(self.usual_s, _TIMES_OWN * pulse.longest_s))


def pause_limit(plan: Plan, longest_s: float, timeout_s: float) -> PauseLimit:
    """Return the pause limit of the ranks of `plan`; `longest_s` is the longest pause of one process."""
    ranks_per_core = max(1.0, plan.layout.world_size / (os.cpu_count() or 1))
    usual_s = min(timeout_s, max(LEAST_S, _TIMES * longest_s * ranks_per_core))
    builds_more = plan.compile != "none" or engine_named(plan.engine).is_slow_to_start
    return PauseLimit(usual_s=usual_s, first_s=timeout_s if builds_more else None)


class Pulse:
    """Records when this rank makes progress."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self.kind: int | str = ""
        """The kind of the current work; empty while the rank builds the step."""
        self.is_first = True
        """Whether the rank builds the step, or performs the current kind of work for the first time."""
        self._kinds: set[int | str] = set()
        self._last = time.monotonic()
        self._starved_s = 0.0

    @property
    def pause_s(self) -> float:
        """Seconds since the last progress mark, without time in which a rank of the plan had no core."""
        return max(0.0, time.monotonic() - self._last - self._starved_s)

    def beat(self) -> None:
        """Record progress."""
        self.longest_s = max(self.longest_s, self.pause_s)
        self._last = time.monotonic()
        self._starved_s = 0.0

    def starve(self, seconds: float) -> None:
        """Record seconds of this pause in which a rank of the plan had no core."""
        self._starved_s += seconds

    def begin(self, kind: int | str) -> None:
        """Record progress and the kind of the work that starts."""
        self.beat()
        self.kind = kind
        self.is_first = kind not in self._kinds
        self._kinds.add(kind)

    def end(self) -> None:
        """Record progress and mark the current kind of work as complete."""
        self.beat()
        self.is_first = False


@contextmanager
def watched(pulse: Pulse, limit: PauseLimit, rank: int, folder: Path) -> Iterator[None]:
    """Write the location of this process and exit if it makes no progress for longer than the limit."""
    over = threading.Event()
    main = threading.get_ident()
    (folder / f"rank-{rank}-{os.getpid()}").touch()

    def watch() -> None:
        cores = _Cores(folder)
        while not over.wait(min(1.0, limit.usual_s / 10)):
            pulse.starve(cores.lacked_s())
            pause_s = pulse.pause_s
            if pause_s > limit.at(pulse):
                frame = sys._current_frames()[main]  # noqa: SLF001 - the only way to inspect another thread
                stuck = _find_place(rank, frame, pause_s)
                (folder / f"stuck-{rank}.json").write_bytes(msgspec.json.encode(stuck))
                time.sleep(_GRACE_S)
                os._exit(_EXIT_CODE)

    threading.Thread(target=watch, name="shardwise-pulse", daemon=True).start()
    try:
        yield
    finally:
        over.set()


class _Cores:
    """Measures how long the ranks whose process ids are in a folder wait for a core."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._before = self._read()
        self._read_at = time.monotonic()

    def lacked_s(self) -> float:
        """Return how long, since the last call, a rank was runnable but had no core; the maximum over ranks."""
        now, at = self._read(), time.monotonic()
        before, passed_s = self._before, at - self._read_at
        self._before, self._read_at = now, at
        queued_s = [seconds - before.queued_s.get(rank, seconds) for rank, seconds in now.queued_s.items()]
        return min(passed_s, max(queued_s, default=0.0) + now.stolen_s - before.stolen_s)

    def _read(self) -> CoreLoad:
        names = [file.name.split("-") for file in self._folder.glob("rank-*")]
        return read_core_load({int(rank): int(pid) for _, rank, pid in names})


def read_stuck(folder: Path) -> tuple[Stuck, ...]:
    """Return the locations that ranks without progress wrote into `folder`."""
    files = sorted(folder.glob("stuck-*.json"))
    return tuple(msgspec.json.decode(file.read_bytes(), type=Stuck) for file in files)


def _find_place(rank: int, frame: FrameType | None, pause_s: float) -> Stuck:
    inside = ""
    while frame is not None and _is_foreign(frame.f_code.co_filename):
        if "/torch/" in frame.f_code.co_filename and not frame.f_code.co_name.startswith("_"):
            inside = frame.f_code.co_name
        frame = frame.f_back
    if frame is None:
        return Stuck(rank=rank, place="an unknown location", inside=inside, pause_s=pause_s)
    place = f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"
    return Stuck(rank=rank, place=place, inside=inside, pause_s=pause_s)


def _is_foreign(path: str) -> bool:
    return "site-packages" in path or path.startswith((sys.base_prefix, "<"))
