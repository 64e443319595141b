"""`shardwise doctor`: what is wrong with this machine; parts for its variables, the network and runs."""

from __future__ import annotations

import click

from shardwise.cli.lazy import LazyGroup

PARTS = {
    "drill": "Do harm to your own job, and check that it is named and comes back.",
    "env": "Explain and check environment variables; print presets.",
    "net": "Check all hosts and the ways between them; end with the launch line.",
    "run": "Explain a finished or stuck run from its directory.",
}


@click.command("doctor", cls=LazyGroup, parts=PARTS, prefix="doctor_", invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="Print facts and verdicts as JSON.")
@click.pass_context
def command(context: click.Context, *, as_json: bool) -> int:
    """Check this machine: GPUs, torch, NCCL, interfaces, memory, limits, cores, disk, clock."""
    if context.invoked_subcommand is not None:
        return 0
    from shardwise.cli.doctor_words import say_json, say_verdicts
    from shardwise.doctor.check import exit_code
    from shardwise.doctor.machine.checks import check_machine
    from shardwise.doctor.machine.observe import observe_machine

    machine = observe_machine()
    verdicts = check_machine(machine)
    if as_json:
        say_json({"facts": machine, "verdicts": verdicts})
    else:
        say_verdicts(verdicts)
    return exit_code(verdicts)
