"""`shardwise bench`: what this machine does, and a job on it."""

from __future__ import annotations

import importlib

import click

PARTS = {
    "comm": "Time, check and judge every collective, with the columns of nccl-tests.",
    "p2p": "Measure latency and bandwidth between all pairs of ranks, and find the slow link.",
    "overlap": "Measure how much of a job's communication hides behind its compute, and what to set.",
    "scaling": "Measure a job or a script on more and more ranks: efficiency, and where the time goes.",
    "step": "Run a few steps of a job under a plan: time by phase, throughput, memory.",
}


class Parts(click.Group):
    """A group that imports a part's module only when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """Parts in the order of a day's work: links, overlap, a step, many ranks."""
        return list(PARTS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Return the part's command."""
        if cmd_name not in PARTS:
            return None
        command: click.Command = importlib.import_module(f"shardwise.cli.bench_{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """List the parts without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(PARTS.items()))


@click.command("bench", cls=Parts, no_args_is_help=True)
def command() -> None:
    """Measure links, collectives, overlap, steps and scaling."""
