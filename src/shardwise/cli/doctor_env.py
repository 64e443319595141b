"""`shardwise doctor env`: the variables of this shell, of a preset or of a run, explained and checked."""

from __future__ import annotations

import click

from shardwise.cli.options import present, takes
from shardwise.doctor.env import EnvSpec, doctor_env, preset_lines
from shardwise.errors import InputError
from shardwise.runs.console import say


@click.command("env")
@takes(EnvSpec)
@click.option("--export", "as_shell", is_flag=True, help="Print the preset as shell lines, and check nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print verdicts as JSON.")
def command(spec: EnvSpec, *, as_shell: bool, as_json: bool) -> int:
    """Explain NCCL, gloo, OpenMP, CUDA and torch variables: what each does, what contradicts, what is ignored."""
    if not as_shell:
        return present(doctor_env(spec), as_json=as_json)
    if spec.preset is None:
        raise InputError(
            "--export prints a preset, and none is named",
            code="cli.options-incomplete",
            fix="add --preset gcp, or another",
        )
    say(preset_lines(spec.preset))
    return 0
