"""`shardwise checkpoint`: what is saved, whether it is sound, how two differ, what may go, and other formats."""

from __future__ import annotations

from pathlib import Path

import click

from shardwise.errors import InputError, nearest
from shardwise.runs.console import CHECK_FAILED, DONE, complain, say
from shardwise.runs.directory import GRAMMAR, parse_keep

KINDS = ("torch", "dcp", "hf", "mlx", "peft", "deepspeed", "shardwise")
"""The kinds that `convert` writes; here as words, so that torch is not imported to show them."""
_PATH = click.Path(path_type=Path)


@click.group("checkpoint", no_args_is_help=True)
def command() -> None:
    """List, check, compare and convert checkpoints."""


@command.command("ls", no_args_is_help=True)
@click.argument("path", type=_PATH)
def ls(path: Path) -> int:
    """List the checkpoints in a run directory, a folder, or one; sizes and headers are looked at, not every byte."""
    from shardwise.checkpoint.folder import list_checkpoints
    from shardwise.cli.checkpoint_view import show_listing

    show_listing(list_checkpoints(path, deep=False))
    return DONE


@command.command("inspect", no_args_is_help=True)
@click.argument("path", type=_PATH)
@click.option("--tensors", is_flag=True, help="List every tensor with dtype and shape.")
def inspect(path: Path, *, tensors: bool) -> int:
    """Show the facts and tensors of a checkpoint of any kind."""
    from shardwise.checkpoint.convert.convert import open_contents
    from shardwise.cli.checkpoint_view import show_contents, show_tensors

    contents = open_contents(path)
    show_contents(path, contents)
    if tensors:
        show_tensors(contents)
    return DONE


@command.command("check", no_args_is_help=True)
@click.argument("path", type=_PATH)
def check(path: Path) -> int:
    """Read every byte and compare it with its checksum; exit code 3 if anything is damaged."""
    from shardwise.checkpoint.folder import list_checkpoints

    rows = list_checkpoints(path, deep=True)
    for row in rows:
        for damage in row.damages:
            complain(f"damaged: {damage}")
        if not row.damages:
            say(f"sound: {row.path}")
    return CHECK_FAILED if any(row.damages for row in rows) else DONE


@command.command("diff", no_args_is_help=True)
@click.argument("left", type=_PATH)
@click.argument("right", type=_PATH)
def diff(left: Path, right: Path) -> int:
    """Compare two checkpoints of any kinds, tensor by tensor; exit code 3 if a tensor differs."""
    from shardwise.checkpoint.convert.convert import open_contents
    from shardwise.checkpoint.diff import diff as compare
    from shardwise.cli.checkpoint_view import show_diff

    report = compare(open_contents(left), open_contents(right))
    show_diff(report, left, right)
    return DONE if report.are_tensors_equal else CHECK_FAILED


@command.command("prune", no_args_is_help=True)
@click.argument("path", type=_PATH)
@click.option("--keep", "rules", metavar="RULES", required=True, help=f"Checkpoints that stay: {GRAMMAR}.")
def prune(path: Path, *, rules: str) -> int:
    """Remove old checkpoints; the newest good one stays in any case."""
    from shardwise.checkpoint import CheckpointFolder
    from shardwise.checkpoint.folder import list_checkpoints

    keep = parse_keep(rules)
    rows = list_checkpoints(path, deep=False)
    if [row.path for row in rows] == [path]:
        raise InputError(
            f"{path} is one checkpoint",
            code="checkpoint.single-checkpoint",
            fix="name the run directory or the folder it is in",
        )
    metrics = {name for row in rows for name in row.metrics}
    if keep.metric and keep.metric not in metrics:
        raise InputError(
            f"no checkpoint in {path} tells a metric {keep.metric!r}",
            code="checkpoint.metric-unknown",
            fix=nearest(keep.metric, metrics) if metrics else "",
        )
    removed = CheckpointFolder(rows[0].path.parent).prune(keep, deep=True)
    for each in removed:
        say(f"removed: {each}")
    say(f"{len(rows) - len(removed)} checkpoints stay")
    return DONE


@command.command("convert", no_args_is_help=True)
@click.argument("source", type=_PATH)
@click.argument("target", type=_PATH)
@click.option("--to", "kind", type=click.Choice(KINDS), required=True, help="What to write.")
@click.option("--weights", is_flag=True, help="Only the model's weights, as a plain state dict where TARGET is torch.")
@click.option("--step", type=click.IntRange(min=0), help="Optimizer steps made, where SOURCE does not say.")
@click.option("--config", type=_PATH, help="config.json to put beside the weights of a Hugging Face folder.")
@click.option("--zero", "stage", type=click.IntRange(1, 3), help="DeepSpeed: ZeRO files of this stage, for --nproc.")
@click.option("--nproc", type=click.IntRange(min=1), help="DeepSpeed: ranks that load them; without, a universal one.")
def convert(
    source: Path,
    target: Path,
    *,
    kind: str,
    weights: bool,
    step: int | None,
    config: Path | None,
    stage: int | None,
    nproc: int | None,
) -> int:
    """Write SOURCE, whose kind is recognised, as a new checkpoint TARGET; says what TARGET cannot hold."""
    from shardwise.checkpoint.convert.convert import TargetRanks
    from shardwise.checkpoint.convert.convert import convert as write
    from shardwise.cli.checkpoint_view import show_conversion
    from shardwise.units import format_bytes_si

    def announce(peak_bytes: int) -> None:
        complain(f"host peak: {format_bytes_si(peak_bytes)} of tensors at a time")

    if (stage is None) != (nproc is None):
        raise InputError(
            "--zero and --nproc go together",
            code="cli.options-incomplete",
            fix="give both, or neither for a universal checkpoint",
        )
    cut = None if stage is None or nproc is None else TargetRanks(stage, nproc)
    show_conversion(write(source, target, kind, weights=weights, step=step, config=config, cut=cut, announce=announce))
    return DONE
