"""`shardwise launch`: any script on N processes, with torchrun's options."""

from __future__ import annotations

import click

from shardwise.cli.main import WITH_UNDERSCORES, present, takes
from shardwise.launcher.spec import LaunchSpec
from shardwise.runner.launch import launch_script


@click.command(
    "launch",
    context_settings={
        **WITH_UNDERSCORES,
        "allow_interspersed_args": False,  # options stand before the script, the rest is the script's
        "auto_envvar_prefix": "PET",  # torchrun reads PET_NNODES and its like
    },
    no_args_is_help=True,
)
@takes(LaunchSpec)
def command(spec: LaunchSpec) -> int:
    """Start SCRIPT on many processes of this machine, or of many machines, in place of torchrun."""
    return present(launch_script(spec, owns_process=True))
