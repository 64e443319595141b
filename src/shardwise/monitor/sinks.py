"""Mirrors a run into an experiment tracker; a separate process reads the run's files, so training is not slowed."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import time
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from shardwise.errors import InputError, MissingExtraError, ShardwiseError, nearest
from shardwise.monitor.trackers import MlflowSink, TensorboardSink, TrackerFeed, WandbSink, describe_run, read_result
from shardwise.runs.state import RunState, check_run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from shardwise.monitor.trackers import MetricPoint
    from shardwise.runs import RunDirectory
    from shardwise.runs.status import Entry


INTERVAL_S = 1.0
"""Seconds between two reads of the run, which writes events about once a second."""
TARGETS = {"tensorboard": "DIR", "wandb": "PROJECT", "mlflow": "EXPERIMENT"}
"""Tracker -> metavariable of the target after the colon."""
_SINKS: dict[str, type[TensorboardSink | WandbSink | MlflowSink]] = {
    "tensorboard": TensorboardSink,
    "wandb": WandbSink,
    "mlflow": MlflowSink,
}
GRAMMAR = ", ".join(f"{kind}:{target}" for kind, target in TARGETS.items())


class Sink(Protocol):
    """One run in a tracker. Every call may block and may raise any exception of the tracker."""

    tracker_id: str
    """The tracker's id of this run, with which a later process continues it."""
    is_new: bool
    """Whether the tracker has no data of this run."""
    where: str
    """Address or path of the run in the tracker."""

    def log(self, points: Sequence[MetricPoint]) -> None:
        """Add points to curves; they are stored when this returns."""

    def show_notes(self, notes: Sequence[Entry]) -> None:
        """Replace the notes of the run by `notes`, which has all notes so far."""

    def finish(self, state: str, result: Mapping[str, Any]) -> None:
        """Record the final state ("finished", "failed", "stopped" or "lost") and the result of the run."""

    def close(self) -> None:
        """Close the connection to the tracker; a later sink may continue the run."""


@dataclass(frozen=True)
class SinkSpec:
    """A tracker and the directory, project or experiment in it."""

    kind: str
    target: str

    def __str__(self) -> str:
        return f"{self.kind}:{self.target}"


def parse_sink(text: str) -> SinkSpec:
    """Parse KIND:TARGET; raise an error for an unknown or uninstalled tracker, or a missing target."""
    kind, _, target = text.partition(":")
    if kind not in TARGETS:
        raise InputError(f"sink {kind!r} does not exist", code="watch.unknown-sink", fix=nearest(kind, TARGETS))
    if not target:
        raise InputError(
            f"sink {text!r} has no {TARGETS[kind]} after the colon",
            code="watch.sink-target-missing",
            fix=f"use {kind}:{TARGETS[kind]}",
        )
    if importlib.util.find_spec(kind) is None:
        raise MissingExtraError.of(f"sink {kind}", kind)
    return SinkSpec(kind, target)


def mirror(run: RunDirectory, spec: SinkSpec, note: Callable[[str], None], *, interval_s: float = INTERVAL_S) -> None:
    """Mirror a run into a tracker until the run ends, from the step at which an earlier mirror stopped.

    Raise InputError if another process mirrors the run into the same target, and ShardwiseError if the tracker fails.
    """
    check_run(run.path)
    state = RunState(run)
    with lock_mirror(run, spec.kind, str(spec)) as mirrored:
        if not _wait_for_start(state, interval_s):
            note(f"{run.path} ended before its first step: nothing was mirrored to {spec}")
            return
        try:
            sink: Sink = _SINKS[spec.kind](spec.target, describe_run(state), mirrored.tracker_id)
            try:
                note(f"mirroring {run.path} to {sink.where}")
                ended = _follow(run, sink, mirrored, interval_s)
            finally:
                sink.close()
        except ShardwiseError:
            raise
        except Exception as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            fix = "run the same command again: it continues after the last mirrored step"
            raise ShardwiseError(f"{spec} failed ({reason})", code="watch.sink-failed", fix=fix) from error
        note(f"mirrored {run.path} to {sink.where}, up to step {mirrored.last_step}: {ended}")


