"""A TCP connection between two nodes, one JSON object per line, and how both prove that they share the secret."""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import time
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence


Message = TypeVar("Message")
_MOST_BYTES = 1 << 24
_STRANGERS_BYTES = 1 << 12
"""What one that has not shown the secret yet may send without a line's end."""


class Wire(Generic[Message]):
    """One end: queues any struct for sending, returns those of one kind that came."""

    def __init__(self, end: socket.socket, kind: Any) -> None:
        """Take over `end`; `kind` is the type, or union of types, that the other end sends."""
        end.settimeout(0)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = end
        self.heard_at = time.monotonic()
        """When the last byte came, or the wire was made."""
        self.trusted = False
        """Whether the other end has shown that it knows the secret."""
        self._decoder: msgspec.json.Decoder[Message] = msgspec.json.Decoder(kind)
        self._unread = b""
        self._unsent = b""
        self._put_back: list[Message] = []

    @property
    def has_unsent(self) -> bool:
        """Whether there is something left for `flush`."""
        return bool(self._unsent)

    def push(self, message: msgspec.Struct) -> None:
        """Queue a message, and send what can be sent now."""
        self._unsent += msgspec.json.encode(message) + b"\n"
        self.flush()

    def flush(self) -> None:
        """Send what can be sent now; an end that is gone is noticed by `pull`."""
        with contextlib.suppress(OSError):
            while self._unsent:
                self._unsent = self._unsent[self.socket.send(self._unsent) :]

    def pull(self) -> list[Message] | None:
        """Return what has come, perhaps nothing; None when the other end is gone or does not speak our language."""
        try:
            while data := self.socket.recv(1 << 16):
                self._unread += data
                self.heard_at = time.monotonic()
                if len(self._unread) > (_MOST_BYTES if self.trusted else _STRANGERS_BYTES):
                    return None
        except BlockingIOError:
            data = b"."
        except OSError:
            data = b""
        *lines, rest = self._unread.split(b"\n")
        if not data and not lines:
            return None
        self._unread = rest
        early, self._put_back = self._put_back, []
        try:
            return [*early, *(self._decoder.decode(line) for line in lines)]
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # the last two: no UTF-8, nested too deep
            return None

    def put_back(self, messages: Sequence[Message]) -> None:
        """Have the next `pull` return these first."""
        self._put_back = list(messages)

    def close(self) -> None:
        """Close this end."""
        self.socket.close()


# How two nodes show each other that they belong to one run, without telling a listener the secret.


PROTOCOL = 2
"""Number of the language nodes speak; nodes that speak another are refused."""


class Challenge(msgspec.Struct, frozen=True, tag="challenge"):
    """Show that you know the secret; the first that the hub says."""

    nonce: str
    protocol: int = PROTOCOL
    shardwise: str = ""


class Proof(msgspec.Struct, frozen=True, tag="proof"):
    """Here is what only one that knows the secret can compute; and a challenge back."""

    mac: str
    nonce: str = ""


def new_nonce() -> str:
    """Return words that were never said before."""
    return secrets.token_hex(16)


def prove(secret: str, role: str, challenge: str, own: str) -> str:
    """Return what answers `challenge`; `role` keeps one side's answer from being played back as the other's."""
    return hmac.digest(secret.encode(), f"{role} {challenge} {own}".encode(), "sha256").hex()


def is_proof(mac: str, secret: str, role: str, challenge: str, own: str) -> bool:
    """Return whether `mac` answers `challenge`."""
    return hmac.compare_digest(mac.encode(), prove(secret, role, challenge, own).encode())


def rendezvous_key(secret: str, run_id: str) -> str:
    """Return the key by which nodes sign the state of the rendezvous `run_id`; it gives nothing of the secret away."""
    return hmac.digest(secret.encode(), f"rendezvous {run_id}".encode(), "sha256").hex()
