"""A run in a terminal: figures, curves, one row a rank, what happened; still, or alive until the run ends."""

from __future__ import annotations

import contextlib
import io
import sys
import time
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from shardwise.monitor.drawing import bounds, draw_curve
from shardwise.monitor.folded import fold_ranks
from shardwise.monitor.words import byte_words, count_words, number_words, time_words
from shardwise.runs.rank_words import rank_spans

if TYPE_CHECKING:
    from rich.console import RenderableType

    from shardwise.monitor.folded import Alike
    from shardwise.monitor.status import Entry, RunStatus
    from shardwise.monitor.thin import Curve
    from shardwise.monitor.view import RunView

REFRESH_S = 0.5
LATE_S = 1.0
"""Of lag: less is the jitter of a healthy step."""
_PIPE = (110, 50)
"""Columns and lines of a picture that goes to no terminal."""
_STATES = {"running": "bold blue", "finished": "bold green", "done": "green"}
_MOODS = {"good": "green", "warn": "yellow", "bad": "red"}
_CHART_LINES = 5
_NOTHING = "-"


def show_once(view: RunView) -> None:
    """Write one picture of the run to standard output."""
    view.refresh_whole()
    console = _console()
    with contextlib.suppress(OSError):  # a closed terminal or pipe is nobody to talk to, not a failure
        console.print(picture(view, console))


def show_live(view: RunView) -> None:
    """Show the run until it is over; an interrupt ends the showing, and nothing else."""
    console = _console()
    view.refresh_whole()
    with Live(picture(view, console), console=console, auto_refresh=False, vertical_overflow="crop") as live:
        try:
            while not view.is_over:
                time.sleep(REFRESH_S)
                view.refresh_whole()
                live.update(picture(view, console), refresh=True)
        except KeyboardInterrupt:
            return


def _console() -> Console:
    stream = sys.stdout
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")  # a terminal that knows ASCII only sees question marks, not an error
    if stream.isatty():
        return Console(file=stream, highlight=False)
    return Console(file=stream, highlight=False, width=_PIPE[0], height=_PIPE[1])


