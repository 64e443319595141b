"""The events of a run that a tracker does not have yet, as points of curves and notes."""

from __future__ import annotations

import contextlib
import math
import tomllib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from shardwise.runs.state import RunState

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from shardwise.runs import RunDirectory
    from shardwise.runs.status import Entry


_NOTED = {"restart", "note", "verdict", "exit"}
"""Entries of a run's history that are worth a note beside the curves."""


class MetricPoint(NamedTuple):
    """One value of one curve."""

    name: str
    step: int
    value: float
    """May be NaN."""
    at: float
    """Seconds since the epoch."""


class TrackerFeed:
    """Reads the events of all ranks and launchers from their start.

    Each curve only grows: a step that a restart repeated, or that an earlier mirror sent, is not sent again.
    """

    def __init__(self, run: RunDirectory, last_steps: Mapping[str, int]) -> None:
        """`last_steps`: the last step of each curve that the tracker has."""
        self.last_steps = dict(last_steps)
        self.state = RunState(run, listener=self._take, all_ranks=True)
        self._points: list[MetricPoint] = []

    def read(self) -> list[MetricPoint]:
        """Return what is new in the next pieces of the files; empty when all was read."""
        while self.state.refresh() and not self._points:
            pass
        points, self._points = self._points, []
        return points

    def notes(self) -> list[Entry]:
        """Return the notes of all that was read so far, oldest first."""
        return [entry for entry in self.state.history.since(0) if entry.kind in _NOTED]

    def _take(self, writer: str, event: dict[str, Any]) -> None:
        for point in _points_of(writer, event):
            if point.step > self.last_steps.get(point.name, -1):
                self.last_steps[point.name] = point.step
                self._points.append(point)


def _points_of(writer: str, event: Mapping[str, Any]) -> list[MetricPoint]:
    """Return the points of one event; `writer` is rankN or a launcher."""
    try:
        if event["kind"] == "steps":
            return [*(_training(event) if writer == "rank0" else ()), *_memory(writer, event)]
        if event["kind"] == "evaluation" and writer == "rank0":
            values = event["values"].items()
            return [
                MetricPoint(f"evaluation/{name}", int(event["step"]), _number(v), float(event["at"]))
                for name, v in values
            ]
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError):
        pass  # written by another version
    return []


def _training(event: Mapping[str, Any]) -> Iterator[MetricPoint]:
    """Yield the loss of every step of a publication, and the other values once, for its last."""
    first, losses, at = int(event["first"]), event["losses"], float(event["at"])
    pace = float(event["seconds"]) / len(losses)
    for place, loss in enumerate(losses):
        yield MetricPoint("train/loss", first + place, _number(loss), at - pace * (len(losses) - 1 - place))
    last = first + len(losses) - 1
    once = {
        "train/learning_rate": event.get("lr"),
        "train/gradient_norm": event.get("grad_norm"),
        "train/epoch": event.get("epoch"),
        "train/samples_per_s": event["samples"] / event["seconds"],
    }
    for name, value in once.items():
        if value is not None:
            yield MetricPoint(name, last, float(value), at)


def _memory(writer: str, event: Mapping[str, Any]) -> Iterator[MetricPoint]:
    if event.get("memory_bytes") is not None:
        last = int(event["first"]) + len(event["losses"]) - 1
        yield MetricPoint(f"memory_gib/{writer}", last, float(event["memory_bytes"]) / 2**30, float(event["at"]))


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


# What a tracker gets of a run beside its curves: the job, the plan, the world it started in, and the result.


@dataclass(frozen=True, kw_only=True)
class About:
    """A run as a tracker lists it."""

    name: str
    path: str
    config: dict[str, str | int | float | bool]
    """Flat: job.*, plan.*, world.*, model.*, training.*"""


def describe_run(state: RunState) -> About:
    """Return job, plan and world of a run; a part that is missing or broken is left out."""
    run, start = state.run, state.training.start
    ranks = start.get("ranks", [])
    facts = {
        "job": _read(run.job, msgspec.json.decode),
        "plan": _read(run.plan, lambda content: tomllib.loads(content.decode())),
        "world": {
            "size": len(ranks),
            "hosts": ", ".join(dict.fromkeys(str(rank.get("host")) for rank in ranks)),
            "devices": ", ".join(dict.fromkeys(str(rank.get("device")) for rank in ranks)),
        },
        "model": {"parameters": start.get("parameters")},
        "training": {"steps": start.get("num_steps")},
    }
    path = run.path.resolve()
    return About(name=path.name, path=str(path), config=dict(flat(facts)))


def read_result(run: RunDirectory) -> dict[str, str | int | float | bool]:
    """Return the result of the final report, flat; empty where there is none."""
    return dict(flat(_read(run.report_json, msgspec.json.decode).get("result", {})))


def flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str | int | float | bool]]:
    """Yield names with dots and plain values; lists as text, nothing for None and for what is empty."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from flat(value, f"{before}{name}.")
        elif isinstance(value, str | int | float | bool):
            yield before + name, value
        elif value:
            yield before + name, ", ".join(str(part) for part in value)


def as_markdown(values: Mapping[str, Any]) -> str:
    """Return a table of names and values."""
    rows = [f"| {name} | {str(value).replace('|', '/')} |" for name, value in values.items()]
    return "\n".join(["| | |", "|---|---|", *rows])


def _read(path: Path, decode: Any) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        content = decode(path.read_bytes())
        if isinstance(content, dict):
            return content
    return {}
