"""Two runs side by side: settings that differ, results, and losses at the same steps."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from shardwise.monitor.terminal import PIPE, draw_charts
from shardwise.monitor.trackers import describe_run
from shardwise.units import format_bytes, format_duration, format_number, format_whole

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardwise.runs.state import RunState
    from shardwise.runs.status import RunStatus

_NOTHING = "-"


def compare_runs(left: RunState, right: RunState) -> str:
    """Return a table of two runs and their loss curves on one scale, in 80 columns."""
    states = (left, right)
    for state in states:
        state.refresh_all()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("", left.run.path.name, right.run.path.name):
        table.add_column(heading, overflow="fold")
    for row in (*_settings(left, right), *_results(left, right)):
        table.add_row(*row)
    charts = []
    for state, style in zip(states, ("blue", "magenta"), strict=True):
        charts.append((f"loss of {state.run.path.name}", state.training.curves["loss"].rows(), style, False))
    console = Console(file=io.StringIO(), highlight=False, width=PIPE[0])
    with console.capture() as captured:
        console.print(table)
        for part in draw_charts([chart for chart in charts if chart[1]], PIPE[0], braille=True, alike=True):
            console.print(part)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def _settings(left: RunState, right: RunState) -> Iterator[tuple[str, str, str]]:
    """Yield the values of job, plan and world that differ."""
    configs = describe_run(left).config, describe_run(right).config
    for name in sorted(configs[0].keys() | configs[1].keys()):
        values = [str(config.get(name, _NOTHING)) for config in configs]
        if values[0] != values[1] and name not in {"job.digest", "training.steps"}:
            yield name, values[0], values[1]


def _results(left: RunState, right: RunState) -> Iterator[tuple[str, str, str]]:
    """Yield what came of both runs, their losses at the last step that both have included."""
    statuses = left.status(), right.status()
    figures = [_figures(status) for status in statuses]
    step = min(status.step for status in statuses)
    losses = [_loss_at(state, step) for state in (left, right)]
    if step:
        yield f"loss at step {format_whole(step)}", losses[0], losses[1]
    names = dict.fromkeys((*figures[0], *figures[1]))
    for name in names:
        yield name, figures[0].get(name, _NOTHING), figures[1].get(name, _NOTHING)


def _figures(status: RunStatus) -> dict[str, str]:
    ran_s = None if status.began_at is None else max(0.0, status.now - status.began_at)
    return {
        "state": status.state,
        "steps": f"{format_whole(status.step)} of {format_whole(status.num_steps)}",
        "loss": format_number(status.loss),
        **{f"test {name}": format_number(value) for name, value in status.evaluation.items()},
        "samples/s": format_whole(status.samples_per_s),
        "memory": format_bytes(status.memory_bytes, 3),
        "time": format_duration(ran_s),
        "restarts": format_whole(status.restarts),
    }


def _loss_at(state: RunState, step: int) -> str:
    """Return the mean loss of the range of steps that contains `step`: of the step alone, except in long runs."""
    found = None
    for row in state.training.curves["loss"].rows():
        if row[0] <= step:
            found = row[3]
    return format_number(found)
