"""A group of commands that are imported when they are used: help needs their words alone."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import click

from shardwise.errors import nearest

if TYPE_CHECKING:
    from collections.abc import Mapping


class LazyGroup(click.Group):
    """Commands by name and help line, in that order; each is the `command` of a module of its own."""

    def __init__(self, *args: Any, parts: Mapping[str, str], prefix: str = "", kind: str = "part", **more: Any) -> None:
        """`parts` gives the help line of each name; its module is shardwise.cli.PREFIXNAME; `kind` is what it is."""
        super().__init__(*args, **more)
        self._parts, self._prefix, self._kind = parts, prefix, kind

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """Names in the order in which they were given."""
        return list(self._parts)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Import a command."""
        if cmd_name not in self._parts:
            return None
        command: click.Command = importlib.import_module(f"shardwise.cli.{self._prefix}{cmd_name}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Name the nearest when there is no such one."""
        if args and not args[0].startswith("-") and args[0] not in self._parts:
            raise click.UsageError(f"there is no {self._kind} {args[0]!r}: {nearest(args[0], self._parts)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """List all without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl(list(self._parts.items()))
