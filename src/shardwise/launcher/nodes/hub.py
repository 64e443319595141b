"""The hub: a process on node 0 to which every node of a run is connected.

Nodes report events of their ranks, the roster (`roster.py`, without I/O) decides, and the hub sends the decisions. It
is a separate process so that heartbeats continue while a launcher is busy. A node silent for `lost_s` counts as lost.
An unauthenticated connection is limited to UNAUTHENTICATED_BYTES and _GREETING_S.
"""

from __future__ import annotations

import contextlib
import selectors
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from shardwise.launcher.local.processes import ignore_stop_signals, start_fork
from shardwise.launcher.nodes.messages import (
    AUTHENTICATED_BYTES,
    Admit,
    Beat,
    Challenge,
    FromNode,
    Hello,
    NodeEnded,
    Over,
    Proof,
    Refused,
    RelayMessage,
    Welcome,
    is_proof,
    new_nonce,
    node_stream,
    prove,
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
"""Seconds between two heartbeats, in both directions."""
_GREETING_S = 5.0
"""Seconds for a connection to authenticate and send its Hello."""
_MAX_UNAUTHENTICATED = 256
"""Maximum number of concurrent unauthenticated connections."""
_CLOSE_S = 3.0
"""Seconds for the nodes to receive the final message and disconnect."""
HUB = -3
"""Rank number that represents the process of the hub."""


@dataclass
class _Peer:
    """A connection, which belongs to a node after authentication and a Hello."""

    stream: MessageStream[FromNode]
    nonce: str
    address: str
    since: float
    authenticated: bool = False
    """Whether the peer has proved that it has the secret."""
    node: int | None = None


def start_hub(
    listener: socket.socket,
    secret: str,
    limits: NodeLimits,
    *,
    facts: Mapping[str, str],
    host: str,
    run: str,
    decided: str = "",
) -> RankProcess:
    """Fork a hub that serves `listener`; it exits when the run is over or this process exits.

    Every node receives `run` and `decided`, a text, when it joins.
    """
    welcome = Welcome(0, run, limits.lost_s, decided)

    def serve() -> int:
        ignore_stop_signals()  # the hub ends with the run
        roster = Roster(limits, facts=facts, host=host, welcome=welcome, now=time.monotonic())
        Hub(listener, secret, roster, version=facts.get("shardwise", ""), lost_s=limits.lost_s).serve()
        return 0

    return start_fork(HUB, serve)


class Hub:
    """Transfers messages between the nodes' sockets and the roster, and detects lost nodes."""

    def __init__(self, listener: socket.socket, secret: str, roster: Roster, *, version: str, lost_s: float) -> None:
        self._listener = listener
        self._secret = secret
        self._roster = roster
        self._version = version
        self._lost_s = lost_s
        self._peers: list[_Peer] = []
        self._admitted: tuple[str, ...] = ()
        """The node addresses that were sent to node 0."""

    def serve(self) -> None:
        """Serve until the run is over and all nodes have disconnected, or until _CLOSE_S after the end of the run."""
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
            for _ in range(_MAX_UNAUTHENTICATED):  # a limit per iteration, so that nodes are served in between
                end, address = self._listener.accept()
                peer = _Peer(node_stream(end, FromNode), new_nonce(), str(address[0]), time.monotonic())
                peer.stream.queue(Challenge(peer.nonce, shardwise=self._version))
                self._peers.append(peer)
        unauthenticated = [peer for peer in self._peers if not peer.authenticated]
        # Under a flood of connections the oldest are closed, because a node authenticates within one round trip.
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
                self._roster.receive(peer.node, _with_times(message), now)
        silent_s = now - peer.stream.heard_at
        if messages is None or silent_s > self._lost_s or (peer.node is None and now - peer.since > _GREETING_S):
            how = "its connection closed" if messages is None else f"silent for {silent_s:.0f} s"
            self._drop(peer, how, now)

    def _relay(self, sender: _Peer, message: RelayMessage) -> None:
        for peer in self._peers:
            if peer is not sender and peer.node is not None and (message.to_all or peer.node == 0):
                peer.stream.queue(message)

    def _greet(self, peer: _Peer, message: FromNode) -> bool:
        """Process a message of a peer that has not joined yet; return False if it must be disconnected."""
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
        # Node 0 receives the addresses after its Welcome and before other nodes connect to its store.
        addresses = tuple(sorted({peer.address for peer in self._peers if peer.node is not None}))
        if 0 in streams and addresses != self._admitted:
            self._admitted = addresses
            streams[0].queue(Admit(addresses))
        for node, message in messages:
            if not isinstance(message, Welcome):
                streams[node].queue(_with_ages(message))


def _with_times(message: FromNode) -> FromNode:
    if not isinstance(message, NodeEnded):
        return message
    return msgspec.structs.replace(message, exits=rebased(message.exits))


def _with_ages(message: msgspec.Struct) -> msgspec.Struct:
    if not isinstance(message, Over):
        return message
    cause = None if message.cause is None else rebased([message.cause])[0]
    return msgspec.structs.replace(message, exits=rebased(message.exits), cause=cause)
