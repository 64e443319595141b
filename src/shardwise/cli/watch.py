"""`shardwise watch`: a run while it goes on or after, in the terminal or as a local page."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from shardwise.monitor.sinks import SinkSpec, parse_sink
from shardwise.runs import RunDirectory
from shardwise.runs.console import DONE, say

if TYPE_CHECKING:
    from shardwise.monitor.view import RunView


@click.command("watch", no_args_is_help=True)
@click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--once", is_flag=True, help="Print one picture and leave, as into a pipe.")
@click.option("--web", is_flag=True, help="Serve a page on this machine and print its address.")
@click.option("--port", type=click.IntRange(0, 65535), help="Of that page (default: as last time, else any).")
@click.option("--predict", is_flag=True, help="Also work out the memory that planning predicts.")
@click.option(
    "--sink",
    metavar="KIND:PLACE",
    callback=lambda _context, _option, text: None if text is None else parse_sink(text),
    help="Mirror it into a tracker until it ends, in place of showing it: tensorboard:DIR, wandb:PROJECT ...",
)
def command(*, run: Path, once: bool, web: bool, port: int | None, predict: bool, sink: SinkSpec | None) -> int:
    """Look at the run directory RUN: curves, memory, every rank, what happened; alive while it goes on."""
    from shardwise.monitor.predicted import start_predicting
    from shardwise.monitor.terminal import show_live, show_once
    from shardwise.monitor.view import RunView, check_run

    check_run(run)
    directory = RunDirectory(run)
    if sink is not None:
        from shardwise.monitor.sinks import mirror

        mirror(directory, sink, say)
        return DONE
    view = RunView(directory)
    predicting = start_predicting(directory) if predict else None
    try:
        if web or port is not None:
            _serve(view, port)
        elif once or not sys.stdout.isatty():
            if predicting is not None:
                predicting.wait()
            show_once(view)
        else:
            show_live(view)
    finally:
        if predicting is not None and predicting.poll() is None:
            predicting.terminate()
            predicting.wait()
    return DONE


def _serve(view: RunView, port: int | None) -> None:
    """Serve the page until an interrupt."""
    from shardwise.monitor.server import page_server

    server = page_server(view, port)
    say(f"watching {view.run.path} at {server.url}\nCtrl-C ends the page, not the run")
    try:
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
    finally:
        server.server_close()
