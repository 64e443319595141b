"""The experiment trackers TensorBoard, Weights & Biases and MLflow, and the feed of new events for them."""

from __future__ import annotations

import contextlib
import itertools
import math
import secrets
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from shardwise.errors import InputError
from shardwise.runs.state import RunState

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from shardwise.runs import RunDirectory
    from shardwise.runs.status import Entry

_MOST = 1000
"""MLflow's limit of metrics per request; its limit of parameters is 100."""
_STATUS = {"finished": "FINISHED", "stopped": "KILLED"}


def _note_lines(notes: Sequence[Entry], bullet: str = "") -> str:
    times = [time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(note.at)) for note in notes]
    return "\n".join(f"{bullet}{at} {note.text}" for at, note in zip(times, notes, strict=True))


class TensorboardSink:
    """A run as a directory under DIR with the name of the run; `tensorboard --logdir DIR` shows it."""

    def __init__(self, target: str, about: About, tracker_id: str) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.is_new = not tracker_id or not Path(tracker_id).is_dir()
        self.tracker_id = tracker_id
        if self.is_new:
            self.tracker_id = str(_unused(Path(target).resolve(), about.name))
        self.where = self.tracker_id
        self._writer = EventFileWriter(self.tracker_id)
        self._last = -1
        if self.is_new:
            self._write_text("run", as_markdown({"run": about.path, **about.config}), step=0)

    def log(self, points: Sequence[MetricPoint]) -> None:
        """Write the points as scalars."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        for point in points:
            self._add(Summary.Value(tag=point.name, simple_value=point.value), step=point.step, at=point.at)
            self._last = max(self._last, point.step)
        self._writer.flush()

    def show_notes(self, notes: Sequence[Entry]) -> None:
        """Write the notes as text; TensorBoard shows the newest text."""
        self._write_text("notes", _note_lines(notes, "- "), step=len(notes))
        self._writer.flush()

    def finish(self, state: str, result: Mapping[str, Any]) -> None:
        """Write the result as text."""
        self._write_text("result", as_markdown({"state": state, **result}), step=max(0, self._last))

    def close(self) -> None:
        """Flush and close the file."""
        self._writer.close()

    def _write_text(self, tag: str, text: str, *, step: int) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING
        from tensorboard.plugins.text.metadata import create_summary_metadata

        tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode()])
        self._add(Summary.Value(tag=tag, metadata=create_summary_metadata("", ""), tensor=tensor), step, time.time())

    def _add(self, value: Any, step: int, at: float) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._writer.add_event(Event(wall_time=at, step=step, summary=Summary(value=[value])))


def _unused(directory: Path, name: str) -> Path:
    """Return a path in `directory` that does not exist: NAME, NAME~2, NAME~3 ..."""
    path = directory / name
    for number in itertools.count(2):
        if not path.exists():
            break
        path = directory / f"{name}~{number}"
    return path


class WandbSink:
    """A run of PROJECT or ENTITY/PROJECT with `step` as the x-axis."""

    def __init__(self, target: str, about: About, tracker_id: str) -> None:
        import wandb

        entity, _, project = target.rpartition("/")
        self.is_new = not tracker_id
        self.tracker_id = tracker_id or secrets.token_hex(4)
        settings = wandb.Settings(
            silent=True,  # `mirror` prints the address
            console="off",
            disable_git=True,
            disable_code=True,
            x_disable_stats=True,  # system metrics of this process, which does not train
        )
        try:
            self._run = wandb.init(
                project=project,
                entity=entity or None,
                id=self.tracker_id,
                name=about.name,
                config={"run": about.path, **about.config},
                resume="allow",
                settings=settings,
            )
        except wandb.errors.UsageError as error:
            reason = (str(error).strip().splitlines() or ["no reason given"])[0]
            raise InputError(
                f"wandb.init failed ({reason})",
                code="watch.wandb-refused",
                fix="run wandb login, or set WANDB_MODE=offline",
            ) from error
        directory = self._run.dir.removesuffix("/files")
        self.where = f"{directory} (wandb sync uploads it)" if self._run.offline else str(self._run.url)
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def log(self, points: Sequence[MetricPoint]) -> None:
        """Log the points, one row per step."""
        rows: dict[int, list[MetricPoint]] = {}
        for point in points:
            rows.setdefault(point.step, []).append(point)
        for step, row in sorted(rows.items()):
            at = max(point.at for point in row)
            self._run.log({"step": step, "_timestamp": at, **{point.name: point.value for point in row}})

    def show_notes(self, notes: Sequence[Entry]) -> None:
        """Show the notes in the run's overview, and tag a run that was restarted."""
        self._run.notes = _note_lines(notes)
        tags = self._run.tags or ()
        has_restarted = any(note.kind == "restart" for note in notes)
        if has_restarted and "restarted" not in tags:
            self._run.tags = (*tags, "restarted")

    def finish(self, state: str, result: Mapping[str, Any]) -> None:
        """Write state and result into the run's summary."""
        self._run.summary.update({"state": state, **{f"result.{name}": value for name, value in result.items()}})
        self._run.finish(exit_code=0 if state in {"finished", "stopped"} else 1)

    def close(self) -> None:
        """Flush and close the run."""
        self._run.finish()


