"""`shardwise launch`: runs any script on several processes, with the options of torchrun."""

from __future__ import annotations

import click

from shardwise.cli.main import WITH_UNDERSCORES, present, spec_options
from shardwise.launcher.spec import LaunchSpec
from shardwise.runner.launch import launch_script


@click.command(
    "launch",
    context_settings={
        **WITH_UNDERSCORES,
        "allow_interspersed_args": False,  # options precede the script, all arguments after it are the script's
        "auto_envvar_prefix": "PET",  # like torchrun, reads PET_NNODES and so on
    },
    no_args_is_help=True,
)
@spec_options(LaunchSpec)
def command(spec: LaunchSpec) -> int:
    """Run SCRIPT on several processes of one or more machines. Replaces torchrun."""
    return present(launch_script(spec, owns_process=True))
