"""`shardwise watch`: shows a run in the terminal, on a local page or in a tracker, with predicted memory."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec

from shardwise.errors import InputError
from shardwise.monitor.compare import compare_runs
from shardwise.monitor.server import page_server
from shardwise.monitor.sinks import mirror, parse_sink
from shardwise.monitor.terminal import WatchReport, report_of, show, show_live
from shardwise.runs import RunDirectory
from shardwise.runs.console import echo
from shardwise.runs.state import RunState, check_run, newest_run
from shardwise.runs.status import Predicted, read_predicted
from shardwise.spec import Spec, argument, option, spec_function

if TYPE_CHECKING:
    from collections.abc import Iterator

_NICE = 19
"""The lowest priority, since the run may need the cores."""


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
    compare: Annotated[Path | None, option(metavar="RUN")] = None
    """Compare with another run: print settings that differ, results, and losses at the same steps."""


@spec_function(WatchSpec)
def watch(spec: WatchSpec) -> WatchReport:
    """Show a run until it ends or until an interrupt, and return its last status; `once` shows the current status."""
    sink = parse_sink(spec.sink) if spec.sink is not None else None
    run = _find_run(spec.run)
    state = RunState(run)
    if spec.compare is not None:
        other = RunState(_find_run(spec.compare))
        echo(compare_runs(state, other))
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
    from shardwise.environment import cache_directory
    from shardwise.job.load import JobReference, load_job
    from shardwise.measurement.step_findings import predict_step
    from shardwise.planner.trace.trace import described
    from shardwise.plans.toml import read_plan

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