class MlflowSink:
    """A run of EXPERIMENT, which is created if it does not exist."""

    def __init__(self, target: str, about: About, tracker_id: str) -> None:
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        try:
            self._client = MlflowClient()
            self.is_new = not tracker_id or not self._exists(tracker_id)
            self.tracker_id = self._create(target, about) if self.is_new else tracker_id
        except MlflowException as error:
            reason = (str(error).strip().splitlines() or ["no reason given"])[0]
            raise InputError(
                f"the MLflow tracking store failed ({reason})",
                code="watch.mlflow-refused",
                fix="set MLFLOW_TRACKING_URI to a working store",
            ) from error
        self._client.set_terminated(self.tracker_id, "RUNNING")
        self.where = f"run {self.tracker_id} of experiment {target} in {self._client.tracking_uri}"

    def log(self, points: Sequence[MetricPoint]) -> None:
        """Log the points in batches of MLflow's maximum size."""
        from mlflow.entities import Metric

        metrics = [Metric(point.name, point.value, round(1000 * point.at), point.step) for point in points]
        for start in range(0, len(metrics), _MOST):
            self._client.log_batch(self.tracker_id, metrics=metrics[start : start + _MOST])

    def show_notes(self, notes: Sequence[Entry]) -> None:
        """Show the notes as the run's description, and count restarts in a tag."""
        restarts = sum(note.kind == "restart" for note in notes)
        self._client.set_tag(self.tracker_id, "mlflow.note.content", _note_lines(notes, "- "))
        self._client.set_tag(self.tracker_id, "shardwise.restarts", str(restarts))

    def finish(self, state: str, result: Mapping[str, Any]) -> None:
        """Set the result as tags, and the final status of the run."""
        from mlflow.entities import RunTag

        tags = [RunTag(f"result.{name}", str(value)) for name, value in result.items()]
        self._client.log_batch(self.tracker_id, tags=[RunTag("shardwise.state", state), *tags])
        self._client.set_terminated(self.tracker_id, _STATUS.get(state, "FAILED"))

    def close(self) -> None:
        """Do nothing: requests are not buffered."""

    def _exists(self, run_id: str) -> bool:
        from mlflow.exceptions import MlflowException

        try:
            self._client.get_run(run_id)
        except MlflowException:
            return False
        return True

    def _create(self, name: str, about: About) -> str:
        from mlflow.entities import Param

        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found is not None else self._client.create_experiment(name)
        run = self._client.create_run(experiment, run_name=about.name, tags={"shardwise.runs": about.path})
        params = [Param(key, str(value)[:500]) for key, value in about.config.items()]
        self._client.log_batch(run.info.run_id, params=params[:100])
        return str(run.info.run_id)


_NOTED = {"restart", "note", "verdict", "exit"}
"""Kinds of history entries that trackers show as notes."""


class MetricPoint(NamedTuple):
    """One value of one curve."""

    name: str
    step: int
    value: float
    """May be NaN."""
    at: float
    """Seconds since the epoch."""


