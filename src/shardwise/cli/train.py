"""`shardwise train`: a described job on one or many processes."""

from __future__ import annotations

import click

from shardwise.cli.main import WITH_UNDERSCORES, present, takes
from shardwise.runner.train import train_job
from shardwise.runs.console import echo_error
from shardwise.training.spec import TrainSpec


@click.command("train", context_settings=WITH_UNDERSCORES, no_args_is_help=True)
@takes(TrainSpec)
def command(spec: TrainSpec) -> int:
    """Train the Job in JOB.py, with progress, a report and a run directory."""
    report = train_job(spec)
    if report.traceback and click.get_current_context().find_root().params["debug"]:
        echo_error(report.traceback)
    return present(report)
