"""The journal of a training: losses published once a second, what was skipped, and when losses stop being numbers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from shardwise.training.memory import peak_bytes
from shardwise.training.window import Window

if TYPE_CHECKING:
    from shardwise.dist import World
    from shardwise.runs import EventLog
    from shardwise.training.step.marks import Mark
    from shardwise.training.step.step import StepReport


class Journal:
    """Takes every step's report and writes events of many at once; on every rank alike."""

    def __init__(self, world: World, events: EventLog, mark: Mark) -> None:
        self.samples = 0
        self.skipped = 0
        self.loss = math.nan
        """Of the last step that was published."""
        self._window = Window()
        self._world = world
        self._events = events
        self._mark = mark
        self._has_warned = False
        self._is_stopping = False

    def add(self, report: StepReport, *, publish: bool, stop: bool) -> bool:
        """Take one report; return whether any rank was asked to stop. Communicates over the world when it publishes.

        It does so when asked, and by itself about once a second, at the same step on every rank; and in every step
        from a request to stop on, since the training leaves when replicas have met.
        """
        self.samples += report.samples
        if not self._window.add(report) and not publish and not self._is_stopping:
            return False
        self._mark("publish", report.number + 1)
        published = self._window.publish(self._world, stop=stop)
        self._is_stopping |= published.pop("stop")
        self._events.write("steps", **published, memory_bytes=peak_bytes(self._world.device))
        self.skipped += published["skipped"]
        self.loss = published["losses"][-1]
        self._warn(published)
        self._mark("data", report.number + 1)
        return self._is_stopping

    def restart_clock(self) -> None:
        """Leave the time since the last publication out: it was not spent on steps."""
        self._window.restart_clock()

    def _warn(self, published: dict[str, Any]) -> None:
        """Say once when losses stop being numbers."""
        for number, loss in enumerate(published["losses"], published["first"]):
            if not math.isfinite(loss) and not self._has_warned:
                self._events.write("note", text=f"the loss of step {number} is {loss}")
                self._has_warned = True
