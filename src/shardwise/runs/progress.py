"""Progress of a run: a live bar on a terminal, otherwise a line every few seconds; and the final report."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TextIO

    from rich.progress import TaskID

    from shardwise.runs.directory import RunDirectory
    from shardwise.runs.recorder import Phase


PLAIN_S = 5.0
"""Seconds between lines without a terminal."""
_UNWRAPPED = 10_000
"""Width in columns without a terminal: no line is wrapped, so that grep finds whole lines."""


class ProgressView:
    """Shows the progress of a training run from the events of rank 0."""

    def __init__(self, stream: TextIO) -> None:
        is_terminal = stream.isatty()
        self._console = Console(file=stream, highlight=False, width=None if is_terminal else _UNWRAPPED)
        self._bar = _live_bar(self._console) if is_terminal else None
        self._task: TaskID | None = None
        self._num_steps = 0
        self._next_line_at = 0.0
        self._speed: float | None = None

    @classmethod
    def on_stderr(cls) -> ProgressView:
        """Return a view that writes to this process's standard error."""
        return cls(sys.stderr)

    def show(self, event: dict[str, Any]) -> None:
        """Show one event; unknown kinds are skipped."""
        show_kind = getattr(self, f"_show_{event['kind']}", None)
        if show_kind is not None:
            show_kind(event)

    def line(self, text: str) -> None:
        """Show a line above the bar, without markup."""
        self._console.print(text, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Stop the bar and restore the terminal."""
        if self._bar is not None:
            self._bar.stop()

    def _show_start(self, event: dict[str, Any]) -> None:
        self._num_steps = event["num_steps"]
        for table in _start_tables(event):
            self._console.print(table, end="\n\n")
        if self._bar is not None:
            self._task = self._bar.add_task("train", total=self._num_steps, loss="", speed="", rate="")
            self._bar.start()

    def _show_steps(self, event: dict[str, Any]) -> None:
        done = event["first"] + len(event["losses"])
        loss = event["losses"][-1]
        loss_text = f"loss {loss:.4f}" if loss is not None else "loss nan"
        speed = f"{self._smooth(event['samples'], event['seconds']):,.0f} samples/s"
        rate = f"lr {event['lr']:.2e}"
        if event["skipped"]:
            self.line(f"note: skipped {event['skipped']} of the steps up to step {done}: the gradient was not finite")
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done, description="train", loss=loss_text, speed=speed, rate=rate)
            self._bar.refresh()
        elif time.monotonic() >= self._next_line_at or done == self._num_steps:
            self.line(f"step {done}/{self._num_steps} · epoch {event['epoch'] + 1} · {loss_text} · {speed} · {rate}")
            self._next_line_at = time.monotonic() + PLAIN_S

    def _smooth(self, samples: int, seconds: float) -> float:
        """Return smoothed samples per second; windows are weighted by their duration, since short ones are noisy."""
        speed = samples / max(seconds, 1e-9)
        if self._speed is not None:
            weight = min(1.0, 0.5 * seconds)
            speed = self._speed + weight * (speed - self._speed)
        self._speed = speed
        return speed

    def _show_evaluating(self, event: dict[str, Any]) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=f"evaluating, {event['batches']} batches", refresh=True)
        else:
            self.line(f"step {event['step']} · evaluating: {event['batches']} batches in {event['seconds']:.0f} s")

    def _show_evaluation(self, event: dict[str, Any]) -> None:
        values = " · ".join(f"{name} {_value(value)}" for name, value in event["values"].items())
        self.line(f"step {event['step']} · epoch {event['epoch'] + 1} · test: {values}")

    def _show_verdict(self, event: dict[str, Any]) -> None:
        self.line(f"shardwise: {event['text']}")

    def _show_note(self, event: dict[str, Any]) -> None:
        self.line(f"note: {event['text']}")


def _value(value: float | None) -> str:
    return "nan" if value is None else f"{value:.4f}"


def _live_bar(console: Console) -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        TextColumn("{task.completed}/{task.total}"),
        TextColumn("{task.fields[loss]}"),
        TextColumn("{task.fields[rate]}"),
        TextColumn("{task.fields[speed]}"),
        TimeRemainingColumn(compact=True),
    )
    # Without a refresh thread, the process of a rank stays single-threaded and the bar costs nothing between updates.
    return Progress(*columns, console=console, auto_refresh=False)


def _start_tables(event: dict[str, Any]) -> list[Table]:
    ranks = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("rank", "host", "device", "pid"):
        ranks.add_column(name, overflow="fold")
    for rank in event["ranks"]:
        ranks.add_row(*(str(rank[name]) for name in ("rank", "host", "device", "pid")))
    facts = Table(box=None, pad_edge=False, show_header=False)
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column(overflow="fold")
    facts.add_row("model", f"{event['parameters']:,} parameters")
    for name, value, source in event["facts"]:
        facts.add_row(name, Text.assemble(value, (f"  ({source})", "dim")))
    return [ranks, facts]


# The final report of a run as JSON and Markdown.


def write_report(run: RunDirectory, result: Any, phases: Sequence[Phase]) -> None:
    """Write report.json and report.md; `result` is a value that msgspec encodes as a JSON object."""
    values = msgspec.to_builtins(result)
    content = {"result": values, "start_up": msgspec.to_builtins(phases)}
    run.report_json.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=1))
    run.report_markdown.write_text(_markdown(run, values, phases))


def _markdown(run: RunDirectory, values: dict[str, Any], phases: Sequence[Phase]) -> str:
    lines = [f"# Run {run.path.name}", "", "| result | value |", "|---|---|"]
    lines += [f"| test {name} | {_text(value)} |" for name, value in values.get("evaluation", {}).items()]
    lines += [f"| {name} | {_text(value)} |" for name, value in values.items() if not isinstance(value, dict)]
    lines += ["", "| start-up of rank 0 | time |", "|---|---|"]
    lines += [f"| {phase.name} | {phase.seconds:.2f} s |" for phase in phases]
    files = "Plan: [plan.toml](plan.toml) · job: [job.json](job.json) · events, logs and errors per rank: this folder."
    return "\n".join([*lines, "", files, ""])


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
