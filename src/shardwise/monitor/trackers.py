"""Sinks for TensorBoard, Weights & Biases and MLflow; each imports its package when it is opened."""

from __future__ import annotations

import itertools
import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.errors import InputError
from shardwise.monitor.sink_feed import as_markdown

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardwise.monitor.sink_feed import About, MetricPoint
    from shardwise.runs.status import Entry

_MOST = 1000
"""Metrics in one request, and at most 100 parameters: MLflow's limits."""
_STATUS = {"finished": "FINISHED", "stopped": "KILLED"}


def _note_lines(notes: Sequence[Entry], bullet: str = "") -> str:
    times = [time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(note.at)) for note in notes]
    return "\n".join(f"{bullet}{at} {note.text}" for at, note in zip(times, notes, strict=True))


class TensorboardSink:
    """One folder under DIR, named as the run; `tensorboard --logdir DIR` shows it."""

    def __init__(self, target: str, about: About, tracker_id: str) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.is_new = not tracker_id or not Path(tracker_id).is_dir()
        self.tracker_id = str(_fresh(Path(target).resolve(), about.name)) if self.is_new else tracker_id
        self.where = self.tracker_id
        self._writer = EventFileWriter(self.tracker_id)
        self._last = -1
        if self.is_new:
            self._write_text("run", as_markdown({"run": about.path, **about.config}), step=0)

    def log(self, points: Sequence[MetricPoint]) -> None:
        """Append scalars."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        for point in points:
            self._add(Summary.Value(tag=point.name, simple_value=point.value), step=point.step, at=point.at)
            self._last = max(self._last, point.step)
        self._writer.flush()

    def show_notes(self, notes: Sequence[Entry]) -> None:
        """Show the notes as text; the newest text is the one that is shown."""
        self._write_text("notes", _note_lines(notes, "- "), step=len(notes))
        self._writer.flush()

    def finish(self, state: str, result: Mapping[str, Any]) -> None:
        """Show the result as text."""
        self._write_text("result", as_markdown({"state": state, **result}), step=max(0, self._last))

    def close(self) -> None:
        """Write what is buffered and close the file."""
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


def _fresh(folder: Path, name: str) -> Path:
    """Return a folder that no other run has taken."""
    names = itertools.chain([name], (f"{name}~{number}" for number in itertools.count(2)))
    return next(folder / name for name in names if not (folder / name).exists())


class WandbSink:
    """One run of PROJECT or ENTITY/PROJECT, with `step` as its axis."""

    def __init__(self, target: str, about: About, tracker_id: str) -> None:
        import wandb

        entity, _, project = target.rpartition("/")
        self.is_new = not tracker_id
        self.tracker_id = tracker_id or secrets.token_hex(4)
        settings = wandb.Settings(
            silent=True,  # this process reports where to look, in one line
            console="off",
            disable_git=True,
            disable_code=True,
            x_disable_stats=True,  # of this process, which is not the one that trains
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
            reason = (str(error).strip().splitlines() or ["without a reason"])[0]
            raise InputError(
                f"wandb refuses ({reason})", code="watch.wandb-refused", fix="wandb login, or set WANDB_MODE=offline"
            ) from error
        folder = self._run.dir.removesuffix("/files")
        self.where = f"{folder} (wandb sync uploads it)" if self._run.offline else str(self._run.url)
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def log(self, points: Sequence[MetricPoint]) -> None:
        """Log the points, one row a step."""
        for step, row in itertools.groupby(sorted(points, key=lambda point: point.step), key=lambda point: point.step):
            values = list(row)
            at = max(point.at for point in values)
            self._run.log({"step": step, "_timestamp": at, **{point.name: point.value for point in values}})

    def show_notes(self, notes: Sequence[Entry]) -> None:
        """Show the notes in the run's overview, and tag a run that was restarted."""
        self._run.notes = _note_lines(notes)
        if any(note.kind == "restart" for note in notes) and "restarted" not in (self._run.tags or ()):
            self._run.tags = (*(self._run.tags or ()), "restarted")

    def finish(self, state: str, result: Mapping[str, Any]) -> None:
        """Put state and result into the run's summary."""
        self._run.summary.update({"state": state, **{f"result.{name}": value for name, value in result.items()}})
        self._run.finish(exit_code=0 if state in {"finished", "stopped"} else 1)

    def close(self) -> None:
        """Send what is buffered."""
        self._run.finish()


class MlflowSink:
    """One run of EXPERIMENT, which is created where it does not exist."""

    def __init__(self, target: str, about: About, tracker_id: str) -> None:
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        try:
            self._client = MlflowClient()
            self.is_new = not tracker_id or not self._exists(tracker_id)
            self.tracker_id = self._create(target, about) if self.is_new else tracker_id
        except MlflowException as error:
            reason = (str(error).strip().splitlines() or ["without a reason"])[0]
            raise InputError(
                f"mlflow refuses ({reason})",
                code="watch.mlflow-refused",
                fix="set MLFLOW_TRACKING_URI to a store that works",
            ) from error
        self._client.set_terminated(self.tracker_id, "RUNNING")
        self.where = f"run {self.tracker_id} of experiment {target} in {self._client.tracking_uri}"

    def log(self, points: Sequence[MetricPoint]) -> None:
        """Log the points in as few requests as MLflow allows."""
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
        """Set the result as tags, and the status."""
        from mlflow.entities import RunTag

        tags = [RunTag(f"result.{name}", str(value)) for name, value in result.items()]
        self._client.log_batch(self.tracker_id, tags=[RunTag("shardwise.state", state), *tags])
        self._client.set_terminated(self.tracker_id, _STATUS.get(state, "FAILED"))

    def close(self) -> None:
        """Nothing is buffered: each request is whole."""

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
