"""Options of train and bench about where ranks compute and what they talk over."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from shardwise.errors import LaunchError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


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
    if context.params["backend"] != "mpi":
        return asked
    if asked not in (None, "cpu"):
        raise LaunchError(
            f"--device {asked}, but --backend mpi carries tensors of the CPU alone",
            code="world.backend-device-mismatch",
            fix="leave --device out, or use --backend nccl",
        )
    return "cpu"
