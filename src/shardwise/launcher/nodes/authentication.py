"""How two nodes prove to each other that they belong to one run, without sending the secret.

Both ends answer a random challenge with an HMAC of it under the secret (a challenge-response handshake in both
directions). The role of the sender is part of what is signed, so that no answer can be replayed in the other direction.
Until a peer has answered, its connection accepts little and decodes strictly.
"""

from __future__ import annotations

import hmac
import secrets
import socket
from typing import Any

import msgspec

from shardwise.launcher.transport import MessageStream

PROTOCOL = 2
"""Version of the messages between nodes; a node with another version is refused."""
UNAUTHENTICATED_BYTES = 1 << 12
"""What a peer that has not shown the secret may send without a line's end."""
AUTHENTICATED_BYTES = 1 << 24
"""The same for one that has."""


def node_stream(end: socket.socket, kind: Any) -> MessageStream[Any]:
    """Return the stream of a connection to another machine, which is not authenticated yet."""
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return MessageStream(end, kind, strict=True, limit_bytes=UNAUTHENTICATED_BYTES)


class Challenge(msgspec.Struct, frozen=True, tag="challenge"):
    """Show that you know the secret; the first message of the hub."""

    nonce: str
    protocol: int = PROTOCOL
    shardwise: str = ""


class Proof(msgspec.Struct, frozen=True, tag="proof"):
    """Here is what only one that knows the secret can compute; and a challenge back."""

    mac: str
    nonce: str = ""


def new_nonce() -> str:
    """Return a value that was never used before."""
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
