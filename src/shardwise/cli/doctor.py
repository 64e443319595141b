"""`shardwise doctor`: what is wrong with this machine; parts for its variables, the network and runs."""

from __future__ import annotations

import importlib

import click

from shardwise.errors import nearest

PARTS = {
    "env": "Explain and check environment variables; print presets.",
    "net": "Check all hosts and the ways between them; end with the launch line.",
    "run": "Explain a finished or stuck run from its directory.",
}


class Parts(click.Group):
    """A group that imports a part's module only when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """Parts in the order of a day's work."""
        return list(PARTS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Return the part's command."""
        if cmd_name not in PARTS:
            return None
        command: click.Command = importlib.import_module(f"shardwise.cli.doctor_{cmd_name}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Name the nearest part when there is no such one."""
        if args and not args[0].startswith("-") and args[0] not in PARTS:
            raise click.UsageError(f"doctor has no part {args[0]!r}: {nearest(args[0], PARTS)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """List the parts without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(PARTS.items()))


@click.command("doctor", cls=Parts, invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="Print facts and verdicts as JSON.")
@click.pass_context
def command(context: click.Context, *, as_json: bool) -> int:
    """Check this machine: GPUs, torch, NCCL, interfaces, memory, limits, cores, disk, clock."""
    if context.invoked_subcommand is not None:
        return 0
    from shardwise.cli.doctor_words import say_json, say_verdicts
    from shardwise.doctor.check import exit_code
    from shardwise.doctor.machine_checks import check_machine
    from shardwise.doctor.observe import observe_machine

    machine = observe_machine()
    verdicts = check_machine(machine)
    if as_json:
        say_json({"facts": machine, "verdicts": verdicts})
    else:
        say_verdicts(verdicts)
    return exit_code(verdicts)
