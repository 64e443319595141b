"""The history, training state and metric curves of a run, computed incrementally from its events."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardwise.runs.console import counted
from shardwise.runs.status import CheckpointStatus, Entry, RestartMark
from shardwise.units import format_duration

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


_SHARED = frozenset({"note", "verdict", "finish"})
TOGETHER_S = 60.0
MOST = 500
"""Maximum number of entries; older entries are only in the events files."""


class History:
    """The newest entries of a run, numbered in the order in which they were read."""

    def __init__(self) -> None:
        self.count = 0
        self._entries: deque[Entry] = deque(maxlen=MOST)
        self._shared: deque[tuple[str, float]] = deque(maxlen=MOST)

    def add(self, event: dict[str, Any], rank: int | None = None) -> None:
        """Add an event as a line of text; a text that several ranks or launchers report within 60 s is added once."""
        describe = _DESCRIBE.get(event["kind"])
        try:
            line = describe(event) if describe is not None else None
            at = float(event["at"])
        except (KeyError, TypeError, ValueError, AttributeError):
            return  # written by a different version of shardwise
        if line is None:
            return
        text, mood = line
        if event["kind"] in _SHARED:
            if any(known == text and abs(at - then) < TOGETHER_S for known, then in self._shared):
                return
            self._shared.append((text, at))
        self.count += 1
        entry = Entry(number=self.count, at=at, kind=event["kind"], text=text, mood=mood, rank=rank)
        self._entries.append(entry)

    def since(self, number: int) -> list[Entry]:
        """Return the entries after this number, oldest first."""
        return [entry for entry in self._entries if entry.number > number]


Line = tuple[str, str] | None
"""Text of an event and its severity, `Entry.mood`; None for an event that is not shown."""


def _start(event: dict[str, Any]) -> Line:
    ranks = event.get("ranks")
    if not isinstance(ranks, list):
        return "training starts", "plain"
    return f"training starts on {counted(len(ranks), 'rank')}", "plain"


def _evaluation(event: dict[str, Any]) -> Line:
    values = event.get("values") or {}
    shown = " · ".join(f"{name} {_number(value)}" for name, value in values.items())
    return f"evaluated at step {_whole(event.get('step'))}: {shown}", "plain"


def _note(event: dict[str, Any]) -> Line:
    return str(event.get("text", "")), "warn"


def _save(event: dict[str, Any]) -> Line:
    stall = format_duration(event.get("stall_s"))
    return f"checkpoint at step {_whole(event.get('step'))}, training stalled for {stall}", "plain"


def _end(event: dict[str, Any]) -> Line:
    return f"training ends after {_whole(event.get('steps'))} steps, loss {_number(event.get('loss'))}", "good"


def _attempt(event: dict[str, Any]) -> Line:
    node = f"node {event.get('node')}, " if event.get("nodes", 1) > 1 else ""
    where = f" on {node}{event['host']}" if event.get("host") else ""
    again = f", restart {event['number']}" if event.get("number") else ""
    return f"{counted(event.get('nproc', 0), 'process', 'es')} started{where}{again}", "plain"


def _exit(event: dict[str, Any]) -> Line:
    if event.get("code") == 0 or event.get("stopped"):
        return None
    return f"rank {event.get('rank')} ended: {event.get('words')}", "bad"


def _restart(event: dict[str, Any]) -> Line:
    cause = f": {event['cause']}" if event.get("cause") else ""
    return f"restart {event.get('number')} of {event.get('most')}{cause}", "warn"


def _verdict(event: dict[str, Any]) -> Line:
    return str(event.get("text", "")), "bad"


def _finish(event: dict[str, Any]) -> Line:
    mood = {"finished": "good", "failed": "bad"}.get(str(event.get("state")), "warn")
    verb = "was" if event.get("state") == "stopped" else "has"
    return f"the run {verb} {event.get('state')}", mood


_DESCRIBE: dict[str, Callable[[dict[str, Any]], Line]] = {
    "start": _start,
    "evaluation": _evaluation,
    "note": _note,
    "save": _save,
    "end": _end,
    "attempt": _attempt,
    "exit": _exit,
    "restart": _restart,
    "verdict": _verdict,
    "finish": _finish,
}


def _whole(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else "?"


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else "nan"


# Training state from the events of rank 0: step, checkpoints, restarts, and curves of bounded size.


MOST_SAVES = 50
CURVES = ("loss", "evaluation", "throughput", "memory", "gradient", "learning_rate")
"""Curves of every training run. Metrics of evaluations are "evaluation/NAME", logged values "log/NAME"."""
MOST_LOGGED = 50
"""Maximum number of curves of logged values; further values are only in the events files."""


class TrainingState:
    """The training state from the events of rank 0; steps that a restart repeats replace the earlier steps.

    The point of a curve at step N is the value after N optimizer steps; `first` of an event counts from 0.
    """

    def __init__(self) -> None:
        self.curves = {name: Curve() for name in CURVES}
        self.step = 0
        """Number of completed steps."""
        self.num_steps: int | None = None
        self.parameters: int | None = None
        self.facts: dict[str, str] = {}
        self.placed: dict[int, dict[str, Any]] = {}
        """Host, device and pid, by rank."""
        self.epoch: int | None = None
        self.loss: float | None = None
        self.lr: float | None = None
        self.samples_per_s: float | None = None
        self.seconds_per_step: float | None = None
        self.evaluation: dict[str, float | None] = {}
        self.saves: dict[int, CheckpointStatus] = {}
        self.restarts: list[RestartMark] = []
        self.start: Mapping[str, Any] = {}
        """The last `start` event: ranks, parameters, steps; empty before the first event."""
        self.has_ended = False
        self._restarted_at: float | None = None

    def fold(self, event: Mapping[str, Any]) -> None:
        """Fold one event of rank 0 into the state; unknown kinds and malformed events are skipped."""
        fold_kind = getattr(self, f"_fold_{event['kind']}", None)
        if fold_kind is not None:
            try:
                fold_kind(event)
            except (KeyError, TypeError, ValueError, AttributeError, IndexError):
                return  # written by a different version of shardwise: the fields that were read so far are kept

    @property
    def eta_s(self) -> float | None:
        """Estimated seconds to the last step at the current speed, without evaluations and checkpoints."""
        if self.num_steps is None or self.seconds_per_step is None or self.has_ended:
            return None
        return max(0, self.num_steps - self.step) * self.seconds_per_step

    def _fold_start(self, event: Mapping[str, Any]) -> None:
        if self.start:
            self._restarted_at = float(event["at"])
        self.start, self.has_ended = event, False
        self.num_steps = int(event["num_steps"])
        self.parameters = int(event["parameters"])
        self.facts = {name: value for name, value, _ in event["facts"]}
        self.placed = {int(place["rank"]): place for place in event["ranks"]}

    def _fold_steps(self, event: Mapping[str, Any]) -> None:
        first, losses = int(event["first"]), event["losses"]
        last = first + len(losses)
        if first < self.step or self._restarted_at is not None:
            self._rewind(first)
        for step, loss in enumerate(losses, first + 1):
            self.curves["loss"].add(step, math.nan if loss is None else loss)
        values = {"memory": "memory_bytes", "gradient": "grad_norm", "learning_rate": "lr"}
        for name, key in values.items():
            if event.get(key) is not None:
                self.curves[name].add(last, float(event[key]))
        self.step, self.loss = last, losses[-1]
        self.epoch, self.lr = event["epoch"], event["lr"]
        seconds = max(float(event["seconds"]), 1e-9)
        self.curves["throughput"].add(last, event["samples"] / seconds)
        self._smooth(event["samples"] / seconds, seconds / len(losses), seconds)

    def _smooth(self, samples_per_s: float, seconds_per_step: float, seconds: float) -> None:
        """Smooth throughput and step time; windows are weighted by their duration, since short ones are noisy."""
        weight = min(1.0, 0.5 * seconds)
        if self.samples_per_s is None or self.seconds_per_step is None:
            self.samples_per_s, self.seconds_per_step = samples_per_s, seconds_per_step
            return
        self.samples_per_s += weight * (samples_per_s - self.samples_per_s)
        self.seconds_per_step += weight * (seconds_per_step - self.seconds_per_step)

    def _rewind(self, first: int) -> None:
        """Drop the steps after `first`, which a restart repeats; keep logged values, since they may already be new."""
        for name, curve in self.curves.items():
            if not name.startswith("log/"):
                curve.truncate(first + 1)
        self.saves = {step: save for step, save in self.saves.items() if step <= first}
        if self._restarted_at is not None:
            self.restarts.append(RestartMark(step=first, at=self._restarted_at))
            self._restarted_at = None

    def _fold_evaluation(self, event: Mapping[str, Any]) -> None:
        self.evaluation = dict(event["values"])
        for name, value in self.evaluation.items():
            self._add("evaluation" if name == "loss" else f"evaluation/{name}", int(event["step"]), value)

    def _fold_log(self, event: Mapping[str, Any]) -> None:
        for name, value in event["values"].items():
            num_logged = sum(known.startswith("log/") for known in self.curves)
            if f"log/{name}" in self.curves or num_logged < MOST_LOGGED:
                self._add(f"log/{name}", int(event["step"]), value)

    def _add(self, name: str, step: int, value: float | None) -> None:
        """Add a point to a curve, creating the curve if necessary; replaces points that a restart repeats."""
        curve = self.curves.setdefault(name, Curve())
        curve.truncate(step)
        if value is not None:
            curve.add(step, float(value))

    def _fold_save(self, event: Mapping[str, Any]) -> None:
        step = int(event["step"])
        self.saves[step] = CheckpointStatus(step=step, at=float(event["at"]))
        if len(self.saves) > MOST_SAVES:
            del self.saves[next(iter(self.saves))]

    def _fold_end(self, _event: Mapping[str, Any]) -> None:
        self.has_ended = True


# Curves of any length in bounded memory: minimum, maximum and mean of equal ranges of steps.


LIMIT = 2048
"""Maximum number of ranges of a curve, about as many as a screen has columns. A full curve doubles the range width."""
RECENT = 1 << 16
"""Number of recent values that are kept unreduced, so that a restart can remove steps exactly."""

Row = tuple[int, float | None, float | None, float | None]
"""First step of a range, and the minimum, maximum and mean value in it; None without a finite value."""


@dataclass(slots=True)
class _Range:
    number: int
    low: float = math.inf
    high: float = -math.inf
    total: float = 0.0
    count: int = 0

    def add(self, low: float, high: float, total: float, count: int) -> None:
        self.low, self.high = min(self.low, low), max(self.high, high)
        self.total, self.count = self.total + total, self.count + count


class Curve:
    """Values over steps in ranges of equal width; the minimum and maximum keep a spike of one step visible.

    A client that follows a curve stores `generation` and the number of rows: while the generation is the same, rows are
    only appended, and only the last row may change.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self.generation = 0
        self.width = 1
        """Steps per range."""
        self._limit = limit
        self._ranges: list[_Range] = []
        self._recent: deque[tuple[int, float]] = deque(maxlen=RECENT)

    def __len__(self) -> int:
        return len(self._ranges)

    def add(self, step: int, value: float) -> None:
        """Add the value of a step, which must not be lower than the last step; NaN leaves a gap."""
        self._recent.append((step, value))
        self._put(step // self.width, value)
        while len(self._ranges) > self._limit:
            self._widen()

    def truncate(self, step: int) -> None:
        """Drop this step and all later steps, which a restart repeats."""
        if not self._ranges or step >= (self._ranges[-1].number + 1) * self.width:
            return
        self.generation += 1
        while self._recent and self._recent[-1][0] >= step:
            self._recent.pop()
        last = step // self.width
        while self._ranges and self._ranges[-1].number > last:
            self._ranges.pop()
        if self._ranges and self._ranges[-1].number == last:
            known = [value for at, value in self._recent if at // self.width == last]
            if known or step % self.width == 0:  # otherwise its values are no longer kept, and the range stays as it is
                self._ranges.pop()
            for value in known:
                self._put(last, value)

    def rows(self, start: int = 0) -> list[Row]:
        """Return the rows from index `start`, in order of steps."""
        return [_row(found, self.width) for found in self._ranges[start:]]

    def _put(self, number: int, value: float) -> None:
        if not self._ranges or self._ranges[-1].number != number:
            self._ranges.append(_Range(number))
        if math.isfinite(value):
            self._ranges[-1].add(value, value, value, 1)

    def _widen(self) -> None:
        """Merge pairs of ranges; for sparse steps, a pair may have only one range."""
        self.generation += 1
        self.width *= 2
        narrow, self._ranges = self._ranges, []
        for old in narrow:
            if not self._ranges or self._ranges[-1].number != old.number // 2:
                self._ranges.append(_Range(old.number // 2))
            self._ranges[-1].add(old.low, old.high, old.total, old.count)


def _row(found: _Range, width: int) -> Row:
    if not found.count:
        return (found.number * width, None, None, None)
    mean = found.total / found.count
    return (found.number * width, _rounded(found.low), _rounded(found.high), _rounded(mean))


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")
