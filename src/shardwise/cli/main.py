"""The `shardwise` command: eight verbs, one sentence per error, exit codes that mean something."""

from __future__ import annotations

import sys
import traceback
from itertools import takewhile

import click

from shardwise.cli.lazy import LazyGroup
from shardwise.cli.one_voice import end, with_job_file
from shardwise.cli.set_keys import unknown_option
from shardwise.errors import ShardwiseError, with_code
from shardwise.runs.console import say
from shardwise.runs.exitcodes import BAD_INPUT, INTERRUPTED

VERBS = {
    "plan": "What fits, what it costs, what to choose and why.",
    "verify": "Prove that a plan computes what one process computes.",
    "launch": "Start any script on many processes, in place of torchrun.",
    "train": "Train a described job on one or many processes.",
    "watch": "Look at a run while it goes on, in a terminal or on a page.",
    "checkpoint": "List, check, compare and convert checkpoints.",
    "bench": "Measure links, collectives, overlap, steps and scaling.",
    "doctor": "Say what is wrong with a machine, its variables or a run.",
}


@click.command(cls=LazyGroup, parts=VERBS, kind="verb", context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=lambda context, _option, wanted: _show_version(context, wanted=wanted),
    help="Show the version and exit.",
)
def cli(*, debug: bool) -> None:
    """Plan, prove, launch and keep alive the training of a PyTorch job on many processes."""


def _show_version(context: click.Context, *, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        from shardwise.versions import package_version

        say(f"shardwise {package_version('shardwise')}")
        context.exit()


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    try:
        result = cli.main(args=arguments, prog_name="shardwise", standalone_mode=False)
    except click.exceptions.Exit as exit_:
        return exit_.exit_code
    except click.Abort:
        return INTERRUPTED
    except KeyboardInterrupt:
        return INTERRUPTED
    except click.ClickException as error:
        return end(BAD_INPUT, _text_of(error))
    except ShardwiseError as error:
        if "--debug" in takewhile(lambda argument: argument.startswith("-"), arguments):
            traceback.print_exc()
        sentence = with_code(with_job_file(str(error), *arguments), error.code)
        return end(error.exit_code, f"shardwise: {sentence}")
    return result if isinstance(result, int) else 0


def _text_of(error: click.ClickException) -> str:
    """Return what to print for a command line that click refuses: one sentence, or the help if nothing was typed."""
    if isinstance(error, getattr(click.exceptions, "NoArgsIsHelpError", ())):  # since click 8.2
        return error.format_message()
    if isinstance(error, click.NoSuchOption):
        return f"shardwise: {unknown_option(error)}"
    return f"shardwise: {' '.join(error.format_message().split())}"
