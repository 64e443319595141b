"""Progress of the ranks of one plan: a rank without any for long writes where it is, and the plan ends.

The limit comes from one process, whose longest pause between two moments of training was measured. Ranks share
the processors and wait for each other, but a pause ten times what that explains is a hang, not slowness.
Compilers and other engines pause where one process does not: while they build, and in the first step of each kind
(full, short, evaluation). There the limit is long. Afterwards a rank may pause twice as long as it did itself,
since to compile a graph again takes no longer than the first time.
Time in which some rank was ready to run and got no core, or which the host of a virtual machine took, is not part of
a pause: ranks that wait for a starved one are not stuck. A rank that hangs is not ready to run.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec

from shardwise.diagnosis.guard.straggler import Crowding, look_at_cores
from shardwise.engines.engine import engine_named
from shardwise.errors import RankFailedError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import FrameType

    from shardwise.plans import Plan

LEAST_S = 15.0
"""A limit never ends a pause shorter than this: machines stall for seconds."""
_TIMES, _TIMES_OWN = 10, 2
"""How many times longer than the longest pause of one process a pause may be, and than the longest of the rank."""
_GRACE_S = 1.0
"""From the first rank that is stuck to the end: the others write where they are as well."""
_EXIT_CODE = 70


class Stuck(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rank without progress was."""

    rank: int
    place: str
    """FILE:LINE and function of the innermost frame that is not torch's or Python's."""
    inside: str
    """Function of torch that this line called, a collective for example; empty when it called none."""
    pause_s: float
    """How long it had made no progress."""

    def __str__(self) -> str:
        return f"rank {self.rank} is at {self.place}" + (f" in {self.inside}" if self.inside else "")


class StuckError(RankFailedError):
    """No rank made progress for longer than a limit that one process gave."""

    stuck: tuple[Stuck, ...] = ()

    @classmethod
    def of(cls, stuck: tuple[Stuck, ...]) -> StuckError:
        """Name the place of each rank."""
        places = "; ".join(map(str, stuck))
        longest_s = max(each.pause_s for each in stuck)
        error = cls(f"no progress for {longest_s:.0f} s: {places}", code="verify.no-progress")
        error.stuck = stuck
        return error


class PauseLimit(msgspec.Struct, frozen=True, kw_only=True):
    """The longest pause that a rank of one plan may make."""

    usual_s: float
    first_s: float | None = None
    """While the rank builds, and in its first step of each kind; None where those take no longer than others."""

    def at(self, pulse: Pulse) -> float:
        """Return the limit of the pause that a rank makes now."""
        if self.first_s is None:
            return self.usual_s
        if pulse.is_first:
            return self.first_s
        return min(self.first_s, max(self.usual_s, _TIMES_OWN * pulse.longest_s))


def pause_limit(plan: Plan, longest_s: float, timeout_s: float) -> PauseLimit:
    """Return the limit for ranks of `plan`, where `longest_s` is the longest pause of one process."""
    ranks_per_core = max(1.0, plan.layout.world_size / (os.cpu_count() or 1))
    usual_s = min(timeout_s, max(LEAST_S, _TIMES * longest_s * ranks_per_core))
    builds_more = plan.compile != "none" or engine_named(plan.engine).is_slow_to_start
    return PauseLimit(usual_s=usual_s, first_s=timeout_s if builds_more else None)


class Pulse:
    """Notes the moments at which this rank makes progress."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self.is_first = True
        """Whether the rank still builds, or does something of a kind that it has not done before."""
        self._kinds: set[int | str] = set()
        self._last = time.monotonic()
        self._starved_s = 0.0

    @property
    def pause_s(self) -> float:
        """Seconds since the last moment, without those in which a rank of the plan got no core."""
        return max(0.0, time.monotonic() - self._last - self._starved_s)

    def beat(self) -> None:
        """Note progress."""
        self.longest_s = max(self.longest_s, self.pause_s)
        self._last = time.monotonic()
        self._starved_s = 0.0

    def starve(self, seconds: float) -> None:
        """Note seconds of this pause in which a rank of the plan got no core."""
        self._starved_s += seconds

    def begin(self, kind: int | str) -> None:
        """Note progress, and of which kind the work is that begins now."""
        self.beat()
        self.is_first = kind not in self._kinds
        self._kinds.add(kind)

    def end(self) -> None:
        """Note progress, and that the work is done."""
        self.beat()
        self.is_first = False


@contextmanager
def watched(pulse: Pulse, limit: PauseLimit, rank: int, folder: Path) -> Iterator[None]:
    """End this process when it makes no progress for longer than the limit, after it wrote where it is."""
    over = threading.Event()
    main = threading.get_ident()
    (folder / f"rank-{rank}-{os.getpid()}").touch()

    def watch() -> None:
        cores = _Cores(folder)
        while not over.wait(min(1.0, limit.usual_s / 10)):
            pulse.starve(cores.lacked_s())
            pause_s = pulse.pause_s
            if pause_s > limit.at(pulse):
                frame = sys._current_frames()[main]  # noqa: SLF001 - Python's only way to another thread
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
    """Whether the ranks that left their process ids in a folder get the cores they want."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._before = self._look()
        self._looked_at = time.monotonic()

    def lacked_s(self) -> float:
        """Return the seconds since the last call in which the rank that waited longest got no core."""
        now, at = self._look(), time.monotonic()
        before, passed_s = self._before, at - self._looked_at
        self._before, self._looked_at = now, at
        queued_s = [seconds - before.queued_s.get(rank, seconds) for rank, seconds in now.queued_s.items()]
        return min(passed_s, max(queued_s, default=0.0) + now.stolen_s - before.stolen_s)

    def _look(self) -> Crowding:
        names = [file.name.split("-") for file in self._folder.glob("rank-*")]
        return look_at_cores({int(rank): int(pid) for _, rank, pid in names})


def read_stuck(folder: Path) -> tuple[Stuck, ...]:
    """Return where the ranks without progress were."""
    files = sorted(folder.glob("stuck-*.json"))
    return tuple(msgspec.json.decode(file.read_bytes(), type=Stuck) for file in files)


def _find_place(rank: int, frame: FrameType | None, pause_s: float) -> Stuck:
    inside = ""
    while frame is not None and _is_foreign(frame.f_code.co_filename):
        if "/torch/" in frame.f_code.co_filename and not frame.f_code.co_name.startswith("_"):
            inside = frame.f_code.co_name
        frame = frame.f_back
    if frame is None:
        return Stuck(rank=rank, place="an unknown place", inside=inside, pause_s=pause_s)
    place = f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"
    return Stuck(rank=rank, place=place, inside=inside, pause_s=pause_s)


def _is_foreign(path: str) -> bool:
    return "site-packages" in path or path.startswith((sys.base_prefix, "<"))
