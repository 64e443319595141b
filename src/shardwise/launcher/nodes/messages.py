"""Messages between nodes and hub of a run, and their mutual authentication by challenge and response.

Both ends sign a random challenge of the peer with an HMAC under the shared secret. The signature includes the role of
the sender, so that it cannot be replayed in the opposite direction. Until a peer is authenticated, its messages are
decoded strictly and limited in size.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import time
from dataclasses import replace
from signal import Signals  # noqa: TC003 - read at run time by msgspec
from typing import TYPE_CHECKING, Any

import msgspec

from shardwise.launcher.policy import RankExit  # noqa: TC001 - read at run time by msgspec
from shardwise.launcher.transport import MessageStream

if TYPE_CHECKING:
    from collections.abc import Iterable

PROTOCOL = 3
"""Version of the messages between nodes; nodes with a different version are rejected."""
LOST_S = 5.0
"""Seconds of silence after which a node is lost: five heartbeats, so that one retransmitted packet is tolerated."""
UNAUTHENTICATED_BYTES = 1 << 12
"""Maximum message size of a peer that is not authenticated."""
AUTHENTICATED_BYTES = 1 << 24
"""Maximum message size of an authenticated peer."""


def node_stream(end: socket.socket, kind: Any) -> MessageStream[Any]:
    """Return a strict message stream over a socket to an unauthenticated host."""
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return MessageStream(end, kind, strict=True, limit_bytes=UNAUTHENTICATED_BYTES)


class Challenge(msgspec.Struct, frozen=True, tag="challenge"):
    """The first message of the hub, which requests a proof of the secret."""

    nonce: str
    protocol: int = PROTOCOL
    shardwise: str = ""


class Proof(msgspec.Struct, frozen=True, tag="proof"):
    """The response to a challenge, signed with the secret, and a challenge for the peer."""

    mac: str
    nonce: str = ""


def new_nonce() -> str:
    """Return a random challenge."""
    return secrets.token_hex(16)


def prove(secret: str, role: str, challenge: str, own: str) -> str:
    """Return the signature of `challenge`; `role` prevents a replay in the opposite direction."""
    return hmac.digest(secret.encode(), f"{role} {challenge} {own}".encode(), "sha256").hex()


def is_proof(mac: str, secret: str, role: str, challenge: str, own: str) -> bool:
    """Return whether `mac` is the valid signature of `challenge`."""
    return hmac.compare_digest(mac.encode(), prove(secret, role, challenge, own).encode())


def rendezvous_key(secret: str, run_id: str) -> str:
    """Return the key that signs the state of the rendezvous `run_id`, derived from the secret."""
    return hmac.digest(secret.encode(), f"rendezvous {run_id}".encode(), "sha256").hex()


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """A node's request to join the run."""

    host: str
    node_rank: int | None
    """The user's --node-rank, or None."""
    facts: dict[str, str]
    """Values that must be the same on every node, such as versions and the command, by name."""
    is_host: bool = False
    """Whether this node runs the hub and the stores."""


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The hub's acceptance of a node: its node number, node 0's run directory, and the heartbeat timeout."""

    node: int
    run: str
    lost_s: float = LOST_S
    decided: str = ""
    """What node 0 has decided for all nodes, such as a plan."""


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The hub's rejection of a node, with the reason and the fix."""

    fact: str
    fix: str
    code: str = "rendezvous.node-refused"
    """Error code; a hub of an older version does not send it."""


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """A heartbeat."""


class NodeReady(msgspec.Struct, frozen=True, tag="ready"):
    """A node's report that it is ready to start ranks."""


class Opened(msgspec.Struct, frozen=True, tag="opened"):
    """Node 0's report that the store of a round listens on this port."""

    round: int
    port: int


class Admit(msgspec.Struct, frozen=True, tag="admit"):
    """The addresses of all nodes, sent to node 0, whose store accepts connections from these hosts only."""

    addresses: tuple[str, ...]


class JoinRound(msgspec.Struct, frozen=True, tag="join"):
    """The hub's request to join a round by torch's rendezvous at its store."""

    round: int
    port: int
    least: int
    most: int
    last_call_s: float
    restarts: int


class RoundJoined(msgspec.Struct, frozen=True, tag="joined"):
    """The report of the nodes that joined a round, in the order of their ranks."""

    round: int
    nodes: tuple[int, ...]


class Failing(msgspec.Struct, frozen=True, tag="failing"):
    """A node's report that one of its ranks failed."""

    round: int
    certain: bool
    """Whether no other rank can have caused the failure."""


class Leaving(msgspec.Struct, frozen=True, tag="leaving"):
    """A node's report that its launcher received a stop signal."""

    signal: Signals


class NodeEnded(msgspec.Struct, frozen=True, tag="ended"):
    """A node's report that all of its ranks exited, or could not be started for the reason in `lost`."""

    round: int
    exits: tuple[RankExit, ...]
    """Exits of the ranks; their times are ages in seconds, see `rebased`."""
    lost: str = ""
    by_verdict: bool = False
    """Whether `lost` is the verdict of an observer that stopped the ranks."""
    out_of_memory: bool = False


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """The hub's request to stop the ranks of a round: at once after a failure, or gracefully by `signal`."""

    round: int
    reason: str
    signal: int = 0


class Note(msgspec.Struct, frozen=True, tag="note"):
    """A text that the launchers display."""

    text: str
    is_logged: bool = True
    """Whether the launchers also write it to their events; False for a restart, which they log themselves."""


class Again(msgspec.Struct, frozen=True, tag="again"):
    """The hub's announcement of the next round."""

    round: int


class Over(msgspec.Struct, frozen=True, tag="over"):
    """The hub's announcement that the run is over for the receiving node."""

    exit_code: int = 0
    failed: bool = False
    exits: tuple[RankExit, ...] = ()
    """The root cause and all other failures; times are ages in seconds."""
    cause: RankExit | None = None
    lost: str = ""
    interrupted: int = 0
    out_of_memory: bool = False
    mismatch: str = ""
    """Description of mismatched collectives that caused the failure, or empty."""


class RelayMessage(msgspec.Struct, frozen=True, tag="relay"):
    """An opaque text between observers of different nodes: to node 0, or from node 0 to all."""

    body: str
    to_all: bool = False


FromNode = Proof | Hello | Beat | NodeReady | Opened | RoundJoined | Failing | Leaving | NodeEnded | RelayMessage
FromHub = Challenge | Proof | Welcome | Refused | Beat | Admit | JoinRound | Stop | Note | Again | Over | RelayMessage


def rebased(exits: Iterable[RankExit]) -> tuple[RankExit, ...]:
    """Convert times to ages in seconds and ages to times, because the clocks of hosts differ."""
    now, clock = time.monotonic(), time.time()
    return tuple(
        replace(
            exit_,
            at=now - exit_.at,
            failure=exit_.failure and msgspec.structs.replace(exit_.failure, at=clock - exit_.failure.at),
            calls=exit_.calls and replace(exit_.calls, left_at=_rebased(exit_.calls.left_at, clock)),
        )
        for exit_ in exits
    )


def _rebased(at: float, clock: float) -> float:
    """Convert a time to an age or an age to a time; 0 means none."""
    return clock - at if at else 0.0
