"""The time that steps wait for data: when it is worth a note, and what to change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from shardwise.runs import EventLog

NOTED_SHARE = 0.05
"""Share of the time from which a note is written: below it, faster data would hardly be noticed."""
NOTED_STEPS = 20
"""Steps after which a share is stable enough for a note."""


@dataclass(frozen=True, kw_only=True)
class DataWait:
    """How long some steps took, and how much of it they waited for their batches."""

    steps: int = 0
    seconds: float = 0.0
    waited_s: float = 0.0

    def __add__(self, other: DataWait) -> DataWait:
        return DataWait(
            steps=self.steps + other.steps,
            seconds=self.seconds + other.seconds,
            waited_s=self.waited_s + other.waited_s,
        )

    @property
    def share(self) -> float:
        """Fraction of the time."""
        return self.waited_s / self.seconds if self.seconds else 0.0

    @property
    def is_notable(self) -> bool:
        """Whether the share is large, and the number of steps sufficient to say so."""
        return self.steps >= NOTED_STEPS and self.share > NOTED_SHARE

    @property
    def text(self) -> str:
        """The share and the milliseconds of a step."""
        waited_ms, step_ms = (value * 1e3 / max(self.steps, 1) for value in (self.waited_s, self.seconds))
        return f"steps wait for data {self.share:.0%} of the time ({waited_ms:,.1f} of {step_ms:,.1f} ms per step)"


class Waiting(Protocol):
    """A feed that counts the seconds in which steps waited for it."""

    waited_s: float


class DataWaits:
    """Adds up the waits of a training, and writes one note when they are notable."""

    def __init__(self, feed: Waiting, num_workers: int) -> None:
        self._feed, self._num_workers = feed, num_workers
        self._waited_s = 0.0
        self._total = DataWait()
        self._is_noted = False

    def next(self, steps: int, seconds: float) -> DataWait:
        """Return the wait since the last call, in which there were `steps`."""
        before, self._waited_s = self._waited_s, self._feed.waited_s
        return DataWait(steps=steps, seconds=seconds, waited_s=self._waited_s - before)

    def note(self, wait: DataWait, events: EventLog) -> None:
        """Write the note if it is due; leave out the first steps, which start loader workers and compile."""
        self._total += wait
        if self._total.is_notable and not self._is_noted:
            events.write("note", text=f"{self._total.text}: {faster_data(self._num_workers)}")
            self._is_noted = True


def faster_data(num_workers: int | None) -> str:
    """Return how to shorten the waits; `num_workers` is that of the job, None if it is unknown."""
    stored = "read prepared tokens (shardwise data prepare), or move the data to faster storage"
    if num_workers:
        return f"raise num_workers of the job, now {num_workers}; {stored}"
    return f"set num_workers of the job, so that other processes read ahead; {stored}"
