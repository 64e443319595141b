"""`shardwise checkpoint`: lists, verifies, inspects, compares, prunes and converts checkpoints."""

from __future__ import annotations

import click

from shardwise.checkpoint.spec import CheckSpec, ConvertSpec, DiffSpec, InspectSpec, ListSpec, PruneSpec
from shardwise.cli.main import present, spec_options
from shardwise.runs.console import echo_error
from shardwise.units import format_bytes_si


@click.group("checkpoint", no_args_is_help=True)
def command() -> None:
    """List, verify, compare and convert checkpoints."""


@command.command("ls", no_args_is_help=True)
@spec_options(ListSpec)
def ls(spec: ListSpec) -> int:
    """List the checkpoints of a run directory, another directory or a URL; verifies file sizes and headers only."""
    from shardwise.checkpoint.listing import list_checkpoints

    return present(list_checkpoints(spec))


@command.command("inspect", no_args_is_help=True)
@spec_options(InspectSpec)
def inspect(spec: InspectSpec) -> int:
    """Show the metadata and tensors of a checkpoint in any supported format."""
    from shardwise.checkpoint.convert.convert import inspect as describe

    return present(describe(spec))


@command.command("check", no_args_is_help=True)
@spec_options(CheckSpec)
def check(spec: CheckSpec) -> int:
    """Verify the checksums of all files; the exit code is 3 if a checkpoint is damaged."""
    from shardwise.checkpoint.listing import check_checkpoints

    return present(check_checkpoints(spec))


@command.command("diff", no_args_is_help=True)
@spec_options(DiffSpec)
def diff(spec: DiffSpec) -> int:
    """Compare two checkpoints of any supported formats; the exit code is 3 if a tensor differs."""
    from shardwise.checkpoint.convert.convert import diff as compare

    return present(compare(spec))


@command.command("prune", no_args_is_help=True)
@spec_options(PruneSpec)
def prune(spec: PruneSpec) -> int:
    """Remove old checkpoints. The newest intact one is always kept."""
    from shardwise.checkpoint.listing import prune_checkpoints

    return present(prune_checkpoints(spec))


@command.command("convert", no_args_is_help=True)
@spec_options(ConvertSpec)
def convert(spec: ConvertSpec) -> int:
    """Convert SOURCE, whose format is detected, to a new checkpoint TARGET; lists the state that is not converted."""
    from shardwise.checkpoint.convert.convert import convert as write

    def announce(peak_bytes: int) -> None:
        echo_error(f"peak host memory: {format_bytes_si(peak_bytes)} of tensors")

    return present(write(spec, announce=announce))
