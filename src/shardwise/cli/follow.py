"""Following a run from the launcher: progress of rank 0, copied output of ranks, and the last lines of a training."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

import msgspec

from shardwise.cli.sinks import Mirrors
from shardwise.runs import Tail
from shardwise.runs.console import say
from shardwise.runs.progress import ProgressView
from shardwise.runs.state import RunState

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardwise.launcher.options import Shown
    from shardwise.monitor.sinks import SinkSpec
    from shardwise.runs import RunDirectory


class Follower:
    """An observer of the launcher; it alone owns the terminal, so output and bar never mix."""

    def __init__(self, run: RunDirectory) -> None:
        self._view = ProgressView.on_stderr()
        self._state = RunState(run, listener=self._show)
        self._outputs = (Tail(run.stdout(0)), Tail(run.stderr(0)))

    def tick(self) -> None:
        """Show what is new."""
        for output in self._outputs:
            for line in output.lines():
                self._view.line(line.decode(errors="replace"))
        while self._state.refresh_events():
            pass

    def _show(self, writer: str, event: dict[str, Any]) -> None:
        if writer == "rank0":
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


# Copying what ranks write to the launcher's own output, from the files they write to.


@dataclass(frozen=True)
class _Copy:
    tail: Tail
    stream: IO[bytes]
    prefix: bytes


class Tee:
    """An observer of the launcher: no pipe stands between a rank and its file, so nothing is lost or blocked."""

    def __init__(self, run: RunDirectory, shown: list[tuple[Shown, Shown]]) -> None:
        """Copy the output of ranks 0 to N-1, which is right on one machine."""
        self._run = run
        self._shown = shown
        self._known: dict[tuple[int, int], _Copy] = {}
        self._copies: list[_Copy] = []
        self.ranks: set[int] = set()
        """Those whose standard error has been shown here."""
        self.follow(range(len(shown)))

    def follow(self, ranks: range) -> None:
        """Copy the output of these ranks from now on; what was copied of them before is not copied again."""
        self.ranks.update(
            rank for rank, (_, error) in zip(ranks, self._shown, strict=True) if error.copied or error.terminal
        )
        self._copies = []
        for rank, views in zip(ranks, self._shown, strict=True):
            for stream, view in enumerate(views):
                if view.copied and not view.terminal:
                    copy = self._known.setdefault((rank, stream), self._copy(rank, stream, view))
                    self._copies.append(copy)

    def _copy(self, rank: int, stream: int, view: Shown) -> _Copy:
        tail = Tail((self._run.stdout, self._run.stderr)[stream](rank))
        tail.read()  # what an earlier start of this run has written was shown then
        return _Copy(
            tail, (sys.stdout, sys.stderr)[stream].buffer, f"[rank{rank}]: ".encode() if view.prefixed else b""
        )

    def tick(self) -> None:
        """Copy what is new: as it is, or line by line behind the rank."""
        for copy in self._copies:
            if copy.prefix:
                new = b"".join(copy.prefix + line + b"\n" for line in copy.tail.lines())
            else:
                new = copy.tail.read()
            if new:
                with contextlib.suppress(OSError):  # a terminal that was closed: the files still have it all
                    copy.stream.write(new)
                    copy.stream.flush()


# The last lines of a training: what came out, how long it took, where to look.


def summarise(run: RunDirectory) -> None:
    """Say the result of a finished run."""
    result = msgspec.json.decode(run.report_json.read_bytes())["result"]
    for name, value in result["evaluation"].items():
        shown = "nan"
        if value is not None:
            shown = f"{value:.2%}" if "accuracy" in name else f"{value:.4f}"
        say(f"test {name:<10} {shown}")
    first_step = result["first_step"]
    resumed = f", resumed at step {first_step}" if first_step else ""
    say(f"training time   {result['training_s']:.1f} s for {result['steps'] - first_step} steps{resumed}")
    say(f"weights         {run.weights}")
    if run.adapter.is_dir():
        say(f"adapter         {run.adapter}")
    say(f"run directory   {run.path}")
