"""What `train` is told about checkpoints: when, how many stay, and where to go on from."""

from __future__ import annotations

from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from shardwise.errors import InputError
from shardwise.runs.keep import GRAMMAR, parse_keep

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Command = TypeVar("Command", bound="Callable[..., Any]")


def _checked_keep(_context: click.Context, _option: click.Parameter, rules: str) -> str:
    """Refuse rules that cannot be read before anything starts."""
    parse_keep(rules)
    return rules


_OPTIONS = (
    click.option(
        "--save-every", type=click.IntRange(min=0), default=0, help="Steps between checkpoints (0: at a stop)."
    ),
    click.option(
        "--keep",
        default="3",
        show_default=True,
        metavar="RULES",
        callback=_checked_keep,
        help=f"Checkpoints that stay: {GRAMMAR}.",
    ),
    click.option(
        "--must-save", is_flag=True, help="Fail when a checkpoint cannot be saved (default: say so and go on)."
    ),
    click.option("--resume", default="never", help="A run directory or a checkpoint to go on from."),
)


def saving_options(command: Command) -> Command:
    """Give a command the options about checkpoints, in this order."""
    return reduce(lambda inner, option: option(inner), reversed(_OPTIONS), command)


def settle_saving(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what ranks are told of saving; refuse to go on from a path with nothing there before anything starts."""
    names = ("save_every", "keep", "must_save")
    return {**{name: options[name] for name in names}, "resume": _resumable(options["resume"])}


def _resumable(resume: str) -> str:
    if resume == "never":
        return resume
    path = Path(resume)
    if not (path / "manifest.json").exists() and not any((path / name).is_dir() for name in ("", "checkpoints")):
        raise InputError(
            f"--resume {resume} is no run directory and no checkpoint",
            code="checkpoint.resume-not-found",
            fix="name one that is there",
        )
    return str(path.resolve())
