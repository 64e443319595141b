"""`shardwise train`: trains the job of a job file on one or more processes."""

from __future__ import annotations

import click

from shardwise.cli.main import WITH_UNDERSCORES, present, spec_options
from shardwise.runner.train import train_job
from shardwise.runs.console import echo_error
from shardwise.training.spec import TrainSpec


@click.command("train", context_settings=WITH_UNDERSCORES, no_args_is_help=True)
@spec_options(TrainSpec)
def command(spec: TrainSpec) -> int:
    """Train the job in JOB.py, show its progress, and write a report to its run directory."""
    report = train_job(spec)
    if report.traceback and click.get_current_context().find_root().params["debug"]:
        echo_error(report.traceback)
    return present(report)
