"""How two nodes show each other that they belong to one run, without telling a listener the secret."""

from __future__ import annotations

import hmac
import secrets

import msgspec

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
