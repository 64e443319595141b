"""The hub: one small process on node 0 to which every node keeps a connection.

Nodes report what happens to their ranks; the roster (`roster.py`, pure) decides; the hub sends its decisions. It is a
process of its own so that heartbeats continue while a launcher is busy; a node that is silent for LOST_S is lost.
A connection that has not proved the secret costs at most UNAUTHENTICATED_BYTES and _GREETING_S, and is never a node.
"""

from __future__ import annotations

import contextlib
import selectors
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from shardwise.launcher.local.processes import ignore_stop_signals, start_fork
from shardwise.launcher.nodes.authentication import (
    AUTHENTICATED_BYTES,
    Challenge,
    Proof,
    is_proof,
    new_nonce,
    node_stream,
    prove,
)
from shardwise.launcher.nodes.messages import (
    Admit,
    Beat,
    FromNode,
    Hello,
    NodeEnded,
    Over,
    Refused,
    RelayMessage,
    Welcome,
    rebased,
)
from shardwise.launcher.nodes.roster import Roster

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping

    from shardwise.launcher.local.processes import RankProcess
    from shardwise.launcher.nodes.membership import NodeLimits
    from shardwise.launcher.transport import MessageStream

BEAT_S = 1.0
"""Between two signs of life, in both directions."""
LOST_S = 5.0
"""A node that is silent for so long is lost: five beats, so that one lost packet and its repeat do not count."""
_GREETING_S = 5.0
"""For a connection to prove the secret and introduce itself."""
_MAX_UNAUTHENTICATED = 256
"""Connections that have not proved the secret, at a time."""
_CLOSE_S = 3.0
"""For nodes to learn that the run is over."""
HUB = -3
"""In place of the rank of the hub."""


@dataclass
class _Peer:
    """One connection, and what is known of who is at its other end."""

    stream: MessageStream[FromNode]
    nonce: str
    address: str
    since: float
    authenticated: bool = False
    """Whether it has proved that it knows the secret."""
    node: int | None = None


def start_hub(
    listener: socket.socket,
    secret: str,
    limits: NodeLimits,
    *,
    facts: Mapping[str, str],
    host: str,
    run: str,
) -> RankProcess:
    """Fork a hub that serves `listener`; it ends when the run is over or this process is gone."""

    def serve() -> int:
        ignore_stop_signals()  # it ends with the run, not before
        roster = Roster(limits, facts=facts, host=host, run=run, now=time.monotonic())
        Hub(listener, secret, roster, version=facts.get("shardwise", "")).serve()
        return 0

    return start_fork(HUB, serve)


class Hub:
    """Moves messages between sockets and the roster, and detects silent nodes."""

    def __init__(self, listener: socket.socket, secret: str, roster: Roster, *, version: str) -> None:
        self._listener = listener
        self._secret = secret
        self._roster = roster
        self._version = version
        self._peers: list[_Peer] = []
        self._admitted: tuple[str, ...] = ()
        """The addresses of nodes that node 0 knows."""

    def serve(self) -> None:
        """Serve until the run is over and every node knows it."""
        self._listener.settimeout(0)
        next_beat, close_by = 0.0, None
        while close_by is None or (self._peers and time.monotonic() < close_by):
            self._wait(BEAT_S / 4)
            now = time.monotonic()
            self._accept()
            for peer in list(self._peers):
                self._receive(peer, now)
            self._roster.tick(now)
            if now >= next_beat:
                next_beat = now + BEAT_S
                for peer in self._peers:
                    if peer.node is not None:
                        peer.stream.queue(Beat())
            self._send()
            if self._roster.is_over and close_by is None:
                close_by = now + _CLOSE_S

    def _wait(self, timeout_s: float) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            for peer in self._peers:
                write = selectors.EVENT_WRITE if peer.stream.has_unsent else 0
                selector.register(peer.stream, selectors.EVENT_READ | write)
            selector.select(timeout_s)
        for peer in self._peers:
            peer.stream.flush()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            for _ in range(_MAX_UNAUTHENTICATED):  # in one turn: nodes are served between
                end, address = self._listener.accept()
                peer = _Peer(node_stream(end, FromNode), new_nonce(), str(address[0]), time.monotonic())
                peer.stream.queue(Challenge(peer.nonce, shardwise=self._version))
                self._peers.append(peer)
        unauthenticated = [peer for peer in self._peers if not peer.authenticated]
        # A flood costs the oldest their turn: a node proves the secret within a round trip.
        for peer in unauthenticated[: max(0, len(unauthenticated) - _MAX_UNAUTHENTICATED)]:
            self._peers.remove(peer)
            peer.stream.close()

    def _receive(self, peer: _Peer, now: float) -> None:
        messages = peer.stream.receive()
        for message in messages or ():
            if peer.node is None:
                if not self._greet(peer, message):
                    messages = None
                    break
            elif isinstance(message, RelayMessage):
                self._relay(peer, message)
            else:
                self._roster.receive(peer.node, _dated(message), now)
        silent_s = now - peer.stream.heard_at
        if messages is None or silent_s > LOST_S or (peer.node is None and now - peer.since > _GREETING_S):
            how = "its connection closed" if messages is None else f"silent for {silent_s:.0f} s"
            self._drop(peer, how, now)

    def _relay(self, sender: _Peer, message: RelayMessage) -> None:
        for peer in self._peers:
            if peer is not sender and peer.node is not None and (message.to_all or peer.node == 0):
                peer.stream.queue(message)

    def _greet(self, peer: _Peer, message: FromNode) -> bool:
        """Take in the message of a peer that is not a node yet; False when it cannot become one."""
        if isinstance(message, Proof) and not peer.authenticated:
            if not is_proof(message.mac, self._secret, "node", peer.nonce, message.nonce):
                return False
            peer.authenticated = True
            peer.stream.limit_bytes = AUTHENTICATED_BYTES
            peer.stream.queue(Proof(prove(self._secret, "hub", message.nonce, peer.nonce)))
            return True
        if not isinstance(message, Hello) or not peer.authenticated:
            return False
        answer = self._roster.join(message)
        if isinstance(answer, Refused):
            peer.stream.queue(answer)
            return False
        peer.node = answer
        return True

    def _drop(self, peer: _Peer, how: str, now: float) -> None:
        self._peers.remove(peer)
        peer.stream.close()
        if peer.node is not None:
            self._roster.lose(peer.node, how, now)

    def _send(self) -> None:
        streams = {peer.node: peer.stream for peer in self._peers}
        messages = [(node, message) for node, message in self._roster.take() if node in streams]
        for node, message in messages:
            if isinstance(message, Welcome):
                streams[node].queue(message)
        # Node 0 learns the addresses after it was welcomed, and before other nodes are sent to its store.
        addresses = tuple(sorted({peer.address for peer in self._peers if peer.node is not None}))
        if 0 in streams and addresses != self._admitted:
            self._admitted = addresses
            streams[0].queue(Admit(addresses))
        for node, message in messages:
            if not isinstance(message, Welcome):
                streams[node].queue(_aged(message))


def _dated(message: FromNode) -> FromNode:
    return msgspec.structs.replace(message, exits=rebased(message.exits)) if isinstance(message, NodeEnded) else message


def _aged(message: msgspec.Struct) -> msgspec.Struct:
    if not isinstance(message, Over):
        return message
    cause = None if message.cause is None else rebased([message.cause])[0]
    return msgspec.structs.replace(message, exits=rebased(message.exits), cause=cause)
