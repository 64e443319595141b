"""Curves of any length in little memory: the lowest, the highest and the mean of equal ranges of steps."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

LIMIT = 2048
"""Ranges that a curve may have: about as many as a screen has columns. Twice as wide ones follow when it is full."""
RECENT = 1 << 16
"""Values that are kept as they are, so that a restart can take steps back exactly."""

Row = tuple[int, float | None, float | None, float | None]
"""First step of a range, and the lowest, the highest and the mean value in it; None where no number is."""


@dataclass(slots=True)
class _Range:
    number: int
    low: float = math.inf
    high: float = -math.inf
    total: float = 0.0
    count: int = 0

    def add(self, low: float, high: float, total: float, count: int) -> None:
        self.low, self.high = min(self.low, low), max(self.high, high)
        self.total, self.count = self.total + total, self.count + count


class Curve:
    """Values over steps, which only grow except by `cut`; a spike of one step stays visible however wide the ranges.

    Whoever follows it keeps `generation` and the number of rows: while the generation is the same, rows only follow
    rows, and only the last of them may have changed.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self.generation = 0
        self.width = 1
        """Steps in a range."""
        self._limit = limit
        self._ranges: list[_Range] = []
        self._recent: deque[tuple[int, float]] = deque(maxlen=RECENT)

    def __len__(self) -> int:
        return len(self._ranges)

    def add(self, step: int, value: float) -> None:
        """Take the value of a step, which is not lower than the last; one that is no number leaves a gap."""
        self._recent.append((step, value))
        self._put(step // self.width, value)
        while len(self._ranges) > self._limit:
            self._widen()

    def cut(self, step: int) -> None:
        """Forget this step and all after it: they are done again."""
        if not self._ranges or step >= (self._ranges[-1].number + 1) * self.width:
            return
        self.generation += 1
        while self._recent and self._recent[-1][0] >= step:
            self._recent.pop()
        cut = step // self.width
        while self._ranges and self._ranges[-1].number > cut:
            self._ranges.pop()
        if self._ranges and self._ranges[-1].number == cut:
            known = [value for at, value in self._recent if at // self.width == cut]
            if known or step % self.width == 0:  # else its values are long gone, and the range stays as it was
                self._ranges.pop()
            for value in known:
                self._put(cut, value)

    def rows(self, start: int = 0) -> list[Row]:
        """Return the ranges from number `start` on, in order of steps."""
        return [_row(found, self.width) for found in self._ranges[start:]]

    def _put(self, number: int, value: float) -> None:
        if not self._ranges or self._ranges[-1].number != number:
            self._ranges.append(_Range(number))
        if math.isfinite(value):
            self._ranges[-1].add(value, value, value, 1)

    def _widen(self) -> None:
        """Make ranges of two: half as many, or not fewer where steps lie far apart."""
        self.generation += 1
        self.width *= 2
        narrow, self._ranges = self._ranges, []
        for old in narrow:
            if not self._ranges or self._ranges[-1].number != old.number // 2:
                self._ranges.append(_Range(old.number // 2))
            self._ranges[-1].add(old.low, old.high, old.total, old.count)


def _row(found: _Range, width: int) -> Row:
    if not found.count:
        return (found.number * width, None, None, None)
    low, high, mean = (float(f"{value:.6g}") for value in (found.low, found.high, found.total / found.count))
    return (found.number * width, low, high, mean)
