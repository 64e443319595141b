"""Following a run from the launcher: rank 0's events as progress, its output above it, mirrors beside it."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from shardwise.cli.sinks import Mirrors
from shardwise.runs import Tail
from shardwise.runs.progress import ProgressView

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardwise.monitor.sinks import SinkSpec
    from shardwise.runs import RunDirectory


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

    def line(self, text: str) -> None:
        """Show a line of the launcher's own."""
        self._view.line(text)

    def close(self) -> None:
        """Leave the terminal as it should be."""
        self._view.close()


@contextlib.contextmanager
def following(run: RunDirectory, sinks: Sequence[SinkSpec]) -> Iterator[list[Follower]]:
    """Show the run and mirror it into `sinks` for the time of a launch; yields the launcher's observers."""
    mirrors = Mirrors(run, sinks)
    follower = Follower(run)
    try:
        yield [follower]
    finally:
        follower.close()
        mirrors.close()
