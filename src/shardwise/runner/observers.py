"""Observers of running ranks: progress of rank 0, copies of output, mirrors to experiment trackers, and guards."""

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

    from shardwise.diagnosis.guard.peers import Exchange
    from shardwise.launcher.options import Shown
    from shardwise.launcher.spec import HangSpec
    from shardwise.monitor.sinks import SinkSpec
    from shardwise.runs import RunDirectory
    from shardwise.runs.drift import ReplicaSpec


_MIRROR_WAIT_S = 10.0
"""Time limit for mirrors to finish after the run, less than the grace period of batch systems."""
_NICENESS = 10
"""Niceness of mirrors, so that ranks have priority."""


class Follower:
    """Shows the progress bar and the output of rank 0. One writer to the terminal keeps them from mixing."""

    def __init__(self, run: RunDirectory) -> None:
        self._view = ProgressView.on_stderr()
        self._state = RunState(run, listener=self._show)
        self._outputs = (Tail(run.stdout(0)), Tail(run.stderr(0)))
        self._began_at = time.time()
        for output in self._outputs:
            output.read()  # of an earlier part of this run, which --resume auto continues

    def tick(self) -> None:
        """Show new output and events."""
        for output in self._outputs:
            for line in output.lines():
                self._view.line(line.decode(errors="replace"))
        while self._state.refresh_events():
            pass

    def _show(self, writer: str, event: dict[str, Any]) -> None:
        if writer == "rank0" and event["at"] >= self._began_at:
            self._view.show(event)

    def line(self, text: str) -> None:
        """Show a message of the launcher."""
        self._view.line(text)

    def close(self) -> None:
        """Restore the terminal."""
        self._view.close()


@contextlib.contextmanager
def following(run: RunDirectory, sinks: Sequence[SinkSpec]) -> Iterator[list[Follower]]:
    """Show the run and mirror it to `sinks` during a launch; yields the observers for the launcher."""
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
    """Copies the output of ranks from their log files to the terminal.

    Ranks write directly to their log files. Without a pipe in between, no output is lost and no rank blocks.
    """

    def __init__(self, run: RunDirectory, shown: list[tuple[Shown, Shown]]) -> None:
        """Copy the output of ranks 0 to N-1, the ranks of a single node."""
        self._run = run
        self._shown = shown
        self._known: dict[tuple[int, int], _Copy] = {}
        self._copies: list[_Copy] = []
        self.ranks: set[int] = set()
        """Ranks whose standard error was shown."""
        self.follow(range(len(shown)))

    def follow(self, ranks: range) -> None:
        """Copy the output of these ranks from now on, without repeating output that was already copied."""
        self._copies = []
        for rank, views in zip(ranks, self._shown, strict=True):
            if views[1].copied or views[1].terminal:
                self.ranks.add(rank)
            for stream, view in enumerate(views):
                if view.copied and not view.terminal:
                    copy = self._known.setdefault((rank, stream), self._copy(rank, stream, view))
                    self._copies.append(copy)

    def _copy(self, rank: int, stream: int, view: Shown) -> _Copy:
        tail = Tail((self._run.stdout, self._run.stderr)[stream](rank))
        tail.read()  # skip the output of an earlier launch of this run
        return _Copy(
            tail, (sys.stdout, sys.stderr)[stream].buffer, f"[rank{rank}]: ".encode() if view.prefixed else b""
        )

    def tick(self) -> None:
        """Copy new output, unchanged or with the rank before each line."""
        for copy in self._copies:
            if copy.prefix:
                new = b"".join(copy.prefix + line + b"\n" for line in copy.tail.lines())
            else:
                new = copy.tail.read()
            if new:
                with contextlib.suppress(OSError):  # the terminal was closed; the log files have the complete output
                    copy.stream.write(new)
                    copy.stream.flush()


class Mirrors:
    """Runs one `shardwise watch RUN --sink SINK` process per sink, with its log in the run directory."""

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
        """Wait until the mirrors have copied the finished run; kill and report mirrors that exceed the time limit."""
        deadline = time.monotonic() + _MIRROR_WAIT_S
        for sink, child, log in self._children:
            command = f"shardwise watch {self._run.path} --sink {sink}"
            try:
                if child.wait(max(0.0, deadline - time.monotonic())) != 0:
                    output = log.read_text(errors="replace").strip().splitlines() or ["no output"]
                    reason = output[-1].removeprefix("shardwise: ")
                    echo_error(f"shardwise: {sink} is incomplete ({reason}); complete it with: {command}")
            except subprocess.TimeoutExpired:
                echo_error(f"shardwise: {sink} is incomplete (timeout); complete it with: {command}")
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)  # includes processes started by the tracker
                child.wait()


def start_guard(
    run: RunDirectory,
    spec: HangSpec,
    ranks: range,
    *,
    exchange: Exchange | None = None,
    note: Callable[[str], None] = echo_error,
) -> list[Guard]:
    """Return the guard that detects hangs, mismatched collectives and stragglers, or an empty list if it is disabled.

    `exchange` is the connection to the guards of other nodes, None on a single node.
    """
    if not spec.after_s:
        return []
    guard = Guard(run, spec, note, exchange)
    guard.follow(ranks)
    return [guard]


def start_replica_watch(run: RunDirectory, spec: ReplicaSpec, ranks: range, node: int = 0) -> list[ReplicaWatch]:
    """Return the watch that compares the replicas of a launched script, or an empty list if it is disabled."""
    if not spec.every:
        return []
    watch = ReplicaWatch(run, spec, echo_error, node)
    watch.follow(ranks)
    return [watch]


def failure_text(guards: Sequence[Guard | ReplicaWatch], explanation: str) -> str:
    """Return the text of a failed launch: the last collective of each rank, the explanation, and other verdicts."""
    before = [guard.places() for guard in guards if not guard.verdict]
    after = [guard.verdict for guard in guards if guard.verdict not in explanation]
    return "\n".join(text for text in [*before, explanation, *after] if text)
