"""A run in a terminal: figures, curves, one row a rank, what happened; still, or alive until the run ends."""

from __future__ import annotations

import contextlib
import io
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from shardwise.plots.text import bounds, draw_curve
from shardwise.runs.console import counted, rank_spans
from shardwise.runs.history import Row  # noqa: TC001 - read at run time by msgspec
from shardwise.runs.status import Entry, RunStatus  # noqa: TC001 - read at run time by msgspec
from shardwise.spec import Report
from shardwise.units import format_bytes, format_duration, format_number, format_whole

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from shardwise.runs.state import RunState
    from shardwise.runs.status import RankRow


REFRESH_S = 0.5
LATE_S = 1.0
"""Of lag: less is the jitter of a healthy step."""
_PIPE = (110, 50)
"""Columns and lines of a picture that goes to no terminal."""
_STATES = {"running": "bold blue", "finished": "bold green", "done": "green"}
_MOODS = {"good": "green", "warn": "yellow", "bad": "red"}
_CHART_LINES = 5
_NOTHING = "-"


class WatchReport(Report, frozen=True, kw_only=True):
    """A run at one moment: its status, its curves and what happened."""

    status: RunStatus
    curves: dict[str, list[Row]]
    entries: list[Entry]
    """The newest, oldest first."""

    def to_text(self) -> str:
        """Return the picture in plain characters, as a pipe gets it."""
        console = Console(file=io.StringIO(), highlight=False, width=_PIPE[0], height=_PIPE[1])
        with console.capture() as captured:
            console.print(picture(self, console))
        return captured.get()


def report_of(state: RunState) -> WatchReport:
    """Return the run as the last refresh found it."""
    curves = {name: curve.rows() for name, curve in state.training.curves.items()}
    return WatchReport(status=state.status(), curves=curves, entries=state.history.since(0))


def show(state: RunState) -> None:
    """Write one picture of the run to standard output."""
    state.refresh_all()
    console = _console()
    with contextlib.suppress(OSError):  # a closed terminal or pipe is nobody to talk to, not a failure
        console.print(picture(report_of(state), console))


def show_live(state: RunState) -> None:
    """Show the run until it is over; an interrupt ends the showing, and nothing else."""
    console = _console()
    state.refresh_all()
    with Live(
        picture(report_of(state), console), console=console, auto_refresh=False, vertical_overflow="crop"
    ) as live:
        try:
            while not state.is_over:
                time.sleep(REFRESH_S)
                state.refresh_all()
                live.update(picture(report_of(state), console), refresh=True)
        except KeyboardInterrupt:
            return


def _console() -> Console:
    stream = sys.stdout
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")  # a terminal that knows ASCII only sees question marks, not an error
    if stream.isatty():
        return Console(file=stream, highlight=False)
    return Console(file=stream, highlight=False, width=_PIPE[0], height=_PIPE[1])


