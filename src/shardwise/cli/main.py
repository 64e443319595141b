"""The `shardwise` command: eight verbs, one sentence per error, exit codes that mean something."""

from __future__ import annotations

import difflib
import importlib
import os
import re
import sys
import time
import traceback
import types
import typing
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click
import msgspec

from shardwise.environment import MPI_STARTERS, Identity, identify
from shardwise.errors import EnvironmentVariablesError, InputError, ShardwiseError, nearest, with_code
from shardwise.runs.console import BAD_INPUT, INTERRUPTED, echo, echo_error
from shardwise.spec import FlatField, Report, Spec, flat_fields, plain_type

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping


# A group of commands that are imported when they are used: help needs their names and help lines alone.


class LazyGroup(click.Group):
    """Commands by name and help line, in that order; each is in this group, or the `command` of its own module."""

    def __init__(self, *args: Any, parts: Mapping[str, str], prefix: str = "", kind: str = "part", **more: Any) -> None:
        """`parts` gives the help line of each name; its module is shardwise.cli.PREFIXNAME; `kind` is what it is."""
        super().__init__(*args, **more)
        self._parts, self._prefix, self._kind = parts, prefix, kind

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """Names in the order in which they were given."""
        return list(self._parts)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Return a command that was added to this group, else import it."""
        if cmd_name in self.commands or cmd_name not in self._parts:
            return self.commands.get(cmd_name)
        command: click.Command = importlib.import_module(f"shardwise.cli.{self._prefix}{cmd_name}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Name the nearest command when the one asked for does not exist."""
        if args and not args[0].startswith("-") and args[0] not in self._parts:
            raise click.UsageError(f"there is no {self._kind} {args[0]!r}: {nearest(args[0], self._parts)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """List all without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl(list(self._parts.items()))


# How a command ends when it cannot continue: one sentence and an exit code, also where mpirun runs many of it.


_RANK_0_WAIT_S = 10.0
"""How much later than the others rank 0 may come to the same end: ranks that share few cores import one by one."""

_JOB = "JOB.py"
"""What packages that know no command line write for the job file in a fix."""


def end(code: int, message: str) -> int:
    """Print `message` and return `code`, the exit code; ranks of mpirun end here, and one of them prints.

    What one rank refuses as bad input the others refuse too, and mpirun ends all of them when the first has ended
    badly: so those after rank 0 wait to be ended, and print if nobody does. Any other end may be one rank's alone.
    """
    me = _identity()
    if me.world_size == 1 or me.source not in MPI_STARTERS:
        echo_error(message)
        return code
    if me.rank > 0 and code == BAD_INPUT:
        time.sleep(_RANK_0_WAIT_S)
    echo_error(message)
    os._exit(code)  # without MPI_Finalize, in which ranks wait for each other


def with_job_file(sentence: str, *arguments: str) -> str:
    """Return an error's sentence with the job file that is among the arguments, in place of the JOB.py of its fix."""
    own = next((each for each in arguments if re.fullmatch(r"[^=]+\.py(:\w+)?", each)), _JOB)
    return sentence.replace(_JOB, own)


def refuse_started_ranks(fact: str) -> None:
    """Refuse a command that starts its own ranks, which is the `fact`, in a process that is one of several ranks."""
    me = identify()
    if me.world_size > 1:
        raise InputError(
            f"{fact}, and {me.source} has started this one", code="cli.starts-own-ranks", fix="run it by itself"
        )


def _identity() -> Identity:
    try:
        return identify()
    except EnvironmentVariablesError:
        return Identity()


VERBS = {
    "plan": "What fits, what it costs, what to choose and why.",
    "verify": "Prove that a plan computes what one process computes.",
    "launch": "Start any script on many processes, in place of torchrun.",
    "train": "Train a described job on one or many processes.",
    "watch": "Follow a run live or after its end, in a terminal or on a page.",
    "checkpoint": "List, check, compare and convert checkpoints.",
    "bench": "Measure links, collectives, overlap, steps and scaling.",
    "doctor": "Find what is wrong with a machine, its variables or a run.",
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

        echo(f"shardwise {package_version('shardwise')}")
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
        return f"shardwise: {_unknown_option(error)}"
    return f"shardwise: {' '.join(error.format_message().split())}"


def _unknown_option(error: click.NoSuchOption) -> str:
    """Return the sentence for an option that does not exist: a key of --set by that name, else the nearest option."""
    name = error.option_name
    fact = f"option {name} does not exist"
    if error.ctx is None:
        return fact
    options = []
    for parameter in error.ctx.command.params:
        options += [option for option in parameter.opts if option.startswith("--")]
    if "--set" in options:
        from shardwise.planner.settle import keys_ending_in, set_keys

        found = keys_ending_in(name.strip("-").replace("-", "_"), set_keys())
        if found:
            return f"{fact}: use {' or '.join(f'--set {key}=VALUE' for key in found)}"
    # Without the dashes, which every option has in common: with them --lr is like --help.
    close = difflib.get_close_matches(name.strip("-"), [option.strip("-") for option in options], n=1)
    return f"{fact}: " + (f"did you mean --{close[0]}?" if close else f"{error.ctx.command_path} --help lists them")


# The options of a command, made from the fields of its Spec: flags, types, defaults and help.


SpecT = TypeVar("SpecT", bound=Spec)

WITH_UNDERSCORES: dict[str, Any] = {"token_normalize_func": lambda token: token.replace("_", "-")}
"""Context settings of commands that take --nproc_per_node for --nproc-per-node, as torchrun does."""


def takes(kind: type[SpecT], *, without: Collection[str] = ()) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Give a command one option per field of a Spec, but for those named in `without`; it is called with the Spec.

    Options that only the command line has (`--json`) stand beside it as click options and arrive by name.
    """
    fields = {name: field for name, field in flat_fields(kind).items() if name not in without}

    def wrap(command: Callable[..., int]) -> Callable[..., int]:
        def call(**values: Any) -> int:
            asked = {name: values.pop(name) for name in fields}
            return command(kind.of(**asked), **values)

        call.__doc__ = command.__doc__
        call.__click_params__ = list(getattr(command, "__click_params__", ()))  # type: ignore[attr-defined]
        for name, field in reversed(fields.items()):
            call = _parameter(name, field)(call)
        return call

    return wrap


def present(report: Report, *, as_json: bool = False) -> int:
    """Show a report as text or as JSON, its note on standard error, and return the exit code of the command."""
    text = report.to_json() if as_json else report.to_text()
    if text:
        echo(text)
    if report.note():
        echo_error(report.note())
    return report.exit_code


def _parameter(name: str, field: FlatField) -> Callable[[Callable[..., int]], Callable[..., int]]:
    if field.option.positional:
        more: dict[str, Any] = {"nargs": -1, "type": click.UNPROCESSED} if _is_tuple(field.hint) else _value(field.hint)
        required = field.default is msgspec.NODEFAULT
        return click.argument(name, metavar=field.option.metavar, required=required, **more)
    flags = field.option.flags or (f"--{name.replace('_', '-')}",)
    more = _value(field.hint)
    if field.default is msgspec.NODEFAULT:
        more["required"] = True
    elif not more.get("multiple"):
        more["default"] = field.default
        more["show_default"] = bool(field.default) and not more.get("is_flag")
    if field.option.bare is not None:
        more |= {"is_flag": False, "flag_value": field.option.bare}
    if field.section is not None:
        more["callback"] = lambda _context, _option, value: _checked(field, value)
    return click.option(*flags, name, metavar=field.option.metavar, help=field.help, **more)


def _checked(field: FlatField, value: Any) -> Any:
    """Check the value of a section at once: a script in its place would be reported as missing otherwise."""
    field.section_default.replace(**{field.name: value})
    return value


def _value(hint: Any) -> dict[str, Any]:
    """Return what click must know of a field's type."""
    kind, bounds = _unwrapped(hint)
    if kind is bool:
        return {"is_flag": True}
    if typing.get_origin(kind) is tuple:
        return {"multiple": True, **_value(typing.get_args(kind)[0])}
    return {"type": _click_type(kind, bounds)}


def _unwrapped(hint: Any) -> tuple[Any, msgspec.Meta | None]:
    """Return a type without None and Annotated, and the bounds that stood there."""
    bounds = None
    while typing.get_origin(hint) in (typing.Annotated, typing.Union, types.UnionType):
        hint, *marks = [part for part in typing.get_args(hint) if part is not type(None)]
        for mark in marks:
            if isinstance(mark, msgspec.Meta):
                bounds = mark
    return hint, bounds


def _click_type(kind: Any, bounds: msgspec.Meta | None) -> Any:
    if typing.get_origin(kind) is Literal:
        return click.Choice([str(choice) for choice in typing.get_args(kind)])
    if kind is Path:
        return click.Path(path_type=Path)
    if bounds is None:
        return kind
    if bounds.gt is not None:
        return click.FloatRange(min=bounds.gt, min_open=True, max=bounds.le)
    range_of: Any = click.IntRange if kind is int else click.FloatRange
    return range_of(min=bounds.ge, max=bounds.le)


def _is_tuple(hint: Any) -> bool:
    return typing.get_origin(plain_type(hint)) is tuple
