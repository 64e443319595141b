"""Shows a run in a terminal: values, curves, a table of ranks and the history, once or live until the run ends."""

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

from shardwise.plots.figures import bounds, draw_curve
from shardwise.runs.console import counted, rank_spans
from shardwise.runs.history import Row
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
"""Lag in seconds from which a rank counts as late; less is the jitter of a normal step."""
PIPE = (80, 50)
"""Columns and lines of the output without a terminal."""
_STATES = {"running": "bold blue", "finished": "bold green", "done": "green"}
_MOODS = {"good": "green", "warn": "yellow", "bad": "red"}
_CHART_LINES = 5
_NOTHING = "-"


class WatchReport(Report, frozen=True, kw_only=True):
    """A snapshot of a run: its status, curves and history."""

    status: RunStatus
    curves: dict[str, list[Row]]
    entries: list[Entry]
    """The newest entries of the history, in chronological order."""

    def to_text(self) -> str:
        """Return the report as text without colors."""
        console = Console(file=io.StringIO(), highlight=False, width=PIPE[0], height=PIPE[1])
        with console.capture() as captured:
            console.print(picture(self, console))
        return captured.get()


def report_of(state: RunState) -> WatchReport:
    """Return the report of the run at the last refresh."""
    curves = {name: curve.rows() for name, curve in state.training.curves.items()}
    return WatchReport(status=state.status(), curves=curves, entries=state.history.since(0))


def show(state: RunState) -> None:
    """Write the report of the run to standard output."""
    state.refresh_all()
    console = _console()
    with contextlib.suppress(OSError):  # a closed terminal or pipe must not fail the command
        console.print(picture(report_of(state), console))


def show_live(state: RunState) -> None:
    """Show the run until it ends; an interrupt ends the view, not the run."""
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
        stream.reconfigure(errors="replace")  # an ASCII terminal shows question marks instead of an error
    if stream.isatty():
        return Console(file=stream, highlight=False)
    return Console(file=stream, highlight=False, width=PIPE[0], height=PIPE[1])


