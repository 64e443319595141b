"""`shardwise doctor`: what is wrong with this machine; parts for its variables, the network and runs."""

from __future__ import annotations

from typing import Any

import click
import msgspec

from shardwise.cli.main import LazyGroup
from shardwise.cli.options import present
from shardwise.runs.console import say

PARTS = {
    "drill": "Inject faults into your own job, and check that each is named and the job recovers.",
    "env": "Explain and check environment variables; print presets.",
    "net": "Check all hosts and the links between them; end with the launch line.",
    "run": "Explain a finished or stuck run from its directory.",
}


@click.command("doctor", cls=LazyGroup, parts=PARTS, prefix="doctor_", invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="Print facts and verdicts as JSON.")
@click.pass_context
def command(context: click.Context, *, as_json: bool) -> int:
    """Check this machine: GPUs, torch, NCCL, interfaces, memory, limits, cores, disk, clock."""
    if context.invoked_subcommand is not None:
        return 0
    from shardwise.doctor.machine.observe import doctor

    return present(doctor(), as_json=as_json)


def say_json(value: Any) -> None:
    """Show a value as JSON."""
    say(msgspec.json.format(msgspec.json.encode(value), indent=1).decode())