class TrackerFeed:
    """Reads the events of all ranks and launchers from their start, and returns new points.

    Steps of a curve only increase: a step that a restart repeated, or that an earlier mirror sent, is not sent again.
    """

    def __init__(self, run: RunDirectory, last_steps: Mapping[str, int]) -> None:
        """Start after `last_steps`, the last step of each curve that the tracker has."""
        self.last_steps = dict(last_steps)
        self.state = RunState(run, listener=self._add_points, all_ranks=True)
        self._points: list[MetricPoint] = []

    def read(self) -> list[MetricPoint]:
        """Return the new points in the next chunks of the files; empty once all files are read."""
        while self.state.refresh() and not self._points:
            pass
        points, self._points = self._points, []
        return points

    def notes(self) -> list[Entry]:
        """Return all notes so far, oldest first."""
        return [entry for entry in self.state.history.since(0) if entry.kind in _NOTED]

    def _add_points(self, writer: str, event: dict[str, Any]) -> None:
        for point in _points_of(writer, event):
            if point.step > self.last_steps.get(point.name, -1):
                self.last_steps[point.name] = point.step
                self._points.append(point)


def _points_of(writer: str, event: Mapping[str, Any]) -> list[MetricPoint]:
    """Return the points of one event; `writer` is rankN or a launcher."""
    try:
        if event["kind"] == "steps" and writer == "rank0":
            return [*_training(event), *_memory(writer, event)]
        if event["kind"] == "steps":
            return list(_memory(writer, event))
        if event["kind"] == "evaluation" and writer == "rank0":
            return list(_values(event, "evaluation/"))
        if event["kind"] == "log" and writer == "rank0":
            return list(_values(event, ""))
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError):
        pass  # written by another version
    return []


def _training(event: Mapping[str, Any]) -> Iterator[MetricPoint]:
    """Yield the loss of every step of a `steps` event, and the other values for its last step; steps count from 1."""
    first, losses, at = int(event["first"]) + 1, event["losses"], float(event["at"])
    last = first + len(losses) - 1
    seconds_per_step = float(event["seconds"]) / len(losses)
    for step, loss in enumerate(losses, first):
        yield MetricPoint("train/loss", step, _number(loss), at - seconds_per_step * (last - step))
    once = {
        "train/learning_rate": event.get("lr"),
        "train/gradient_norm": event.get("grad_norm"),
        "train/epoch": event.get("epoch"),
        "train/samples_per_s": event["samples"] / event["seconds"],
    }
    for name, value in once.items():
        if value is not None:
            yield MetricPoint(name, last, float(value), at)


def _values(event: Mapping[str, Any], prefix: str) -> Iterator[MetricPoint]:
    """Yield the values of an `evaluation` event, or of a `log` event."""
    for name, value in event["values"].items():
        yield MetricPoint(prefix + name, int(event["step"]), _number(value), float(event["at"]))


def _memory(writer: str, event: Mapping[str, Any]) -> Iterator[MetricPoint]:
    if event.get("memory_bytes") is not None:
        last = int(event["first"]) + len(event["losses"])
        yield MetricPoint(f"memory_gib/{writer}", last, float(event["memory_bytes"]) / 2**30, float(event["at"]))


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


# The configuration of a run for trackers: the job, the plan and the world; and its result.


@dataclass(frozen=True, kw_only=True)
class About:
    """Name, path and configuration of a run."""

    name: str
    path: str
    config: dict[str, str | int | float | bool]
    """Flat keys: job.*, plan.*, world.*, model.*, training.*"""


def describe_run(state: RunState) -> About:
    """Return the configuration of a run: job, plan and world; missing or invalid files are ignored."""
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
    """Return the result of the final report with flat keys; empty without a report."""
    return dict(flat(_read(run.report_json, msgspec.json.decode).get("result", {})))


def flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str | int | float | bool]]:
    """Yield dotted names and scalar values; lists become text, None and empty values are omitted."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from flat(value, f"{before}{name}.")
        elif isinstance(value, str | int | float | bool):
            yield before + name, value
        elif value:
            yield before + name, ", ".join(str(part) for part in value)


def as_markdown(values: Mapping[str, Any]) -> str:
    """Return a Markdown table of names and values."""
    rows = [f"| {name} | {str(value).replace('|', '/')} |" for name, value in values.items()]
    return "\n".join(["| | |", "|---|---|", *rows])


def _read(path: Path, decode: Any) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        content = decode(path.read_bytes())
        if isinstance(content, dict):
            return content
    return {}
