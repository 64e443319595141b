"""MLflow as a sink: one run of an experiment, in the store that MLFLOW_TRACKING_URI names."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from shardwise.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardwise.monitor.ranks import Entry
    from shardwise.monitor.sink_feed import About, MetricPoint

_MOST = 1000
"""Metrics in one request, and at most 100 parameters: MLflow's limits."""
_STATUS = {"finished": "FINISHED", "stopped": "KILLED"}


class MlflowSink:
    """One run of EXPERIMENT, which is made when it is not there."""

    def __init__(self, target: str, about: About, tracker_id: str) -> None:
        try:
            self._client = MlflowClient()
            self.is_new = not tracker_id or not self._is_there(tracker_id)
            self.tracker_id = self._create(target, about) if self.is_new else tracker_id
        except MlflowException as error:
            words = (str(error).strip().splitlines() or ["it said nothing"])[0]
            raise InputError(
                f"mlflow refuses ({words})",
                code="watch.mlflow-refused",
                fix="set MLFLOW_TRACKING_URI to a store that works",
            ) from error
        self._client.set_terminated(self.tracker_id, "RUNNING")
        self.where = f"run {self.tracker_id} of experiment {target} in {self._client.tracking_uri}"

    def log(self, points: Sequence[MetricPoint]) -> None:
        """Log the points in as few requests as MLflow allows."""
        metrics = [Metric(point.name, point.value, round(1000 * point.at), point.step) for point in points]
        for start in range(0, len(metrics), _MOST):
            self._client.log_batch(self.tracker_id, metrics=metrics[start : start + _MOST])

    def tell(self, notes: Sequence[Entry]) -> None:
        """Show the notes as the run's description, and count restarts in a tag."""
        lines = [f"- {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(note.at))} {note.text}" for note in notes]
        restarts = sum(note.kind == "restart" for note in notes)
        self._client.set_tag(self.tracker_id, "mlflow.note.content", "\n".join(lines))
        self._client.set_tag(self.tracker_id, "shardwise.restarts", str(restarts))

    def finish(self, state: str, result: Mapping[str, Any]) -> None:
        """Set the result as tags, and the status."""
        tags = [RunTag(f"result.{name}", str(value)) for name, value in result.items()]
        self._client.log_batch(self.tracker_id, tags=[RunTag("shardwise.state", state), *tags])
        self._client.set_terminated(self.tracker_id, _STATUS.get(state, "FAILED"))

    def close(self) -> None:
        """Nothing is held: each request is whole."""

    def _is_there(self, run_id: str) -> bool:
        try:
            self._client.get_run(run_id)
        except MlflowException:
            return False
        return True

    def _create(self, name: str, about: About) -> str:
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found is not None else self._client.create_experiment(name)
        run = self._client.create_run(experiment, run_name=about.name, tags={"shardwise.runs": about.path})
        params = [Param(key, str(value)[:500]) for key, value in about.config.items()]
        self._client.log_batch(run.info.run_id, params=params[:100])
        return str(run.info.run_id)
