"""Phase marks: every Step and the loop say what begins; listeners make records, times or a profiler's ranges of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardwise.environment import profiler

Mark = Callable[[str, int], None]
"""Is told (phase, step): the phase, one of `run.recorder.PHASES`, begins now, and the one before ends."""

_RANGES = {
    "data": "data",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "publish": "publish",
    "evaluate": "evaluate",
    "save": "checkpoint",
}


def nobody(phase: str, step: int) -> None:
    """Listen to no mark; a call costs 0.04 us."""


def tell(*listeners: Mark | None) -> Mark:
    """Return a mark that all listeners hear, in order; None is no listener."""
    hearing = [listener for listener in listeners if listener is not None]
    if len(hearing) <= 1:
        return hearing[0] if hearing else nobody

    def mark(phase: str, step: int) -> None:
        for listener in hearing:
            listener(phase, step)

    return mark


class Ranges:
    """A listener that keeps one range of a profiler open, named after the phase at work; saving is "checkpoint"."""

    def __init__(self, begin: Callable[[str], Any], end: Callable[[Any], object]) -> None:
        """`begin(name)` opens a range and returns what `end` closes it by."""
        self._begin = begin
        self._end = end
        self._open: Any = None

    def __call__(self, phase: str, step: int) -> None:  # noqa: ARG002 - a profiler adds up ranges of one name
        """Close the range before, and open this phase's if it has one."""
        self.close()
        if phase in _RANGES:
            self._open = self._begin(_RANGES[phase])

    def close(self) -> None:
        """Close the range that is open."""
        if self._open is not None:
            self._end(self._open)
            self._open = None


def nvtx_ranges() -> Ranges | None:
    """Return NVTX ranges where nsys or another such profiler is attached to this process, else None."""
    if not profiler():
        return None
    nvtx = torch.cuda.nvtx
    try:
        nvtx.mark("shardwise")
    except RuntimeError:
        return None  # torch was built without CUDA, and so without NVTX
    # Not range_push: that one belongs to a thread, and autograd starts the kernels of backward from its own.
    return Ranges(nvtx.range_start, nvtx.range_end)
