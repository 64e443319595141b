"""The `shardwise` command: its subcommands, options generated from Specs, error messages and exit codes."""

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
from shardwise.runs.console import BAD_INPUT, INTERRUPTED, PREEMPTED, echo, echo_error
from shardwise.spec import FlatField, Report, Spec, flat_fields, plain_type, switch_flag

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping


# Command groups whose subcommands are imported on use; the help needs only their names and summaries.


class LazyGroup(click.Group):
    """A group of subcommands, each added to this group or found as `command` in its own module."""

    def __init__(self, *args: Any, parts: Mapping[str, str], prefix: str = "", **more: Any) -> None:
        """Create a group of the subcommands `parts` (name -> summary), in the modules shardwise.cli.{prefix}{name}."""
        super().__init__(*args, **more)
        self._parts, self._prefix = parts, prefix

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """Return the names in the order of `parts`."""
        return list(self._parts)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Return a subcommand of this group, imported if necessary."""
        if cmd_name in self.commands or cmd_name not in self._parts:
            return self.commands.get(cmd_name)
        command: click.Command = importlib.import_module(f"shardwise.cli.{self._prefix}{cmd_name}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the subcommand in `args`, or raise UsageError with the nearest name."""
        if args and not args[0].startswith("-") and args[0] not in self._parts:
            raise click.UsageError(f"command {args[0]!r} does not exist: {nearest(args[0], self._parts)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """List all subcommands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(self._parts.items()))


# Errors of a command: a message and an exit code, printed only once if mpirun started the command on several ranks.


_RANK_0_WAIT_S = 10.0
"""Seconds that other ranks wait for rank 0 to report the same error; ranks that share few cores start slowly."""

_JOB = "JOB.py"
"""Placeholder for the job file in fixes of packages that do not know the command line."""


def end(code: int, message: str) -> int:
    """Print `message` and return the exit code `code`. Ranks started by mpirun exit here, and only one of them prints.

    All ranks find the same invalid input and stop after the same stop signal, and mpirun kills the other ranks when the
    first one exits with an error. So ranks other than 0 wait to be killed. Other errors may occur on a single rank.
    """
    me = _identity()
    if me.world_size == 1 or me.source not in MPI_STARTERS:
        echo_error(message)
        return code
    if me.rank > 0 and code in (BAD_INPUT, PREEMPTED):
        time.sleep(_RANK_0_WAIT_S)
    echo_error(message)
    os._exit(code)  # skips MPI_Finalize, in which ranks wait for each other


def with_job_file(message: str, *arguments: str) -> str:
    """Return an error message with the job file of the command line in place of the placeholder JOB.py."""
    job = next((each for each in arguments if re.fullmatch(r"[^=]+\.py(:\w+)?", each)), _JOB)
    return message.replace(_JOB, job)


def refuse_started_ranks(fact: str) -> None:
    """Raise InputError with `fact` if this process is a rank of a launched world, for commands that launch ranks."""
    me = identify()
    if me.world_size > 1:
        raise InputError(
            f"{fact}, but {me.source} started this process as a rank",
            code="cli.starts-own-ranks",
            fix="run the command without a launcher",
        )


def _identity() -> Identity:
    try:
        return identify()
    except EnvironmentVariablesError:
        return Identity()


VERBS = {
    "data": "Tokenize documents into a corpus, and inspect it.",
    "plan": "Choose a parallelism plan by predicted memory and step time.",
    "verify": "Verify that training under a plan equals training in one process.",
    "launch": "Run any script on several processes. Replaces torchrun.",
    "train": "Train the job of a job file on one or more processes.",
    "watch": "Show a run, live or after its end, in the terminal or the browser.",
    "checkpoint": "List, verify, compare and convert checkpoints.",
    "bench": "Benchmark collectives, links, overlap, training steps and scaling.",
    "doctor": "Diagnose a machine, its environment variables, the network or a run.",
}


@click.command(cls=LazyGroup, parts=VERBS, context_settings={"help_option_names": ["-h", "--help"]})
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
    """Plan, verify, launch and supervise distributed training of PyTorch jobs."""


