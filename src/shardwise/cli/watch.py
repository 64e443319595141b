"""`shardwise watch`."""

from __future__ import annotations

import click

from shardwise.cli.main import takes
from shardwise.monitor.watch import WatchSpec, watch


@click.command("watch", no_args_is_help=True)
@takes(WatchSpec)
def command(spec: WatchSpec) -> int:
    """Look at the run directory RUN: curves, memory, every rank, what happened; live while it trains."""
    return watch(spec).exit_code
