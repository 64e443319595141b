"""What watches ranks while they run: progress of rank 0, copied output, mirrors to trackers, guards."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from shardwise.diagnosis.guard.guard import Guard
from shardwise.diagnosis.guard.replicas import ReplicaWatch
from shardwise.runs import Tail
from shardwise.runs.console import echo_error
from shardwise.runs.progress import ProgressView
from shardwise.runs.state import RunState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from shardwise.diagnosis.guard.neighbours import Exchange
    from shardwise.launcher.options import Shown
    from shardwise.launcher.spec import HangSpec
    from shardwise.monitor.sinks import SinkSpec
    from shardwise.runs import RunDirectory
    from shardwise.runs.drift import ReplicaSpec


_MIRROR_WAIT_S = 10.0
"""For a mirror to copy the rest after the run: less than what batch systems leave after they ask for an end."""
_NICENESS = 10
"""Ranks go first where a machine has no core to spare."""


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


class Mirrors:
    """One process per sink that runs `shardwise watch RUN --sink SINK`; its log is in the run directory."""

    def __init__(self, run: RunDirectory, sinks: Sequence[SinkSpec]) -> None:
        self._run = run
        self._children = [(sink, *self._start(sink, number)) for number, sink in enumerate(sinks)]

    def _start(self, sink: SinkSpec, number: int) -> tuple[subprocess.Popen[bytes], Path]:
        self._run.sinks.mkdir(exist_ok=True)
        log = self._run.sinks / f"{sink.kind}-{number}.log"
        command = [sys.executable, "-m", "shardwise", "watch", str(self._run.path), "--sink", str(sink)]
        with log.open("ab") as file:
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
            )
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, child.pid, _NICENESS)
        return child, log

    def close(self) -> None:
        """Wait until the mirrors have the rest of a run that has ended; kill and report those that do not finish."""
        deadline = time.monotonic() + _MIRROR_WAIT_S
        for sink, child, log in self._children:
            again = f"shardwise watch {self._run.path} --sink {sink}"
            try:
                if child.wait(max(0.0, deadline - time.monotonic())) != 0:
                    output = log.read_text(errors="replace").strip().splitlines() or ["no output"]
                    echo_error(
                        f"shardwise: {sink} is not complete ({output[-1].removeprefix('shardwise: ')}); try {again}"
                    )
            except subprocess.TimeoutExpired:
                echo_error(f"shardwise: {sink} was slower than the run; {again} brings the rest")
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)  # with what the tracker started beside it
                child.wait()


def start_guard(
    run: RunDirectory,
    spec: HangSpec,
    ranks: range,
    *,
    exchange: Exchange | None = None,
    note: Callable[[str], None] = echo_error,
) -> list[Guard]:
    """Return what detects hangs, mismatched collectives and slow ranks: one guard, or none where that is turned off.

    `exchange` is the link to other nodes, None where there are none.
    """
    if not spec.after_s:
        return []
    guard = Guard(run, spec, note, exchange)
    guard.follow(ranks)
    return [guard]


def start_replica_watch(run: RunDirectory, spec: ReplicaSpec, ranks: range, node: int = 0) -> list[ReplicaWatch]:
    """Return what compares the replicas of a launched script: one watch, or none where that is turned off."""
    if not spec.every:
        return []
    watch = ReplicaWatch(run, spec, echo_error, node)
    watch.follow(ranks)
    return [watch]


def failure_text(guards: Sequence[Guard | ReplicaWatch], explanation: str) -> str:
    """Return the report of a launch that failed: where each rank was, why it failed, and a verdict if not in it."""
    before = [guard.places() for guard in guards if not guard.verdict]
    after = [guard.verdict for guard in guards if guard.verdict not in explanation]
    return "\n".join(text for text in [*before, explanation, *after] if text)
