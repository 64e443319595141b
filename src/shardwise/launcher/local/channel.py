"""A private socket between two of our processes: one JSON object per line, and descriptors beside them."""

from __future__ import annotations

import array
import socket
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from shardwise.launcher.local.lines import decode_line, encode_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    import msgspec

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
