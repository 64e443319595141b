"""Weights & Biases as a sink: one run of a project, online or offline as WANDB_MODE and `wandb login` say."""

from __future__ import annotations

import secrets
import time
from itertools import groupby
from typing import TYPE_CHECKING, Any

import wandb

from shardwise.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardwise.monitor.ranks import Entry
    from shardwise.monitor.sink_feed import About, MetricPoint


class WandbSink:
    """One run of PROJECT or ENTITY/PROJECT, with `step` as its axis."""

    def __init__(self, target: str, about: About, tracker_id: str) -> None:
        entity, _, project = target.rpartition("/")
        self.is_new = not tracker_id
        self.tracker_id = tracker_id or secrets.token_hex(4)
        settings = wandb.Settings(
            silent=True,  # this process says where to look, in one line
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
            words = (str(error).strip().splitlines() or ["it said nothing"])[0]
            raise InputError(
                f"wandb refuses ({words})", code="watch.wandb-refused", fix="wandb login, or set WANDB_MODE=offline"
            ) from error
        folder = self._run.dir.removesuffix("/files")
        self.where = f"{folder} (wandb sync uploads it)" if self._run.offline else str(self._run.url)
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def log(self, points: Sequence[MetricPoint]) -> None:
        """Log the points, one row a step."""
        for step, row in groupby(sorted(points, key=lambda point: point.step), key=lambda point: point.step):
            values = list(row)
            at = max(point.at for point in values)
            self._run.log({"step": step, "_timestamp": at, **{point.name: point.value for point in values}})

    def tell(self, notes: Sequence[Entry]) -> None:
        """Show the notes in the run's overview, and tag a run that was restarted."""
        lines = [f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(note.at))} {note.text}" for note in notes]
        self._run.notes = "\n".join(lines)
        if any(note.kind == "restart" for note in notes) and "restarted" not in (self._run.tags or ()):
            self._run.tags = (*(self._run.tags or ()), "restarted")

    def finish(self, state: str, result: Mapping[str, Any]) -> None:
        """Put state and result into the run's summary."""
        self._run.summary.update({"state": state, **{f"result.{name}": value for name, value in result.items()}})
        self._run.finish(exit_code=0 if state in {"finished", "stopped"} else 1)

    def close(self) -> None:
        """Send what is buffered."""
        self._run.finish()
