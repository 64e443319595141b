"""`shardwise data`: tokenizes documents into a corpus, inspects corpora and token files, and computes mixtures."""

from __future__ import annotations

import sys

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from shardwise.cli.main import present, spec_options
from shardwise.data.inspect import DataInspectSpec, data_inspect
from shardwise.data.mix import DataMixSpec, data_mix
from shardwise.data.prepare.prepare import prepare_corpus
from shardwise.data.prepare.spec import DataPrepareSpec, PrepareProgress
from shardwise.units import format_count


@click.group("data", no_args_is_help=True)
def command() -> None:
    """Tokenize documents into a corpus of token shards, inspect corpora, and compute mixtures."""


@command.command("prepare", no_args_is_help=True)
@spec_options(DataPrepareSpec)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def prepare(spec: DataPrepareSpec, *, as_json: bool) -> int:
    """Tokenize documents in parallel into FOLDER; an interrupted command continues if it is repeated."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        DownloadColumn(),
        TimeRemainingColumn(compact=True),
    )
    console = Console(stderr=True)
    # The bar has no refresh thread, since this process forks workers.
    with Progress(*columns, console=console, auto_refresh=False, disable=not sys.stderr.isatty()) as bar:
        bar_task = bar.add_task("tokenizing", total=None)

        def show(progress: PrepareProgress) -> None:
            description = f"{format_count(progress.num_tokens)} tokens"
            bar.update(
                bar_task,
                completed=progress.num_bytes,
                total=progress.total_bytes,
                description=description,
                refresh=True,
            )

        report = prepare_corpus(spec, on_progress=show)
    return present(report, as_json=as_json)


@command.command("inspect", no_args_is_help=True)
@spec_options(DataInspectSpec)
@click.option("--json", "as_json", is_flag=True, help="Print the facts as JSON.")
def inspect(spec: DataInspectSpec, *, as_json: bool) -> int:
    """Show the documents, tokens, lengths, samples and duplicates of a corpus or a token file."""
    return present(data_inspect(spec), as_json=as_json)


@command.command("mix", no_args_is_help=True)
@spec_options(DataMixSpec)
@click.option("--json", "as_json", is_flag=True, help="Print the shares as JSON.")
def mix(spec: DataMixSpec, *, as_json: bool) -> int:
    """Show what proportions of sources mean in rows, tokens and epochs of a training."""
    return present(data_mix(spec), as_json=as_json)