def _show_version(context: click.Context, *, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        from shardwise.hardware.probe import package_version

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
        return end(BAD_INPUT, _text_of(error, arguments))
    except ShardwiseError as error:
        if "--debug" in takewhile(lambda argument: argument.startswith("-"), arguments):
            traceback.print_exc()
        message = with_code(with_job_file(str(error), *arguments), error.code)
        return end(error.exit_code, f"shardwise: {message}")
    return result if isinstance(result, int) else 0


def _text_of(error: click.ClickException, arguments: list[str]) -> str:
    """Return the message for a usage error of click, or the help if there were no arguments."""
    if isinstance(error, getattr(click.exceptions, "NoArgsIsHelpError", ())):  # since click 8.2
        return error.format_message()
    if isinstance(error, click.NoSuchOption):
        return f"shardwise: {_unknown_option(error, with_job_file(_JOB, *arguments))}"
    return f"shardwise: {' '.join(error.format_message().split())}"


def _unknown_option(error: click.NoSuchOption, job: str) -> str:
    """Return the message for an unknown option, which suggests a key of --set with that name or the nearest option.

    A key of --set may be a parameter of the job file.
    """
    name = error.option_name
    fact = f"option {name} does not exist"
    if error.ctx is None:
        return fact
    options = []
    for parameter in error.ctx.command.params:
        options += [option for option in parameter.opts if option.startswith("--")]
    if "--set" in options:
        from shardwise.job.load import job_parameters
        from shardwise.planner.settle import keys_ending_in, set_keys

        found = keys_ending_in(name.strip("-").replace("-", "_"), set_keys() | job_parameters(job))
        if found:
            return f"{fact}: use {' or '.join(f'--set {key}=VALUE' for key in found)}"
    # Compare without the dashes, which all options share; with them, --lr would match --help.
    close = difflib.get_close_matches(name.strip("-"), [option.strip("-") for option in options], n=1)
    return f"{fact}: " + (f"did you mean --{close[0]}?" if close else f"run {error.ctx.command_path} --help")


# Command-line options generated from the fields of a Spec: flags, types, defaults and help.


SpecT = TypeVar("SpecT", bound=Spec)

WITH_UNDERSCORES: dict[str, Any] = {"token_normalize_func": lambda token: token.replace("_", "-")}
"""Context settings of commands that accept --nproc_per_node for --nproc-per-node, as torchrun does."""


def spec_options(
    kind: type[SpecT], *, without: Collection[str] = ()
) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Decorate a command with an option for each field of a Spec, except `without`; pass it the Spec.

    Options that exist on the command line only, such as `--json`, are added by click and passed by name.
    """
    fields = {name: field for name, field in flat_fields(kind).items() if name not in without}

    def wrap(command: Callable[..., int]) -> Callable[..., int]:
        def call(**values: Any) -> int:
            options = {name: values.pop(name) for name in fields}
            return command(kind.of(**options), **values)

        call.__doc__ = command.__doc__
        call.__click_params__ = list(getattr(command, "__click_params__", ()))  # type: ignore[attr-defined]
        for name, field in reversed(fields.items()):
            call = _parameter(name, field)(call)
        return call

    return wrap


def present(report: Report, *, as_json: bool = False) -> int:
    """Print a report as text or JSON, and its note on standard error; return its exit code."""
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
    if field.default is True:
        flags, more["flag_value"] = tuple(switch_flag(field, flag) for flag in flags), False
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
    """Validate a value of a section during parsing; otherwise click would report a missing script first."""
    field.section_default.replace(**{field.name: value})
    return value


def _value(hint: Any) -> dict[str, Any]:
    """Return click's parameters for the type of a field."""
    kind, bounds = _unwrapped(hint)
    if kind is bool:
        return {"is_flag": True}
    if typing.get_origin(kind) is tuple:
        return {"multiple": True, **_value(typing.get_args(kind)[0])}
    return {"type": _click_type(kind, bounds)}


def _unwrapped(hint: Any) -> tuple[Any, msgspec.Meta | None]:
    """Return a type without None and Annotated, and its bounds."""
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
        return click.Path()  # a str, so that the Spec can refuse a URL, of which Path removes a slash
    if bounds is None:
        return kind
    if bounds.gt is not None:
        return click.FloatRange(min=bounds.gt, min_open=True, max=bounds.le)
    range_of: Any = click.IntRange if kind is int else click.FloatRange
    return range_of(min=bounds.ge, max=bounds.le)


def _is_tuple(hint: Any) -> bool:
    return typing.get_origin(plain_type(hint)) is tuple