def picture(report: WatchReport, console: Console) -> RenderableType:
    """Return the run as it is now, in no more lines than the console has where that is possible."""
    status = report.status
    braille = console.encoding.lower().startswith("utf")
    parts = [*_header(status), *_charts(report.curves, console.width, braille=braille)]
    entries = sorted(report.entries, key=lambda entry: (entry.at, entry.number))
    taken = sum(_height(part) for part in parts)
    num_rows = max(8, console.height - taken - 4)
    num_entries = min(len(entries), max(3, num_rows // 3))
    if status.ranks:
        alike = fold_ranks(status.ranks, max(3, num_rows - num_entries))
        parts += [Text(), _ranks(alike, status)]
    if num_entries:
        parts += [Text(), *(_entry(entry) for entry in entries[-num_entries:])]
    return Group(*parts)


def _height(part: RenderableType) -> int:
    return part.row_count if isinstance(part, Table) else 1


def _header(status: RunStatus) -> list[RenderableType]:
    parameters = f"{format_whole(status.parameters)} parameters" if status.parameters else ""
    facts = " · ".join(fact for fact in (status.job, status.plan, parameters) if fact)
    state = (f" {status.state} ", _STATES.get(status.state, "bold red"))
    lines: list[RenderableType] = [Text.assemble((status.name, "bold"), " ", state, (facts, "dim"))]
    if status.num_steps:
        line = Table.grid(padding=(0, 2), expand=True)
        line.add_column(no_wrap=True)
        line.add_column(ratio=1)
        line.add_column(no_wrap=True)
        done = f"step {format_whole(status.step)} of {format_whole(status.num_steps)}"
        left = f"{format_duration(status.eta_s)} to go" if status.eta_s is not None else ""
        line.add_row(done, ProgressBar(total=status.num_steps, completed=status.step), left)
        lines.append(line)
    figures = [text for text in _figures(status) if text]
    if figures:
        lines.append(Text(" · ".join(figures)))
    if status.verdict:
        lines.append(Text(status.verdict, "bold red"))
    return lines


def _figures(status: RunStatus) -> list[str]:
    tested = ", ".join(f"test {name} {format_number(value)}" for name, value in status.evaluation.items())
    kind = "resident" if status.is_resident else "memory"
    memory = f"{kind} {format_bytes(status.memory_bytes, 3)} (rank {status.memory_rank})" if status.memory_bytes else ""
    predicted = f"predicted {format_bytes(status.predicted_bytes, 3)} of tensors" if status.predicted_bytes else ""
    ran = "running for" if status.state == "running" else "ran for"
    return [
        f"loss {format_number(status.loss)}" if status.num_steps else "",
        tested,
        f"{format_whole(status.samples_per_s)} samples/s" if status.samples_per_s else "",
        memory,
        predicted or (f"nothing predicted: {status.prediction}" if status.prediction else ""),
        counted(status.restarts, "restart") if status.restarts else "",
        f"{len(status.checkpoints)} saves, last at step {format_whole(status.checkpoints[0].step)}"
        if status.checkpoints
        else "",
        f"{ran} {format_duration(max(0.0, status.now - status.began_at))}" if status.began_at else "",
    ]


def _charts(curves: dict[str, list[Row]], width: int, *, braille: bool) -> list[RenderableType]:
    shown = [(title, curves[name], style) for title, name, style in _CURVES if len(curves[name]) > 1]
    if not shown:
        return []
    grid = Table.grid(padding=(0, 2))
    each = max(16, (width - 2) // len(shown) - 12)
    cells = []
    for title, rows, style in shown:
        low, high = bounds(rows, from_zero=title != "loss")
        lines = draw_curve(rows, each, _CHART_LINES, low, high, braille=braille)
        gutter = [format_number(high), *[""] * (_CHART_LINES - 2), format_number(low)]
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
    empty = set(rows[0])
    for row in rows:
        empty -= {name for name in row if row[name] != _NOTHING}
    names = [name for name in rows[0] if name not in empty]
    table = Table(box=None, pad_edge=False, header_style="dim", expand=True)
    for name in names:
        # rich narrows the columns that may wrap: that is the last alone, whose text is shortened rather than wrapped.
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
        "for": format_duration(max(0.0, status.now - (worst.since or 0.0))) if since else _NOTHING,
        "step": format_whole(worst.step),
        "behind": _lag(worst.lag_s, worst.lag_steps),
        "memory": format_bytes(same.memory_bytes, 3),
        "state": Text(text, _STATES.get(worst.state, "red"), no_wrap=True, overflow="ellipsis"),
    }


def _lag(seconds: float | None, steps: int | None) -> str:
    if seconds is None:
        return _NOTHING
    return format_duration(seconds) + (f", {counted(steps, 'step')}" if steps else "")


def _entry(entry: Entry) -> Text:
    whose = f"rank {entry.rank}: " if entry.rank is not None else ""
    at = time.strftime("%H:%M:%S", time.localtime(entry.at))
    text = Text.assemble((f"{at} ", "dim"), (whose + entry.text, _MOODS.get(entry.mood, "")))
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


# Many ranks in few rows: those that do the same are one, and what is unlike the others comes first.


@dataclass(frozen=True)
class Alike:
    """Ranks that share state, phase and step."""

    ranks: tuple[int, ...]
    worst: RankRow
    """The one that is furthest behind."""
    host: str
    device: str
    memory_bytes: float | None
    """Of the one that needs most."""
    words: str = ""
    """In place of ranks, for rows that did not fit."""


def fold_ranks(ranks: Sequence[RankRow], most: int) -> list[Alike]:
    """Return at most `most` rows: one a rank in their order if they fit, else those alike together, the worst first."""
    if len(ranks) <= most:
        return [_together([rank]) for rank in ranks]
    groups: dict[tuple[object, ...], list[RankRow]] = {}
    for rank in ranks:
        groups.setdefault((rank.state, rank.words, rank.phase, rank.step), []).append(rank)
    rows = sorted((_together(group) for group in groups.values()), key=_badness, reverse=True)
    if len(rows) <= most:
        return rows
    rest = rows[most - 1 :]
    left_out = sum(len(row.ranks) for row in rest)
    return [*rows[: most - 1], Alike((), rest[0].worst, "", "", None, words=f"{left_out} more")]


def _badness(row: Alike) -> tuple[bool, int, float, int]:
    """Ends before lags, lags by steps and then by time; of equal ones the smaller group."""
    worst = row.worst
    has_failed = worst.state in {"failed", "gone"}
    return has_failed, worst.lag_steps or 0, worst.lag_s or 0.0, -len(row.ranks)


def _together(group: Sequence[RankRow]) -> Alike:
    hosts = sorted({rank.host for rank in group})
    devices = sorted({rank.device for rank in group})
    memory = [rank.memory_bytes for rank in group if rank.memory_bytes is not None]
    return Alike(
        ranks=tuple(rank.rank for rank in group),
        worst=max(group, key=lambda rank: (rank.lag_steps or 0, rank.lag_s or 0.0, -rank.rank)),
        host=hosts[0] if len(hosts) == 1 else f"{len(hosts)} hosts",
        device=devices[0] if len(devices) == 1 else f"{len(group)} devices",
        memory_bytes=max(memory, default=None),
    )