def _wait_for_start(state: RunState, interval_s: float) -> bool:
    """Wait for the start of the training; return False if the run ends before it starts."""
    state.refresh_all()
    while not state.training.start and not _is_over(state):
        time.sleep(interval_s)
        state.refresh_all()
    return bool(state.training.start)


def _follow(run: RunDirectory, sink: Sink, mirrored: MirrorState, interval_s: float) -> str:
    """Send new points until the run ends, and return its final state; progress is stored after each read."""
    if sink.is_new:
        mirrored.clear()
    mirrored.tracker_id = sink.tracker_id
    feed, num_notes, is_over = TrackerFeed(run, mirrored.last_steps), 0, False
    while True:
        while points := feed.read():
            sink.log(points)
            mirrored.record(feed.last_steps)
        notes = feed.notes()
        if len(notes) != num_notes:
            sink.show_notes(notes)
            num_notes = len(notes)
        if is_over:
            ended = feed.state.status().state
            sink.finish(ended, read_result(run))
            return ended
        is_over = _is_over(feed.state)  # one more read gets the events that the run wrote before its end
        if not is_over:
            time.sleep(interval_s)


def _is_over(state: RunState) -> bool:
    """Whether the run has ended or no longer writes events."""
    return state.is_over or state.status().state == "silent"


# The stored progress of a mirror, from which the next mirror continues. A lock allows one process at a time.


class _Sent(msgspec.Struct, kw_only=True):
    sink: str
    tracker_id: str = ""
    last_steps: dict[str, int] = msgspec.field(default_factory=dict, name="told")


class MirrorState:
    """The progress of one mirror, stored in a file of the run directory."""

    def __init__(self, path: Path, sink: str) -> None:
        self._path = path
        self._sent = _Sent(sink=sink)
        with contextlib.suppress(OSError, msgspec.DecodeError):
            self._sent = msgspec.json.decode(path.read_bytes(), type=_Sent)

    @property
    def tracker_id(self) -> str:
        """The tracker's id of this run; empty before the tracker created the run."""
        return self._sent.tracker_id

    @tracker_id.setter
    def tracker_id(self, value: str) -> None:
        self._sent.tracker_id = value
        self._write()

    @property
    def last_steps(self) -> Mapping[str, int]:
        """The last step of each curve that was sent to the tracker."""
        return self._sent.last_steps

    @property
    def last_step(self) -> int:
        """The last step of any curve that was sent to the tracker."""
        return max(self._sent.last_steps.values(), default=0)

    def clear(self) -> None:
        """Reset the last steps, for a tracker that has no data of this run."""
        self._sent.last_steps = {}

    def record(self, last_steps: Mapping[str, int]) -> None:
        """Store the last step of each curve that the tracker has."""
        self._sent.last_steps = dict(last_steps)
        self._write()

    def _write(self) -> None:
        new = self._path.with_suffix(".new")
        new.write_bytes(msgspec.json.encode(self._sent))
        new.replace(self._path)


@contextlib.contextmanager
def lock_mirror(run: RunDirectory, kind: str, sink: str) -> Iterator[MirrorState]:
    """Lock the mirror into `sink` and yield its state; raise InputError if another process has the lock."""
    stem = run.sinks / f"{kind}-{zlib.crc32(sink.encode()):08x}"
    run.sinks.mkdir(exist_ok=True)
    lock = os.open(stem.with_suffix(".lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(
                f"another process already mirrors {run.path} to {sink}",
                code="watch.already-mirrored",
                fix="wait until that process exits, or stop it",
            ) from None
        yield MirrorState(stem.with_suffix(".json"), sink)
    finally:
        os.close(lock)
