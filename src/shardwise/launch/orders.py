"""What the supervisor tells the fork parent, and what it hears back: one JSON object per line of a private socket."""

from __future__ import annotations

import msgspec

from shardwise.launch.target import Module, Program, Script  # noqa: TC001 - read at run time by msgspec


class StartRank(msgspec.Struct, frozen=True, tag="start"):
    """Fork one rank."""

    rank: int
    target: Script | Module | Program
    environ: dict[str, str]
    stdout: str | None
    """File to append to; None keeps the terminal."""
    stderr: str | None
    failure: str
    """Where the rank writes down the exception that ends it."""
    fresh: bool = False
    """Whether the fork only starts a fresh interpreter or program."""


class StartStore(msgspec.Struct, frozen=True, tag="store"):
    """Fork the server of one attempt's store, on a listening socket that travels beside this order."""

    port: int


class Started(msgspec.Struct, frozen=True, tag="started"):
    """A child runs: a rank, or the store (rank -1)."""

    rank: int
    pid: int


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """A child ended."""

    pid: int
    returncode: int
    """Negative: ended by that signal."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Imports are done; or why forking is not safe here."""

    refusal: str = ""


Order = StartRank | StartStore
Report = Started | Ended | Ready

STORE = -1
"""Stands for the store where a rank is expected."""
