"""Progress of the ranks of one plan: a rank without any for long writes where it stands, and the plan ends.

The limit comes from one process, whose longest pause between two moments of training was measured. Ranks share the
processors and wait for each other, but a pause ten times what that explains is a hang, not slowness.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec

from shardwise.errors import RankFailedError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import FrameType

    from shardwise.plan import Plan

LEAST_S = 15.0
"""A limit never ends a pause shorter than this: machines stand still for seconds."""
_TIMES = 10
_GRACE_S = 1.0
"""From the first rank that is stuck to the end: the others write where they stand as well."""
_EXIT_CODE = 70


class Stuck(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rank stood that made no progress."""

    rank: int
    place: str
    """FILE:LINE and function of the innermost frame that is not torch's or Python's."""
    inside: str
    """Function of torch that this line called, a collective for example; empty when it called none."""

    def __str__(self) -> str:
        return f"rank {self.rank} is at {self.place}" + (f" in {self.inside}" if self.inside else "")


class StuckError(RankFailedError):
    """No rank made progress for longer than a limit that one process gave."""

    stuck: tuple[Stuck, ...] = ()

    @classmethod
    def of(cls, limit_s: float, stuck: tuple[Stuck, ...]) -> StuckError:
        """Name the place of each rank."""
        places = "; ".join(map(str, stuck))
        error = cls(f"no progress for {limit_s:.0f} s: {places}", code="verify.no-progress")
        error.stuck = stuck
        return error


def pause_limit_s(plan: Plan, longest_s: float, timeout_s: float) -> float:
    """Return the longest pause a rank of `plan` may make; compilers and DeepSpeed pause where one process does not."""
    if plan.compile != "none" or plan.engine != "torch":
        return timeout_s
    ranks_per_core = max(1.0, plan.layout.world_size / (os.cpu_count() or 1))
    return min(timeout_s, max(LEAST_S, _TIMES * longest_s * ranks_per_core))


class Pulse:
    """Notes the moments at which this rank makes progress."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._last = time.monotonic()

    @property
    def pause_s(self) -> float:
        """Seconds since the last moment."""
        return time.monotonic() - self._last

    def beat(self) -> None:
        """Note progress."""
        self.longest_s = max(self.longest_s, self.pause_s)
        self._last = time.monotonic()


@contextmanager
def watched(pulse: Pulse, limit_s: float, rank: int, folder: Path) -> Iterator[None]:
    """End this process when it makes no progress for longer than the limit, after it wrote where it stands."""
    over = threading.Event()
    main = threading.get_ident()

    def watch() -> None:
        while not over.wait(min(1.0, limit_s / 10)):
            if pulse.pause_s > limit_s:
                stuck = _stand(rank, sys._current_frames()[main])  # noqa: SLF001 - Python's only way to another thread
                (folder / f"stuck-{rank}.json").write_bytes(msgspec.json.encode(stuck))
                time.sleep(_GRACE_S)
                os._exit(_EXIT_CODE)

    threading.Thread(target=watch, name="shardwise-pulse", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def read_stuck(folder: Path) -> tuple[Stuck, ...]:
    """Return where the ranks stood that made no progress."""
    files = sorted(folder.glob("stuck-*.json"))
    return tuple(msgspec.json.decode(file.read_bytes(), type=Stuck) for file in files)


def _stand(rank: int, frame: FrameType | None) -> Stuck:
    inside = ""
    while frame is not None and _is_foreign(frame.f_code.co_filename):
        if "/torch/" in frame.f_code.co_filename and not frame.f_code.co_name.startswith("_"):
            inside = frame.f_code.co_name
        frame = frame.f_back
    if frame is None:
        return Stuck(rank=rank, place="an unknown place", inside=inside)
    place = f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"
    return Stuck(rank=rank, place=place, inside=inside)


def _is_foreign(path: str) -> bool:
    return "site-packages" in path or path.startswith((sys.base_prefix, "<"))
