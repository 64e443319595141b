"""`shardwise checkpoint`: list, check, inspect, compare, prune and convert checkpoints."""

from __future__ import annotations

import click

from shardwise.checkpoint.spec import CheckSpec, ConvertSpec, DiffSpec, InspectSpec, ListSpec, PruneSpec
from shardwise.cli.main import present, takes
from shardwise.runs.console import echo_error
from shardwise.units import format_bytes_si


@click.group("checkpoint", no_args_is_help=True)
def command() -> None:
    """List, check, compare and convert checkpoints."""


@command.command("ls", no_args_is_help=True)
@takes(ListSpec)
def ls(spec: ListSpec) -> int:
    """List the checkpoints in a run directory, a folder, or one; sizes and headers are looked at, not every byte."""
    from shardwise.checkpoint.folder import list_checkpoints

    return present(list_checkpoints(spec))


@command.command("inspect", no_args_is_help=True)
@takes(InspectSpec)
def inspect(spec: InspectSpec) -> int:
    """Show the facts and tensors of a checkpoint of any kind."""
    from shardwise.checkpoint.convert.convert import inspect as describe

    return present(describe(spec))


@command.command("check", no_args_is_help=True)
@takes(CheckSpec)
def check(spec: CheckSpec) -> int:
    """Read every byte and compare it with its checksum; exit code 3 if anything is damaged."""
    from shardwise.checkpoint.folder import check_checkpoints

    return present(check_checkpoints(spec))


@command.command("diff", no_args_is_help=True)
@takes(DiffSpec)
def diff(spec: DiffSpec) -> int:
    """Compare two checkpoints, in any supported formats, tensor by tensor; exit code 3 if a tensor differs."""
    from shardwise.checkpoint.convert.convert import diff as compare

    return present(compare(spec))


@command.command("prune", no_args_is_help=True)
@takes(PruneSpec)
def prune(spec: PruneSpec) -> int:
    """Remove old checkpoints; the newest good one stays in any case."""
    from shardwise.checkpoint.folder import prune_checkpoints

    return present(prune_checkpoints(spec))


@command.command("convert", no_args_is_help=True)
@takes(ConvertSpec)
def convert(spec: ConvertSpec) -> int:
    """Write SOURCE, whose kind is recognised, as a new checkpoint TARGET; reports what TARGET cannot hold."""
    from shardwise.checkpoint.convert.convert import convert as write

    def announce(peak_bytes: int) -> None:
        echo_error(f"host peak: {format_bytes_si(peak_bytes)} of tensors at a time")

    return present(write(spec, announce=announce))
