"""`shardwise bench`: what this machine does, and a job on it."""

from __future__ import annotations

import click

from shardwise.cli.lazy import LazyGroup

PARTS = {
    "comm": "Time, check and judge every collective, with the columns of nccl-tests.",
    "p2p": "Measure latency and bandwidth between all pairs of ranks, and find the slow link.",
    "overlap": "Measure how much of a job's communication hides behind its compute, and what to set.",
    "scaling": "Measure a job or a script on more and more ranks: efficiency, and where the time goes.",
    "step": "Run a few steps of a job under a plan: time by phase, throughput, memory.",
}


@click.command("bench", cls=LazyGroup, parts=PARTS, prefix="bench_", no_args_is_help=True)
def command() -> None:
    """Measure links, collectives, overlap, steps and scaling."""
