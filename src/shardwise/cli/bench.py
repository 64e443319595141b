"""`shardwise bench`: the group of its commands, and what those that train a job share."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import click

from shardwise.cli.main import LazyGroup
from shardwise.engines.backends import backend_row
from shardwise.errors import LaunchError
from shardwise.runs.console import complain, say

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardwise.bench.report.findings import Table
    from shardwise.job import Job, JobReference
    from shardwise.planner.settle import LocalDevice


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


# What the parts of `bench` that train a job have in common: their device, tables, a word on a busy machine.


def bench_device(asked: str | None, backend: str | None, nproc: int) -> tuple[LocalDevice, str]:
    """Return what settling must know of the device, and the device that ranks open: gloo's may share one GPU."""
    from shardwise.planner.settle import local_device

    shares = backend == "gloo"
    where = local_device(asked, 1 if shares else nproc)
    return where, "cuda:0" if shares and where.kind == "cuda" else where.kind


def load_torch_job(reference: JobReference) -> Job:
    """Load a job whose model is torch's."""
    from shardwise.engines.engine import engine_named
    from shardwise.job import load_job

    job = load_job(reference)
    fix = "shardwise train it, which reports samples per second"
    engine_named(job.engine).require_torch_model(reference.name, "bench measures torch modules", fix=fix)
    return job


def warn_if_busy() -> None:
    """Say so where more is running than there are cores: what is measured then will vary."""
    from shardwise.hardware import usable_cores

    load, cores = os.getloadavg()[0], usable_cores()
    if load > cores:
        complain(f"shardwise: the machine is busy (load {load:.1f} on {cores} cores): expect wide spreads")


def show_table(table: Table) -> None:
    """Show rows under their header, the first column to the left and numbers to the right."""
    rows = [table.header, *table.rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(table.header))]
    for row in rows:
        first, *others = zip(row, widths, strict=True)
        say("  ".join([first[0].ljust(first[1]), *(text.rjust(width) for text, width in others)]).rstrip())


# Options of bench about where ranks compute and what they talk over.


def place_options(
    *, device: str, backend: str, devices: Sequence[str] = ("cpu", "cuda")
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return what adds --device, one of `devices`, and --backend, in small letters, with these words of help.

    Backend mpi alone asks for the CPU, and with anything else is refused.
    """
    options = (
        click.option("--device", type=click.Choice(devices), callback=_settle_device, help=device),
        # Eager, so that it is known when --device is settled.
        click.option("--backend", metavar="NAME", is_eager=True, callback=_lower, help=backend),
    )

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def _lower(_context: click.Context, _option: click.Parameter, name: str | None) -> str | None:
    return None if name is None else name.lower()


def _settle_device(context: click.Context, _option: click.Parameter, asked: str | None) -> str | None:
    backend = backend_row(context.params["backend"])
    if backend.default_device is None:
        return asked
    if asked not in (None, backend.default_device):
        raise LaunchError(
            f"--device {asked}, but --backend {backend.name} carries tensors of the CPU alone",
            code="world.backend-device-mismatch",
            fix="leave --device out, or use --backend nccl",
        )
    return backend.default_device
