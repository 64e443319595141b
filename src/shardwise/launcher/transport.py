"""Messages between processes of a launch: one JSON object per line over a socket or a pipe.

A launcher and its fork parent, the nodes of a run and their hub, and a launcher and its guards on remote hosts exchange
msgspec structs, which are framed in this module only. Each line is one message, so a read may return any number of
bytes. Reads do not block; callers that wait pass a timeout to `receive`.

Command-line arguments and environment variables are bytes. Python decodes those that are not UTF-8 to lone surrogates,
which the standard library's JSON escapes and restores. Processes of one user rely on that. Between hosts it is unsafe:
a peer could send such a string before it is authenticated, and `str.encode` raises on it. Nodes therefore use strict
streams: msgspec's JSON, which has neither lone surrogates nor non-finite numbers.
"""

from __future__ import annotations

import json
import os
import select
import socket
import time
from typing import IO, TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

Message = TypeVar("Message")
_READ_BYTES = 1 << 16
_MAX_DESCRIPTORS = 8


class MessageStream(Generic[Message]):
    """One end of a message stream, which sends any struct and receives structs of one type; works with selectors."""

    def __init__(
        self, end: socket.socket | IO[bytes], kind: Any, *, strict: bool = False, limit_bytes: int | None = None
    ) -> None:
        """Wrap `end` and own it; `kind` is the type, or union of types, of the received messages.

        `strict` is for untrusted peers. The stream is closed if more than `limit_bytes` arrive without a line end.
        """
        os.set_blocking(end.fileno(), False)
        if isinstance(end, socket.socket):
            end.settimeout(0)
        self.end = end
        self.limit_bytes = limit_bytes
        self.heard_at = time.monotonic()
        """Monotonic time at which the last byte arrived, or the stream was created."""
        self._kind = kind
        self._strict = strict
        self._unread = b""
        self._unsent = b""
        self._put_back: list[Message] = []
        self._descriptors: list[int] = []

    def fileno(self) -> int:
        """Return the file descriptor of this end."""
        return self.end.fileno()

    @property
    def has_unsent(self) -> bool:
        """Whether queued bytes have not been sent yet."""
        return bool(self._unsent)

    def queue(self, message: Any) -> None:
        """Queue a message and send as much as possible without blocking."""
        self._unsent += encode_line(message, strict=self._strict)
        self.flush()

    def flush(self) -> None:
        """Send queued bytes without blocking; drop them if the peer disconnected, which `receive` reports."""
        try:
            while self._unsent:
                self._unsent = self._unsent[os.write(self.fileno(), self._unsent) :]
        except BlockingIOError:
            return
        except OSError:
            self._unsent = b""

    def send(self, message: Any, descriptors: Sequence[int] = ()) -> None:
        """Send one message, blocking until it is sent, with file descriptors if the stream is a Unix socket."""
        self._drain()
        line = encode_line(message, strict=self._strict)
        if descriptors and isinstance(self.end, socket.socket):
            self._wait(select.POLLOUT, None)
            try:
                line = line[socket.send_fds(self.end, [line], list(descriptors)) :]
            except OSError:
                return
        self._unsent = line
        self._drain()

    def _drain(self) -> None:
        while self._unsent:
            self._wait(select.POLLOUT, None)
            self.flush()

    def receive(self, timeout_s: float | None = 0.0) -> list[Message] | None:
        """Return the messages that arrived, waiting up to `timeout_s` for the first; None waits without limit.

        Returns None if the peer disconnected or sent an invalid message.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            is_open = self._read()
            *lines, rest = self._unread.split(b"\n")
            messages, self._put_back = self._put_back, []
            if not is_open and not lines and not messages:
                return None
            self._unread = rest
            try:
                messages += [decode_line(line, self._kind, strict=self._strict) for line in lines]
            except msgspec.DecodeError:
                return None
            left_s = None if deadline is None else deadline - time.monotonic()
            if messages or (left_s is not None and left_s <= 0):
                return messages
            self._wait(select.POLLIN, left_s)

    def put_back(self, messages: Sequence[Message]) -> None:
        """Queue messages for the next `receive` to return first."""
        self._put_back = list(messages)

    def take_descriptor(self) -> int:
        """Return the next file descriptor that was received with a message; the caller closes it."""
        return self._descriptors.pop(0)

    def close(self) -> None:
        """Close this end."""
        self.end.close()

    def _read(self) -> bool:
        """Read all available bytes; return False at the end of the stream or beyond the limit."""
        try:
            while data := self._read_some():
                self._unread += data
                self.heard_at = time.monotonic()
                if self.limit_bytes is not None and len(self._unread) > self.limit_bytes:
                    self._unread = b""
                    return False
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def _read_some(self) -> bytes:
        if not isinstance(self.end, socket.socket):
            return os.read(self.fileno(), _READ_BYTES)
        data, descriptors, _, _ = socket.recv_fds(self.end, _READ_BYTES, _MAX_DESCRIPTORS)
        self._descriptors += descriptors
        return data

    def _wait(self, event: int, timeout_s: float | None) -> None:
        poll = select.poll()
        poll.register(self.fileno(), event)
        poll.poll(None if timeout_s is None else timeout_s * 1000)


def encode_line(message: Any, *, strict: bool = False) -> bytes:
    """Return a message as one line of JSON."""
    if strict:
        return msgspec.json.encode(message) + b"\n"
    return json.dumps(msgspec.to_builtins(message), separators=(",", ":")).encode() + b"\n"


def decode_line(line: bytes, kind: Any, *, strict: bool = False) -> Any:
    """Decode one line to a message of `kind`, a type or union of types; raise msgspec.DecodeError if it is not one."""
    try:
        if strict:
            return msgspec.json.decode(line, type=kind)
        return msgspec.convert(json.loads(line), kind)
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or nested too deep
        if isinstance(error, msgspec.DecodeError):
            raise
        raise msgspec.DecodeError(f"not JSON: {error}") from None