def picture(view: RunView, console: Console) -> RenderableType:
    """Return the run as it is now, in no more lines than the console has where that is possible."""
    status = view.status()
    braille = console.encoding.lower().startswith("utf")
    parts = [*_header(status), *_charts(view.training.curves, console.width, braille=braille)]
    entries = sorted(view.story.since(0), key=lambda entry: (entry.at, entry.number))
    taken = sum(_height(part) for part in parts)
    room = max(8, console.height - taken - 4)
    told = min(len(entries), max(3, room // 3))
    if status.ranks:
        alike = fold_ranks(status.ranks, max(3, room - told))
        parts += [Text(), _ranks(alike, status)]
    if told:
        parts += [Text(), *(_entry(entry) for entry in entries[-told:])]
    return Group(*parts)


def _height(part: RenderableType) -> int:
    return part.row_count if isinstance(part, Table) else 1


def _header(status: RunStatus) -> list[RenderableType]:
    parameters = f"{count_words(status.parameters)} parameters" if status.parameters else ""
    facts = " · ".join(fact for fact in (status.job, status.plan, parameters) if fact)
    state = (f" {status.state} ", _STATES.get(status.state, "bold red"))
    lines: list[RenderableType] = [Text.assemble((status.name, "bold"), " ", state, (facts, "dim"))]
    if status.num_steps:
        line = Table.grid(padding=(0, 2), expand=True)
        line.add_column(no_wrap=True)
        line.add_column(ratio=1)
        line.add_column(no_wrap=True)
        done = f"step {count_words(status.step)} of {count_words(status.num_steps)}"
        left = f"{time_words(status.eta_s)} to go" if status.eta_s is not None else ""
        line.add_row(done, ProgressBar(total=status.num_steps, completed=status.step), left)
        lines.append(line)
    figures = [text for text in _figures(status) if text]
    if figures:
        lines.append(Text(" · ".join(figures)))
    if status.verdict:
        lines.append(Text(status.verdict, "bold red"))
    return lines


def _figures(status: RunStatus) -> list[str]:
    tested = ", ".join(f"test {name} {number_words(value)}" for name, value in status.evaluation.items())
    kind = "resident" if status.is_resident else "memory"
    memory = f"{kind} {byte_words(status.memory_bytes)} (rank {status.memory_rank})" if status.memory_bytes else ""
    predicted = f"predicted {byte_words(status.predicted_bytes)} of tensors" if status.predicted_bytes else ""
    ran = "running for" if status.state == "running" else "ran for"
    return [
        f"loss {number_words(status.loss)}" if status.num_steps else "",
        tested,
        f"{count_words(status.samples_per_s)} samples/s" if status.samples_per_s else "",
        memory,
        predicted or (f"nothing predicted: {status.prediction}" if status.prediction else ""),
        f"{status.restarts} restart{'' if status.restarts == 1 else 's'}" if status.restarts else "",
        f"{len(status.checkpoints)} saves, last at step {count_words(status.checkpoints[0].step)}"
        if status.checkpoints
        else "",
        f"{ran} {time_words(max(0.0, status.now - status.began_at))}" if status.began_at else "",
    ]


def _charts(curves: dict[str, Curve], width: int, *, braille: bool) -> list[RenderableType]:
    shown = [(title, curves[name], style) for title, name, style in _CURVES if len(curves[name]) > 1]
    if not shown:
        return []
    grid = Table.grid(padding=(0, 2))
    each = max(16, (width - 2) // len(shown) - 12)
    cells = []
    for title, curve, style in shown:
        rows = curve.rows()
        low, high = bounds(rows, from_zero=title != "loss")
        lines = draw_curve(rows, each, _CHART_LINES, low, high, braille=braille)
        gutter = [number_words(high), *[""] * (_CHART_LINES - 2), number_words(low)]
        text = Text(f"{title}\n", "dim")
        for label, line in zip(gutter, lines, strict=True):
            text.append(f"{label:>8} ", "dim").append(f"{line}\n", style)
        text.rstrip()
        cells.append(text)
    grid.add_row(*cells)
    return [Text(), *([grid] if cells else [])]


_CURVES = (("loss", "loss", "blue"), ("samples/s", "throughput", "cyan"))


_FIGURES = ("for", "step", "behind", "memory")
"""Columns of the rank table that hold numbers."""


def _ranks(alike: list[Alike], status: RunStatus) -> Table:
    """One row for ranks that are alike; columns that hold nothing are left out, and the last one takes what is left."""
    rows = [_row(same, status) for same in alike]
    names = [name for name in rows[0] if any(row[name] != _NOTHING for row in rows)]
    table = Table(box=None, pad_edge=False, header_style="dim", expand=True)
    for name in names:
        # rich narrows the columns that may wrap: that is the last alone, whose text is cut short rather than wrapped.
        table.add_column(name, justify="right" if name in _FIGURES else "left", no_wrap=name != names[-1])
    for same, row in zip(alike, rows, strict=True):
        table.add_row(*(row[name] for name in names), style="bold red" if (same.worst.lag_s or 0.0) >= LATE_S else "")
    return table


def _row(same: Alike, status: RunStatus) -> dict[str, str | Text]:
    worst = same.worst
    since = worst.since is not None and worst.state == "running"
    text = f"{worst.state}: {worst.words}" if worst.words else worst.state
    return {
        "rank": rank_spans(same.ranks) if same.ranks else same.words,
        "host": same.host,
        "device": same.device or _NOTHING,
        "phase": worst.phase or _NOTHING,
        "for": time_words(max(0.0, status.now - (worst.since or 0.0))) if since else _NOTHING,
        "step": count_words(worst.step),
        "behind": _lag(worst.lag_s, worst.lag_steps),
        "memory": byte_words(same.memory_bytes),
        "state": Text(text, _STATES.get(worst.state, "red"), no_wrap=True, overflow="ellipsis"),
    }


def _lag(seconds: float | None, steps: int | None) -> str:
    if seconds is None:
        return _NOTHING
    return time_words(seconds) + (f", {steps} step{'' if steps == 1 else 's'}" if steps else "")


def _entry(entry: Entry) -> Text:
    whose = f"rank {entry.rank}: " if entry.rank is not None else ""
    at = time.strftime("%H:%M:%S", time.localtime(entry.at))
    text = Text.assemble((f"{at} ", "dim"), (whose + entry.text, _MOODS.get(entry.mood, "")))
    text.no_wrap, text.overflow = True, "ellipsis"
    return text
