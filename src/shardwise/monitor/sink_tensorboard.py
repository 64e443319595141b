"""TensorBoard as a sink: event files in a folder per run, written by its own writer; neither torch nor TensorFlow."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.text.metadata import create_summary_metadata
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from shardwise.monitor.sink_feed import as_markdown

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardwise.monitor.ranks import Entry
    from shardwise.monitor.sink_feed import About, MetricPoint


class TensorboardSink:
    """One folder under DIR, named as the run; `tensorboard --logdir DIR` shows it."""

    def __init__(self, target: str, about: About, tracker_id: str) -> None:
        self.is_new = not tracker_id or not Path(tracker_id).is_dir()
        self.tracker_id = str(_fresh(Path(target).resolve(), about.name)) if self.is_new else tracker_id
        self.where = self.tracker_id
        self._writer = EventFileWriter(self.tracker_id)
        self._last = -1
        if self.is_new:
            self._write_text("run", as_markdown({"run": about.path, **about.config}), step=0)

    def log(self, points: Sequence[MetricPoint]) -> None:
        """Append scalars."""
        for point in points:
            value = Summary.Value(tag=point.name, simple_value=point.value)
            self._writer.add_event(Event(wall_time=point.at, step=point.step, summary=Summary(value=[value])))
            self._last = max(self._last, point.step)
        self._writer.flush()

    def tell(self, notes: Sequence[Entry]) -> None:
        """Show the notes as text; the newest text is the one that is shown."""
        lines = [f"- {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(note.at))} {note.text}" for note in notes]
        self._write_text("notes", "\n".join(lines), step=len(notes))
        self._writer.flush()

    def finish(self, state: str, result: Mapping[str, Any]) -> None:
        """Show the result as text."""
        self._write_text("result", as_markdown({"state": state, **result}), step=max(0, self._last))

    def close(self) -> None:
        """Write what is buffered and close the file."""
        self._writer.close()

    def _write_text(self, tag: str, words: str, *, step: int) -> None:
        tensor = TensorProto(dtype=DT_STRING, string_val=[words.encode()])
        value = Summary.Value(tag=tag, metadata=create_summary_metadata("", ""), tensor=tensor)
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=[value])))


def _fresh(folder: Path, name: str) -> Path:
    """Return a folder that no other run has taken."""
    names = itertools.chain([name], (f"{name}~{number}" for number in itertools.count(2)))
    return next(folder / name for name in names if not (folder / name).exists())
