"""Following a run from the launcher: rank 0's events as progress, its output above it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.run import Tail
from shardwise.run.progress import ProgressView

if TYPE_CHECKING:
    from shardwise.run import RunDirectory


class Follower:
    """An observer of the launcher; it alone owns the terminal, so output and bar never mix."""

    def __init__(self, run: RunDirectory) -> None:
        self._view = ProgressView.on_stderr()
        self._events = Tail(run.events(0))
        self._outputs = (Tail(run.stdout(0)), Tail(run.stderr(0)))

    def tick(self) -> None:
        """Show what is new."""
        for output in self._outputs:
            for line in output.lines():
                self._view.line(line.decode(errors="replace"))
        for event in self._events.events():
            self._view.show(event)

    def close(self) -> None:
        """Leave the terminal as it should be."""
        self._view.close()
