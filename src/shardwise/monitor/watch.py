"""`shardwise watch`: shows a run in the terminal, on a local page or in a tracker; compares runs; predicts memory."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import io
import os
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated

import msgspec
from rich.console import Console
from rich.table import Table

from shardwise.environment import cache_directory
from shardwise.errors import InputError
from shardwise.job.load import JobReference, load_job
from shardwise.monitor.server import page_server
from shardwise.monitor.sinks import mirror, parse_sink
from shardwise.monitor.terminal import PIPE, WatchReport, draw_charts, report_of, show, show_live
from shardwise.monitor.trackers import describe_run
from shardwise.plans.toml import read_plan
from shardwise.runs import RunDirectory
from shardwise.runs.console import counted, echo
from shardwise.runs.state import RunState, check_run, newest_run
from shardwise.runs.status import Predicted, read_predicted
from shardwise.spec import Spec, argument, option, spec_function
from shardwise.units import format_bytes, format_duration, format_number, format_whole

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


_NICE = 19
"""Nice value of the prediction: the lowest priority, since the run may need the cores."""


class WatchSpec(Spec, frozen=True, kw_only=True):
    """The run to watch, and where to show it."""

    run: Annotated[Path | None, argument("[RUN]")] = None
    """The run directory (default: the newest in runs/)."""
    once: bool = False
    """Print the current status once and exit (default without a terminal)."""
    web: bool = False
    """Serve a page on this machine and print its address."""
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] | None = None
    """Port of the page (default: the last port of this run, or any free port)."""
    predict: bool = False
    """Also compute the memory that the planner predicts."""
    sink: Annotated[str | None, option(metavar="KIND:PLACE")] = None
    """Mirror the run into a tracker until it ends, instead of showing it: tensorboard:DIR, wandb:PROJECT or
    mlflow:EXPERIMENT."""
    compare: Annotated[tuple[Path, ...], option("--compare", metavar="RUN")] = ()
    """Compare with another run, or several: print settings that differ, results, and losses at the same steps."""


@spec_function(WatchSpec)
def watch(spec: WatchSpec) -> WatchReport:
    """Show a run until it ends or until an interrupt, and return its last status; `once` shows the current status."""
    sink = parse_sink(spec.sink) if spec.sink is not None else None
    run = _find_run(spec.run)
    state = RunState(run)
    if spec.compare:
        echo(compare_runs(state, *(RunState(_find_run(path)) for path in spec.compare)))
    elif sink is not None:
        mirror(run, sink, echo)
    else:
        with _predicting(run, wanted=spec.predict) as predicting:
            if spec.web or spec.port is not None:
                _serve(state, spec.port)
            elif spec.once or not sys.stdout.isatty():
                if predicting is not None:
                    predicting.wait()
                show(state)
            else:
                show_live(state)
    state.refresh_all()
    return report_of(state)


def _find_run(path: Path | None) -> RunDirectory:
    """Return a run directory that exists; without a path, the newest run of the current directory."""
    found = path or newest_run(Path("runs"))
    if found is None:
        raise InputError(
            "runs/ contains no run directory", code="run.not-found", fix="pass a run directory: shardwise watch RUN"
        )
    check_run(found)
    return RunDirectory(found)


def _serve(state: RunState, port: int | None) -> None:
    """Serve the page until an interrupt."""
    server = page_server(state, port)
    echo(f"watching {state.run.path} at {server.url}\nCtrl-C stops the server, not the run")
    try:
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
    finally:
        server.server_close()


# The comparison of runs.


_NOTHING = "-"
_STYLES = ("blue", "magenta", "cyan", "green")


def compare_runs(*states: RunState) -> str:
    """Return a table of the runs and their loss curves on one scale, in 80 columns."""
    for state in states:
        state.refresh_all()
    names = [state.run.path.name for state in states]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("", *names):
        table.add_column(heading, overflow="fold")
    for row in (*_settings(states), *_results(states)):
        table.add_row(*row)
    charts = []
    for number, state in enumerate(states):
        rows = state.training.curves["loss"].rows()
        charts.append((f"loss of {names[number]}", rows, _STYLES[number % len(_STYLES)], False))
    console = Console(file=io.StringIO(), highlight=False, width=PIPE[0])
    with console.capture() as captured:
        console.print(table, "", sep="\n")
        for name, other in zip(names[1:], states[1:], strict=True):
            text = _difference(*_losses(states[0], other))
            console.print(text if len(states) == 2 else f"{names[0]} and {name}: {text}")
        for part in draw_charts([chart for chart in charts if chart[1]], PIPE[0], braille=True, alike=True):
            console.print(part)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def _settings(states: Sequence[RunState]) -> Iterator[tuple[str, ...]]:
    """Yield the settings of job, plan and world that differ between the runs."""
    configs = [describe_run(state).config for state in states]
    for name in sorted(set().union(*configs)):
        values = [str(config[name]) if name in config else _default(config, name) for config in configs]
        if len(set(values)) > 1 and name not in {"job.digest", "training.steps"}:
            yield name, *values


def _default(config: Mapping[str, object], name: str) -> str:
    """Return the job file's constant for a field that the other run overrides; "-" if not found or the file changed."""
    node: ast.AST | None = None
    with contextlib.suppress(OSError, SyntaxError, ValueError):
        content = Path(str(config.get("job.path"))).read_bytes()
        if hashlib.sha256(content).hexdigest() == config.get("job.digest"):
            node = next((each for each in ast.parse(content).body if config.get("job.attribute") in _names(each)), None)
    for key in name.removeprefix("job.overrides.").split("."):
        node = None if node is None else _argument(node, key)
    return str(node.value) if isinstance(node, ast.Constant) else _NOTHING


