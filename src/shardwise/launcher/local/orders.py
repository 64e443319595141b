"""Messages between the supervisor and the fork parent, over a private socket."""

from __future__ import annotations

import msgspec

from shardwise.launcher.local.target import (
    Module,  # noqa: TC001 - read at run time by msgspec
    Program,  # noqa: TC001 - read at run time by msgspec
    Script,  # noqa: TC001 - read at run time by msgspec
)


class StartRank(msgspec.Struct, frozen=True, tag="start"):
    """Fork one rank."""

    rank: int
    target: Script | Module | Program
    environ: dict[str, str]
    stdout: str | None
    """File to append to; None keeps the terminal."""
    stderr: str | None
    failure: str
    """Where the rank records the exception that ends it."""
    record: str = ""
    """Run directory in which the rank records its collectives; empty for no record."""
    fresh: bool = False
    """Whether the fork only starts a fresh interpreter or program."""
    ignore_hangup: bool = False
    """Whether the rank starts with SIGHUP ignored, as its launcher did under nohup."""


class StartStore(msgspec.Struct, frozen=True, tag="store"):
    """Fork the server of one attempt's store, on a listening socket that travels beside this order."""

    port: int
    host: str = "127.0.0.1"


class StartRendezvous(msgspec.Struct, frozen=True, tag="rendezvous"):
    """Fork a process that joins torch's rendezvous with the other nodes, and reports on the socket beside this."""

    host: str
    """Where the store of the round is."""
    port: int
    run_id: str
    node: int
    """Which node of the run this is; ranks follow this order."""
    nproc: int
    least: int
    most: int
    join_s: float
    last_call_s: float
    environ: dict[str, str]
    key: str = ""
    """By which the nodes sign what they agree on."""


class Started(msgspec.Struct, frozen=True, tag="started"):
    """A child runs: a rank, the store (rank -1) or a rendezvous (rank -2)."""

    rank: int
    pid: int
    listener_folder: str = ""
    """Of a rank: where listeners of multiprocessing put their sockets; whoever outlives all ranks removes it."""


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """A child ended."""

    pid: int
    returncode: int
    """Negative: ended by that signal."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Imports are done; or why forking is not safe here."""

    refusal: str = ""


Order = StartRank | StartStore | StartRendezvous
Report = Started | Ended | Ready

STORE = -1
"""In place of the rank of the store."""
KEY_VARIABLE = "SHARDWISE_RENDEZVOUS_KEY"
"""Carries the key of a rendezvous to a process that is not forked."""
RENDEZVOUS = -2
"""The same for the process of a rendezvous."""


class RendezvousResult(msgspec.Struct, frozen=True, tag="result"):
    """The nodes that joined, in the order of their ranks; or why they did not."""

    nodes: tuple[int, ...] = ()
    nprocs: tuple[int, ...] = ()
    refusal: str = ""
