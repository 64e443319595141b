"""Messages between the supervisor and the fork parent, one JSON object per line over a private socket."""

from __future__ import annotations

import array
import json
import socket
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from shardwise.launcher.local.target import (
    Module,  # noqa: TC001 - read at run time by msgspec
    Program,  # noqa: TC001 - read at run time by msgspec
    Script,  # noqa: TC001 - read at run time by msgspec
)

if TYPE_CHECKING:
    from collections.abc import Sequence


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


class StartMeeting(msgspec.Struct, frozen=True, tag="meeting"):
    """Fork one that meets the other nodes by torch's rendezvous, and says what came of it on the socket beside this."""

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
    """A child runs: a rank, the store (rank -1) or a meeting (rank -2)."""

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


Order = StartRank | StartStore | StartMeeting
Report = Started | Ended | Ready

STORE = -1
"""Stands for the store where a rank is expected."""
KEY_VARIABLE = "SHARDWISE_RENDEZVOUS_KEY"
"""Carries the key of a rendezvous to a process that is not forked."""
MEETING = -2
"""Likewise for the one that meets other nodes."""


class Assembly(msgspec.Struct, frozen=True, tag="assembly"):
    """The nodes that met, in the order of their ranks; or why they did not."""

    nodes: tuple[int, ...] = ()
    nprocs: tuple[int, ...] = ()
    refusal: str = ""


# A private socket between two of our processes: one JSON object per line, and descriptors beside them.


Message = TypeVar("Message")
_MOST_BYTES = 1 << 22
_MOST_DESCRIPTORS = 8
_INT = array.array("i").itemsize


class Channel(Generic[Message]):
    """One end: sends any struct, receives those of one kind."""

    def __init__(self, end: socket.socket, kind: Any) -> None:
        """Take over `end`; `kind` is the type, or union of types, that the other end sends."""
        self.socket = end
        self._kind = kind
        self._buffer = b""
        self._descriptors: list[int] = []

    def send(self, message: msgspec.Struct, descriptors: Sequence[int] = ()) -> None:
        """Send one message, with open descriptors beside it; ConnectionError when the other end is gone."""
        self.socket.settimeout(None)
        data = encode_line(message)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        rest = data[self.socket.sendmsg([data], rights) :]
        if rest:  # even no bytes cannot be sent to one that has answered and left
            self.socket.sendall(rest)

    def receive(self, timeout_s: float | None = None) -> list[Message] | None:
        """Return the messages that have come, perhaps none yet; None when the other end is gone.

        TimeoutError after `timeout_s` seconds without a byte; None waits for ever, 0 not at all.
        """
        self.socket.settimeout(timeout_s)
        try:
            data, ancillary, _, _ = self.socket.recvmsg(_MOST_BYTES, socket.CMSG_SPACE(_MOST_DESCRIPTORS * _INT))
        except BlockingIOError:
            raise TimeoutError from None
        except ConnectionError:
            return None
        for _, _, content in ancillary:
            self._descriptors.extend(array.array("i", content[: len(content) - len(content) % _INT]))
        if not data:
            return None
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return [decode_line(line, self._kind) for line in lines]

    def take_descriptors(self, count: int) -> list[int]:
        """Return the next `count` descriptors that came; the caller closes them."""
        taken, self._descriptors = self._descriptors[:count], self._descriptors[count:]
        return taken

    def close(self) -> None:
        """Close this end."""
        self.socket.close()


# Messages between our processes, one JSON object per line, in which any argument or variable can travel.
#
# The operating system's strings are bytes. Python shows those that are not UTF-8 as lone surrogates, which the
# standard library's JSON escapes and restores, while msgspec's own JSON refuses them.


def encode_line(message: msgspec.Struct) -> bytes:
    """Return one message as a line with its end."""
    return json.dumps(msgspec.to_builtins(message), separators=(",", ":")).encode() + b"\n"


def decode_line(line: bytes, kind: Any) -> Any:
    """Return the message in a line; msgspec.DecodeError when it is not one of `kind`, a type or union of types."""
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise msgspec.DecodeError(f"not JSON: {error}") from None
    return msgspec.convert(content, kind)