def picture(report: WatchReport, console: Console) -> RenderableType:
    """Render the report for a console, if possible within its height."""
    status = report.status
    braille = console.encoding.lower().startswith("utf")
    num_rows_of_charts = 1 if console.height < _TALL else 2
    charts = named_charts(report.curves)[: num_rows_of_charts * per_row(console.width)]
    parts = _header(status)
    drawn = draw_charts(charts, console.width, braille=braille)
    taken = len(parts) + len(drawn) // 2 * (_CHART_LINES + 2)
    parts += drawn
    entries = sorted(report.entries, key=lambda entry: (entry.at, entry.number))
    num_rows = max(8, console.height - taken - 4)
    num_entries = min(len(entries), max(3, num_rows // 3))
    if status.ranks:
        groups = fold_ranks(status.ranks, max(3, num_rows - num_entries))
        parts += [Text(), _ranks(groups, status)]
    if num_entries:
        parts += [Text(), *(_entry(entry) for entry in entries[-num_entries:])]
    return Group(*parts)


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
        left = f"{format_duration(status.eta_s)} left" if status.eta_s is not None else ""
        line.add_row(done, ProgressBar(total=status.num_steps, completed=status.step), left)
        lines.append(line)
    values = _values(status)
    if values:
        lines.append(Text(" · ".join(values)))
    if status.verdict:
        lines.append(Text(status.verdict, "bold red"))
    return lines


def _values(status: RunStatus) -> list[str]:
    """Return loss, evaluation, throughput, memory, restarts, checkpoints and duration as text, if known."""
    values = []
    if status.num_steps:
        values.append(f"loss {format_number(status.loss)}")
    if status.evaluation:
        values.append(", ".join(f"test {name} {format_number(value)}" for name, value in status.evaluation.items()))
    if status.samples_per_s:
        values.append(f"{format_whole(status.samples_per_s)} samples/s")
    if status.memory_bytes:
        kind = "resident memory" if status.is_resident else "memory"
        values.append(f"{kind} {format_bytes(status.memory_bytes, 3)} (rank {status.memory_rank})")
    if status.predicted_bytes:
        values.append(f"predicted {format_bytes(status.predicted_bytes, 3)} of tensors")
    elif status.prediction:
        values.append(f"no prediction: {status.prediction}")
    if status.restarts:
        values.append(counted(status.restarts, "restart"))
    if status.checkpoints:
        last = format_whole(status.checkpoints[0].step)
        values.append(f"{counted(len(status.checkpoints), 'checkpoint')}, last at step {last}")
    if status.began_at:
        verb = "running" if status.state == "running" else "ran"
        values.append(f"{verb} for {format_duration(max(0.0, status.now - status.began_at))}")
    return values


Chart = tuple[str, list[Row], str, bool]
"""Title, rows and style of a curve, and whether its scale begins at zero."""


def named_charts(curves: dict[str, list[Row]]) -> list[Chart]:
    """Return a chart for each curve with at least two points, the most important first."""
    charts: list[Chart] = [
        ("loss", curves["loss"], "blue", False),
        ("samples/s", curves["throughput"], "cyan", True),
    ]
    for name in sorted(curves):
        if "/" in name:  # evaluation/NAME and log/NAME
            title = name.replace("evaluation/", "test ").removeprefix("log/")
            charts.append((title, curves[name], "magenta", False))
    charts.insert(3, ("learning rate", curves.get("learning_rate", []), "yellow", True))
    return [chart for chart in charts if len(chart[1]) > 1]


def per_row(width: int) -> int:
    """Return the number of charts in a row of `width` columns."""
    return max(1, width // _CHART_COLUMNS)


def draw_charts(charts: list[Chart], width: int, *, braille: bool, alike: bool = False) -> list[RenderableType]:
    """Return the charts in rows that fit into `width` columns; `alike` gives all the same step and value ranges."""
    num = min(per_row(width), len(charts))
    parts: list[RenderableType] = []
    all_rows = [row for _, rows, _, _ in charts for row in rows] if alike else []
    numbers = [row[0] for row in all_rows]
    steps = (min(numbers), max(numbers)) if numbers else None
    for start in range(0, len(charts), num or 1):
        grid = Table.grid(padding=(0, 2))
        cells = []
        for title, rows, style, from_zero in charts[start : start + num]:
            low, high = bounds(all_rows or rows, from_zero=from_zero)
            lines = draw_curve(rows, width // num - 12, _CHART_LINES, low, high, braille=braille, steps=steps)
            gutter = [format_number(high), *[""] * (_CHART_LINES - 2), format_number(low)]
            text = Text(f"{title}\n", "dim")
            for label, line in zip(gutter, lines, strict=True):
                text.append(f"{label:>8} ", "dim").append(f"{line}\n", style)
            text.rstrip()
            cells.append(text)
        grid.add_row(*cells)
        parts += [Text(), grid]
    return parts


_CHART_COLUMNS = 38
"""Minimum width of a chart in columns, including its labels."""
_TALL = 40
"""Minimum height of a terminal in lines for two rows of charts."""


_NUMBERS = ("for", "step", "behind", "memory")
"""Numeric columns of the rank table."""


def _ranks(groups: list[RankGroup], status: RunStatus) -> Table:
    """Return a table with one row per group of ranks, without empty columns; the last column takes the free width."""
    rows = [_row(same, status) for same in groups]
    empty = set(rows[0])
    for row in rows:
        empty -= {name for name in row if row[name] != _NOTHING}
    names = [name for name in rows[0] if name not in empty]
    table = Table(box=None, pad_edge=False, header_style="dim", expand=True)
    for name in names:
        # rich narrows columns that may wrap: only the last one, whose text is shortened instead of wrapped.
        table.add_column(name, justify="right" if name in _NUMBERS else "left", no_wrap=name != names[-1])
    for same, row in zip(groups, rows, strict=True):
        is_late = (same.worst.lag_s or 0.0) >= LATE_S
        table.add_row(*(row[name] for name in names), style="bold red" if is_late else "")
    return table


def _row(same: RankGroup, status: RunStatus) -> dict[str, str | Text]:
    worst = same.worst
    text = f"{worst.state}: {worst.message}" if worst.message else worst.state
    duration = _NOTHING
    if worst.since is not None and worst.state == "running":
        duration = format_duration(max(0.0, status.now - worst.since))
    return {
        "rank": rank_spans(same.ranks) if same.ranks else same.label,
        "host": same.host,
        "device": same.device or _NOTHING,
        "phase": worst.phase or _NOTHING,
        "for": duration,
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
    writer = f"rank {entry.rank}: " if entry.rank is not None else ""
    at = time.strftime("%H:%M:%S", time.localtime(entry.at))
    text = Text.assemble((f"{at} ", "dim"), (writer + entry.text, _MOODS.get(entry.mood, "")))
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


# Groups of ranks with the same state, phase and step, so that many ranks fit into few rows.


@dataclass(frozen=True)
class RankGroup:
    """Ranks with the same state, phase and step."""

    ranks: tuple[int, ...]
    worst: RankRow
    """The rank that is furthest behind."""
    host: str
    device: str
    memory_bytes: float | None
    """The highest memory of a rank in the group."""
    label: str = ""
    """Text in place of the ranks, for the last row if not all rows fit."""


def fold_ranks(ranks: Sequence[RankRow], most: int) -> list[RankGroup]:
    """Return at most `most` rows: one per rank if they fit, otherwise one per group, the worst first."""
    if len(ranks) <= most:
        return [_group_of([rank]) for rank in ranks]
    groups: dict[tuple[object, ...], list[RankRow]] = {}
    for rank in ranks:
        groups.setdefault((rank.state, rank.message, rank.phase, rank.step), []).append(rank)
    rows = sorted((_group_of(group) for group in groups.values()), key=_badness, reverse=True)
    if len(rows) <= most:
        return rows
    rest = rows[most - 1 :]
    left_out = sum(len(row.ranks) for row in rest)
    return [*rows[: most - 1], RankGroup((), rest[0].worst, "", "", None, label=f"{left_out} more")]


def _badness(row: RankGroup) -> tuple[bool, int, float, int]:
    """Return a sort key: failed ranks are worst, then late ranks by steps and seconds, then smaller groups."""
    worst = row.worst
    has_failed = worst.state in {"failed", "gone"}
    return has_failed, worst.lag_steps or 0, worst.lag_s or 0.0, -len(row.ranks)


def _group_of(group: Sequence[RankRow]) -> RankGroup:
    hosts = sorted({rank.host for rank in group})
    devices = sorted({rank.device for rank in group})
    memory = [rank.memory_bytes for rank in group if rank.memory_bytes is not None]
    return RankGroup(
        ranks=tuple(rank.rank for rank in group),
        worst=max(group, key=lambda rank: (rank.lag_steps or 0, rank.lag_s or 0.0, -rank.rank)),
        host=hosts[0] if len(hosts) == 1 else f"{len(hosts)} hosts",
        device=devices[0] if len(devices) == 1 else f"{len(group)} devices",
        memory_bytes=max(memory, default=None),
    )
