"""`shardwise doctor`: what is wrong with this machine; parts for its variables, the network and runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
import msgspec

from shardwise.cli.main import LazyGroup
from shardwise.runs.console import say

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.doctor.catalogue import Verdict


# How `doctor` shows what it found: one line for each verdict, the fix below, or JSON.


def say_verdicts(verdicts: Sequence[Verdict]) -> None:
    """Show each verdict on a line, what to do about it below, and how many there were of each kind."""
    width = max((len(verdict.name) for verdict in verdicts), default=0)
    for verdict in verdicts:
        say(f"{verdict.state:<4}  {verdict.name:<{width}}  {verdict.fact}")
        if verdict.fix:
            say(f"{'':<4}  {'':<{width}}  -> {verdict.fix}")
    counts = {state: sum(verdict.state == state for verdict in verdicts) for state in ("ok", "warn", "fail")}
    say(f"{counts['ok']} ok, {counts['warn']} to look at, {counts['fail']} failed")


def say_json(value: Any) -> None:
    """Show a value as JSON."""
    say(msgspec.json.format(msgspec.json.encode(value), indent=1).decode())


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
    from shardwise.doctor.catalogue import exit_code
    from shardwise.doctor.machine.checks import check_machine
    from shardwise.doctor.machine.observe import observe_machine

    machine = observe_machine()
    verdicts = check_machine(machine)
    if as_json:
        say_json({"facts": machine, "verdicts": verdicts})
    else:
        say_verdicts(verdicts)
    return exit_code(verdicts)
