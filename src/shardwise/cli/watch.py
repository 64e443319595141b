"""`shardwise watch`: shows a run live or after its end."""

from __future__ import annotations

import click

from shardwise.cli.main import spec_options
from shardwise.monitor.watch import WatchSpec, watch


@click.command("watch")
@spec_options(WatchSpec)
def command(spec: WatchSpec) -> int:
    """Show a run directory, RUN or the newest in runs/: curves, memory, state of every rank, and events."""
    return watch(spec).exit_code
