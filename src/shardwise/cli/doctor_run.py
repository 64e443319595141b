"""`shardwise doctor run`: a finished or stuck run explained from its directory."""

from __future__ import annotations

import click

from shardwise.cli.options import present, takes
from shardwise.doctor.run.explain import RunSpec, doctor_run


@click.command("run", no_args_is_help=True)
@takes(RunSpec)
@click.option("--json", "as_json", is_flag=True, help="Print the story and the verdicts as JSON.")
def command(spec: RunSpec, *, as_json: bool) -> int:
    """Say what happened in the run directory RUN, why, what was lost, and what to type next."""
    return present(doctor_run(spec), as_json=as_json)