def _names(statement: ast.stmt) -> list[str]:
    """Return the names that a statement of a job file defines, if it is a function or an assignment."""
    if isinstance(statement, ast.FunctionDef):
        return [statement.name]
    return [ast.unparse(target) for target in statement.targets] if isinstance(statement, ast.Assign) else []


def _argument(node: ast.AST, name: str) -> ast.AST | None:
    """Return the default of the outermost parameter, or the value of the outermost keyword argument, of this name."""
    for each in ast.walk(node):
        if isinstance(each, ast.keyword) and each.arg == name:
            return each.value
        if isinstance(each, ast.arguments):
            required = [None] * (len(each.args) - len(each.defaults))
            names = [argument.arg for argument in (*each.args, *each.kwonlyargs)]
            if name in names:
                return [*required, *each.defaults, *each.kw_defaults][names.index(name)]
    return None


def _results(states: Sequence[RunState]) -> Iterator[tuple[str, ...]]:
    """Yield the results of the runs, including the losses at the last step that all runs reached."""
    figures = [_figures(state) for state in states]
    losses = _losses(*states)
    common = set(losses[0]).intersection(*losses[1:])
    if common:
        step = max(common)
        yield f"loss at step {format_whole(step)}", *(format_number(each[step]) for each in losses)
    names: dict[str, None] = {}
    for each in figures:
        names |= dict.fromkeys(each)
    for name in names:
        yield name, *(each.get(name, _NOTHING) for each in figures)


def _figures(state: RunState) -> dict[str, str]:
    status = state.status()
    ran_s = None if status.began_at is None else max(0.0, status.now - status.began_at)
    metrics = {}
    for name, value in status.evaluation.items():
        rows = state.training.curves["evaluation" if name == "loss" else f"evaluation/{name}"].rows()
        metrics[f"test {name}"] = format_number(value)
        # A metric has no direction of its own: of names that are not known, both extremes are shown.
        if "accuracy" not in name:
            metrics[f"test {name}, lowest"] = format_number(
                min((row[1] for row in rows if row[1] is not None), default=None)
            )
        if "loss" not in name:
            metrics[f"test {name}, highest"] = format_number(
                max((row[2] for row in rows if row[2] is not None), default=None)
            )
    return {
        "state": status.state,
        "steps": f"{format_whole(status.step)} of {format_whole(status.num_steps)}",
        "loss": format_number(status.loss),
        **metrics,
        "samples/s": format_whole(status.samples_per_s),
        "memory": format_bytes(status.memory_bytes, 3),
        "time": format_duration(ran_s),
        "restarts": format_whole(status.restarts),
    }


def _losses(*states: RunState) -> list[dict[int, float]]:
    """Return step -> loss of each run; beyond 2,048 steps, the first step of each range -> its mean loss."""
    curves = [state.training.curves["loss"] for state in states]
    width = max(curve.width for curve in curves)
    found = []
    for curve in curves:
        ranges: dict[int, list[float]] = {}
        for step, _, _, mean in curve.rows():
            if mean is not None:
                ranges.setdefault(step // width * width, []).append(mean)
        found.append({step: fmean(means) for step, means in ranges.items()})
    return found


def _difference(left: Mapping[int, float], right: Mapping[int, float]) -> str:
    """Return the largest difference of the losses and its step in one sentence; curves store six digits."""
    gaps = {step: abs(left[step] - right[step]) for step in sorted(left.keys() & right.keys())}
    if not gaps:
        return "losses: the runs have no common step"
    worst = max(gaps, key=lambda step: gaps[step])
    text = f"losses at {counted(len(gaps), 'common step')} ({format_whole(min(gaps))} to {format_whole(max(gaps))}): "
    if not gaps[worst]:
        return text + "equal to 6 digits"
    return f"{text}largest difference {gaps[worst]:.2g}, at step {format_whole(worst)}"


# The prediction imports torch and the user's file, so a separate process computes it and writes predicted.json.


@contextlib.contextmanager
def _predicting(run: RunDirectory, *, wanted: bool) -> Iterator[subprocess.Popen[bytes] | None]:
    """Predict memory in a child process, unless the run has a prediction; the child ends with this context."""
    if not wanted or read_predicted(run).peak_bytes is not None:
        yield None
        return
    command = [sys.executable, "-m", "shardwise.monitor.watch", str(run.path)]
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield child
    finally:
        child.terminate()
        child.wait()


def predict(run: RunDirectory) -> Predicted:
    """Load the job and the plan of a run and predict its memory; imports torch and the user's file."""
    if not run.job.exists() or not run.plan.exists():
        return Predicted(why_not="only a run of a job file has a prediction")
    from shardwise.measurement.step_findings import predict_step
    from shardwise.planner.trace.trace import described

    try:
        job = load_job(msgspec.json.decode(run.job.read_bytes(), type=JobReference))
        found = predict_step(
            job,
            read_plan(run.plan),
            lambda job, compute: described(job, compute, cache_directory() / "models"),
            processes=1,
        )
    except Exception as error:  # noqa: BLE001 - the user's code may raise anything, and the view works without it
        return Predicted(why_not=" ".join((str(error) or type(error).__name__).split()))
    return Predicted(peak_bytes=found["peak_bytes"])


def _main(path: str) -> None:
    os.nice(_NICE)
    run = RunDirectory(Path(path))
    partial = run.predicted.with_suffix(".partial")
    partial.write_bytes(msgspec.json.encode(predict(run)))
    partial.replace(run.predicted)


if __name__ == "__main__":
    _main(sys.argv[1])
