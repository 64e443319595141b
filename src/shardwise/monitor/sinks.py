"""Mirroring a run into an experiment tracker: from its files, in a process of its own, so that the job pays nothing."""

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
from shardwise.monitor.sink_feed import TrackerFeed, describe_run, read_result
from shardwise.monitor.trackers import MlflowSink, TensorboardSink, WandbSink
from shardwise.runs.state import RunState, check_run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from shardwise.monitor.sink_feed import MetricPoint
    from shardwise.runs import RunDirectory
    from shardwise.runs.status import Entry


LOOK_S = 1.0
"""Between two looks at the run: it publishes about once a second."""
TARGETS = {"tensorboard": "DIR", "wandb": "PROJECT", "mlflow": "EXPERIMENT"}
"""Trackers, and what is named after the colon."""
_SINKS: dict[str, type[TensorboardSink | WandbSink | MlflowSink]] = {
    "tensorboard": TensorboardSink,
    "wandb": WandbSink,
    "mlflow": MlflowSink,
}
GRAMMAR = ", ".join(f"{kind}:{target}" for kind, target in TARGETS.items())


class Sink(Protocol):
    """One run in a tracker. Every call may block, and may raise whatever the tracker raises."""

    tracker_id: str
    """What the tracker needs to continue this run later."""
    is_new: bool
    """Whether the tracker has nothing of this run yet."""
    where: str
    """Where to look at it."""

    def log(self, points: Sequence[MetricPoint]) -> None:
        """Add points to curves; they are safe when this returns."""

    def show_notes(self, notes: Sequence[Entry]) -> None:
        """Show these notes, all there are so far, in place of those shown before."""

    def finish(self, state: str, result: Mapping[str, Any]) -> None:
        """Record how the run ended ("finished", "failed", "stopped", "lost") and its result."""

    def close(self) -> None:
        """Release the tracker; the run in it may be continued."""


@dataclass(frozen=True)
class SinkSpec:
    """Which tracker, and which folder, project or experiment of it."""

    kind: str
    target: str

    def __str__(self) -> str:
        return f"{self.kind}:{self.target}"


def parse_sink(text: str) -> SinkSpec:
    """Read KIND:TARGET; refuse an unknown tracker, a missing target, and one whose extra is not installed."""
    kind, _, target = text.partition(":")
    if kind not in TARGETS:
        raise InputError(f"sink {kind!r} does not exist", code="watch.unknown-sink", fix=nearest(kind, TARGETS))
    if not target:
        raise InputError(
            f"sink {text!r} has no {TARGETS[kind]}",
            code="watch.sink-target-missing",
            fix=f"write {kind}:{TARGETS[kind]}",
        )
    if importlib.util.find_spec(kind) is None:
        raise MissingExtraError.of(f"sink {kind}", kind)
    return SinkSpec(kind, target)


def mirror(run: RunDirectory, spec: SinkSpec, note: Callable[[str], None], *, look_s: float = LOOK_S) -> None:
    """Mirror a run into a tracker until it ends; all of it, wherever an earlier mirror stopped.

    A second mirror of one run into one place is refused. What the tracker raises becomes one sentence.
    """
    check_run(run.path)
    state = RunState(run)
    with lock_mirror(run, spec.kind, str(spec)) as mirrored:
        if not _wait_for_start(state, look_s):
            note(f"{run.path} ended before its first step: nothing is mirrored to {spec}")
            return
        try:
            sink: Sink = _SINKS[spec.kind](spec.target, describe_run(state), mirrored.tracker_id)
            try:
                note(f"{run.path} is mirrored to {sink.where}")
                ended = _follow(run, sink, mirrored, look_s)
            finally:
                sink.close()
        except ShardwiseError:
            raise
        except Exception as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            fix = "once it works again, the same command continues where this one ended"
            raise ShardwiseError(f"{spec} failed ({reason})", code="watch.sink-failed", fix=fix) from error
        note(f"{run.path} is in {sink.where}, up to step {mirrored.last_step}: {ended}")


def _wait_for_start(state: RunState, look_s: float) -> bool:
    """Wait until there is something to mirror; False when the run is over without it."""
    state.refresh_all()
    while not state.training.start and not _is_over(state):
        time.sleep(look_s)
        state.refresh_all()
    return bool(state.training.start)


def _follow(run: RunDirectory, sink: Sink, mirrored: MirrorState, look_s: float) -> str:
    """Send what is new until the run is over, and return how it ended; what was sent is recorded after each read."""
    if sink.is_new:
        mirrored.clear()
    mirrored.tracker_id = sink.tracker_id
    feed, num_notes, is_over = TrackerFeed(run, mirrored.last_steps), 0, False
    while True:
        while points := feed.read():
            sink.log(points)
            mirrored.record(feed.last_steps)
        if len(notes := feed.notes()) != num_notes:
            sink.show_notes(notes)
            num_notes = len(notes)
        if is_over:
            ended = feed.state.status().state
            sink.finish(ended, read_result(run))
            return ended
        is_over = _is_over(feed.state)  # then one more read sees all that the run wrote before its end
        if not is_over:
            time.sleep(look_s)


def _is_over(state: RunState) -> bool:
    """Whether nothing more will come, as far as the files show."""
    return state.is_over or state.status().state == "silent"


# What a mirror has sent, so that the next one continues where it ended; a lock admits one process at a time.


class _Sent(msgspec.Struct, kw_only=True):
    sink: str
    tracker_id: str = ""
    last_steps: dict[str, int] = msgspec.field(default_factory=dict, name="told")


class MirrorState:
    """What one mirror has sent, in a file of the run directory."""

    def __init__(self, path: Path, sink: str) -> None:
        self._path = path
        self._sent = _Sent(sink=sink)
        with contextlib.suppress(OSError, msgspec.DecodeError):
            self._sent = msgspec.json.decode(path.read_bytes(), type=_Sent)

    @property
    def tracker_id(self) -> str:
        """The tracker's name of this run; empty before the tracker has it."""
        return self._sent.tracker_id

    @tracker_id.setter
    def tracker_id(self, value: str) -> None:
        self._sent.tracker_id = value
        self._write()

    @property
    def last_steps(self) -> Mapping[str, int]:
        """The last step of each curve that the tracker has."""
        return self._sent.last_steps

    @property
    def last_step(self) -> int:
        """The last step of any curve."""
        return max(self._sent.last_steps.values(), default=0)

    def clear(self) -> None:
        """Start again: the tracker has nothing."""
        self._sent.last_steps = {}

    def record(self, last_steps: Mapping[str, int]) -> None:
        """Write down what the tracker has now."""
        self._sent.last_steps = dict(last_steps)
        self._write()

    def _write(self) -> None:
        new = self._path.with_suffix(".new")
        new.write_bytes(msgspec.json.encode(self._sent))
        new.replace(self._path)


@contextlib.contextmanager
def lock_mirror(run: RunDirectory, kind: str, sink: str) -> Iterator[MirrorState]:
    """Lock the mirror into `sink` for this process and yield its state; refuse while another process has the lock."""
    stem = run.sinks / f"{kind}-{zlib.crc32(sink.encode()):08x}"
    run.sinks.mkdir(exist_ok=True)
    lock = os.open(stem.with_suffix(".lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(
                f"{run.path} is mirrored to {sink} by another process already",
                code="watch.already-mirrored",
                fix="wait until it ends, or end it",
            ) from None
        yield MirrorState(stem.with_suffix(".json"), sink)
    finally:
        os.close(lock)
