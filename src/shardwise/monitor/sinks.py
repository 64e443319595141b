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
from shardwise.monitor.view import RunView, check_run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from shardwise.monitor.ranks import Entry
    from shardwise.monitor.sink_feed import About, MetricPoint
    from shardwise.runs import RunDirectory


LOOK_S = 1.0
"""Between two looks at the run: it publishes about once a second."""
TARGETS = {"tensorboard": "DIR", "wandb": "PROJECT", "mlflow": "EXPERIMENT"}
"""Trackers, and what is named after the colon."""
GRAMMAR = ", ".join(f"{kind}:{target}" for kind, target in TARGETS.items())


class Sink(Protocol):
    """One run in a tracker. Every call may block, and may raise whatever the tracker raises."""

    tracker_id: str
    """What the tracker needs to go on with this run later."""
    is_new: bool
    """Whether the tracker has nothing of this run yet."""
    where: str
    """Where to look at it."""

    def log(self, points: Sequence[MetricPoint]) -> None:
        """Add points to curves; they are safe when this returns."""

    def tell(self, notes: Sequence[Entry]) -> None:
        """Show these notes, all there are so far, in place of those shown before."""

    def finish(self, state: str, result: Mapping[str, Any]) -> None:
        """Say how the run ended ("finished", "failed", "stopped", "lost") and what came out."""

    def close(self) -> None:
        """Let go of the tracker; the run in it may be gone on with."""


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
        raise InputError(f"there is no sink {kind!r}", code="watch.unknown-sink", fix=nearest(kind, TARGETS))
    if not target:
        raise InputError(
            f"sink {text!r} names no {TARGETS[kind]}",
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
    view = RunView(run)
    with hold_state(run, spec.kind, str(spec)) as state:
        if not _wait_for_start(view, look_s):
            note(f"{run.path} ended before its first step: nothing is mirrored to {spec}")
            return
        try:
            sink = _open(spec, describe_run(run), state.tracker_id)
            try:
                note(f"{run.path} is mirrored to {sink.where}")
                _follow(view, sink, state, look_s)
            finally:
                sink.close()
        except ShardwiseError:
            raise
        except Exception as error:
            words = (str(error).strip().splitlines() or [type(error).__name__])[0]
            fix = "once it is there again, the same command goes on where this ended"
            raise ShardwiseError(f"{spec} failed ({words})", code="watch.sink-failed", fix=fix) from error
        note(f"{run.path} is in {sink.where}, up to step {state.last_step}: {_state(view)}")


def _wait_for_start(view: RunView, look_s: float) -> bool:
    """Wait until there is something to mirror; False when the run is over without it."""
    view.refresh_whole()
    while not view.training.has_started and not _is_over(view):
        time.sleep(look_s)
        view.refresh_whole()
    return view.training.has_started


def _follow(view: RunView, sink: Sink, state: HeldState, look_s: float) -> None:
    """Hand on what is new until the run is over; what was handed on is written down after each look."""
    if sink.is_new:
        state.forget()
    state.tracker_id = sink.tracker_id
    feed, told = TrackerFeed(view.run, state.told), 0
    while True:
        view.refresh_whole()
        is_over = _is_over(view)  # asked before the last look, so that this sees all there will be
        while points := feed.read():
            sink.log(points)
            state.remember(feed.told)
        if len(notes := feed.notes()) != told:
            sink.tell(notes)
            told = len(notes)
        if is_over:
            return sink.finish(_state(view), read_result(view.run))
        time.sleep(look_s)


def _is_over(view: RunView) -> bool:
    """Whether nothing more will come, as far as anybody can tell."""
    return view.is_over or _state(view) == "silent"


def _state(view: RunView) -> str:
    return view.status().state


def _open(spec: SinkSpec, about: About, tracker_id: str) -> Sink:
    """Open the tracker; only here is its package imported."""
    if spec.kind == "tensorboard":
        from shardwise.monitor.sink_tensorboard import TensorboardSink

        return TensorboardSink(spec.target, about, tracker_id)
    if spec.kind == "wandb":
        from shardwise.monitor.sink_wandb import WandbSink

        return WandbSink(spec.target, about, tracker_id)
    from shardwise.monitor.sink_mlflow import MlflowSink

    return MlflowSink(spec.target, about, tracker_id)


# What a mirror remembers, so that the next one goes on where it ended; one process at a time holds it.


class _Memory(msgspec.Struct, kw_only=True):
    sink: str
    tracker_id: str = ""
    told: dict[str, int] = {}


class HeldState:
    """The memory of one mirror, in a file of the run directory."""

    def __init__(self, path: Path, sink: str) -> None:
        self._path = path
        self._memory = _Memory(sink=sink)
        with contextlib.suppress(OSError, msgspec.DecodeError):
            self._memory = msgspec.json.decode(path.read_bytes(), type=_Memory)

    @property
    def tracker_id(self) -> str:
        """What the tracker calls this run; empty before it was told of it."""
        return self._memory.tracker_id

    @tracker_id.setter
    def tracker_id(self, value: str) -> None:
        self._memory.tracker_id = value
        self._write()

    @property
    def told(self) -> Mapping[str, int]:
        """The last step of each curve that the tracker has."""
        return self._memory.told

    @property
    def last_step(self) -> int:
        """The last step of any curve."""
        return max(self._memory.told.values(), default=0)

    def forget(self) -> None:
        """Begin again: the tracker has nothing."""
        self._memory.told = {}

    def remember(self, told: Mapping[str, int]) -> None:
        """Write down what the tracker has now."""
        self._memory.told = dict(told)
        self._write()

    def _write(self) -> None:
        new = self._path.with_suffix(".new")
        new.write_bytes(msgspec.json.encode(self._memory))
        new.replace(self._path)


@contextlib.contextmanager
def hold_state(run: RunDirectory, kind: str, sink: str) -> Iterator[HeldState]:
    """Hold the memory of the mirror into `sink`; refuse while another process holds it."""
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
        yield HeldState(stem.with_suffix(".json"), sink)
    finally:
        os.close(lock)
