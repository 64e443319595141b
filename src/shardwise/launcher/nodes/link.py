"""A node's connection to the hub: heartbeats both ways from a thread of its own, whatever the launcher is doing."""

from __future__ import annotations

import queue
import selectors
import socket
import threading
import time
from typing import TYPE_CHECKING, cast

from shardwise.environment import variables
from shardwise.errors import LaunchError
from shardwise.launcher.nodes.authentication import (
    AUTHENTICATED_BYTES,
    PROTOCOL,
    Challenge,
    Proof,
    is_proof,
    new_nonce,
    node_stream,
    prove,
)
from shardwise.launcher.nodes.hub import BEAT_S, LOST_S
from shardwise.launcher.nodes.messages import Beat, FromHub, Hello, Note, Refused, RelayMessage, Welcome
from shardwise.launcher.nodes.network import resolve

if TYPE_CHECKING:
    from collections.abc import Callable

    import msgspec

    from shardwise.launcher.transport import MessageStream

_ATTEMPT_S = 2.0
_ANSWER_S = 5.0
_NOTE_AFTER_S = 3.0
"""After so long a node notes what it waits for."""


class HubLink:
    """What the launcher of a node sends to the hub and receives from it; `lost` once that is over."""

    def __init__(self, stream: MessageStream[FromHub], welcome: Welcome, note: Callable[[str], None]) -> None:
        """Take over a stream on which the hub has welcomed this node; its notes are shown by `note`."""
        self.node = welcome.node
        self.run = welcome.run
        connection = cast("socket.socket", stream.end)
        self.own_address = str(connection.getsockname()[0])
        """By which this machine reaches the hub."""
        self.hub_address = str(connection.getpeername()[0])
        self.lost = ""
        """How the connection to the hub ended; empty while it lasts."""
        self._stream = stream
        self._note = note
        self._inbox: queue.SimpleQueue[FromHub] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[msgspec.Struct] = queue.SimpleQueue()
        self._relayed: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def send(self, message: msgspec.Struct) -> None:
        """Send a message; when the hub is gone, `lost` is set."""
        self._outbox.put(message)
        self._wake_writer.send(b".")

    def take(self) -> list[FromHub]:
        """Return the messages of the hub since the last call, and show its notes."""
        found: list[FromHub] = []
        while not self._inbox.empty():
            message = self._inbox.get()
            if isinstance(message, Note):
                self._note(message.text)
            else:
                found.append(message)
        return found

    def relay(self, body: str, *, to_all: bool = False) -> None:
        """Send a text to the observers of node 0, or from there to those of all other nodes."""
        self.send(RelayMessage(body, to_all))

    def take_relayed(self) -> list[str]:
        """Return what the observers of other nodes have sent since the last call."""
        found = []
        while not self._relayed.empty():
            found.append(self._relayed.get())
        return found

    def close(self) -> None:
        """Send what is still queued, and close the connection."""
        self._closing = True
        self._wake_writer.send(b".")
        self._thread.join(LOST_S)
        for end in (self._stream, self._wake_reader, self._wake_writer):
            end.close()

    def _run(self) -> None:
        next_beat = 0.0
        with selectors.DefaultSelector() as selector:
            selector.register(self._stream, selectors.EVENT_READ)
            selector.register(self._wake_reader, selectors.EVENT_READ)
            while not (self._closing and self._outbox.empty() and not self._stream.has_unsent):
                for key, _ in selector.select(BEAT_S / 4):
                    if key.fileobj is self._wake_reader:
                        self._wake_reader.recv(1 << 10)
                while not self._outbox.empty():
                    self._stream.queue(self._outbox.get())
                self._stream.flush()
                messages = self._stream.receive()
                now = time.monotonic()
                silent_s = now - self._stream.heard_at
                if messages is None or silent_s > LOST_S:
                    how = "closed its connection" if messages is None else f"was silent for {silent_s:.0f} s"
                    self.lost = f"node 0 ({self.hub_address}), which holds the store, {how}"
                    return
                for message in messages:
                    if isinstance(message, RelayMessage):
                        self._relayed.put(message.body)
                    elif not isinstance(message, Beat):
                        self._inbox.put(message)
                if now >= next_beat:
                    next_beat = now + BEAT_S
                    self._stream.queue(Beat())


def join_hub(
    host: str, port: int, secret: str, hello: Hello, *, timeout_s: float, note: Callable[[str], None]
) -> HubLink:
    """Connect to the hub at `host`, which may not be up yet, prove the secret, and be welcomed or refused."""
    stream = node_stream(_connect(host, port, timeout_s, note), FromHub)
    try:
        return HubLink(stream, _authenticate(stream, f"{host}:{port}", secret, hello), note)
    except LaunchError:
        stream.close()
        raise


def _authenticate(stream: MessageStream[FromHub], endpoint: str, secret: str, hello: Hello) -> Welcome:
    challenge = _next(stream, endpoint)
    if not isinstance(challenge, Challenge) or challenge.protocol != PROTOCOL:
        raise LaunchError(
            f"node 0 at {endpoint} uses another protocol: it has shardwise"
            f" {getattr(challenge, 'shardwise', '')!r}, {hello.host} has {hello.facts['shardwise']!r}",
            code="rendezvous.protocol-mismatch",
            fix="install the same shardwise on all nodes",
        )
    nonce = new_nonce()
    stream.queue(Proof(prove(secret, "node", challenge.nonce, nonce), nonce))
    other_secret = LaunchError(
        f"node 0 at {endpoint} has another secret",
        code="rendezvous.wrong-secret",
        fix="use the same SHARDWISE_SECRET and --rdzv-id on every node",
    )
    proof = _next(stream, endpoint, other_secret)
    if not isinstance(proof, Proof) or not is_proof(proof.mac, secret, "hub", nonce, challenge.nonce):
        raise _unknown_peer(endpoint)
    stream.limit_bytes = AUTHENTICATED_BYTES
    stream.queue(hello)
    answer = _next(stream, endpoint)
    if isinstance(answer, Refused):
        raise LaunchError(answer.fact, code=answer.code, fix=answer.fix)
    if not isinstance(answer, Welcome):
        raise _unknown_peer(endpoint)
    return answer


def _connect(host: str, port: int, timeout_s: float, note: Callable[[str], None]) -> socket.socket:
    """Return a connection, tried again and again since nodes start in any order."""
    start, noted = time.monotonic(), False
    # The name of a pod comes and goes with the pod; elsewhere a name that does not resolve now never will.
    resolving = {"timeout_s": timeout_s} if variables("KUBERNETES_SERVICE_HOST") else {}
    while True:
        resolve(host, port, **resolving)
        try:
            return socket.create_connection((host, port), timeout=_ATTEMPT_S)
        except OSError as error:
            waited_s = time.monotonic() - start
            reason = error.strerror or "no answer"
        if waited_s > timeout_s:
            raise LaunchError(
                f"node 0 did not answer at {host}:{port} for {timeout_s:g} s ({reason})",
                code="rendezvous.unreachable",
                fix="start node 0 there, and let this machine reach that port",
            )
        if waited_s > _NOTE_AFTER_S and not noted:
            noted = True
            note(f"waiting for node 0 at {host}:{port} ({reason})")
        time.sleep(0.1)


def _next(stream: MessageStream[FromHub], endpoint: str, gone: LaunchError | None = None) -> FromHub:
    """Return the next message, beats left out; refuse a peer that is silent, or closes (by `gone`, if given)."""
    deadline = time.monotonic() + _ANSWER_S
    while (left_s := deadline - time.monotonic()) > 0:
        messages = stream.receive(left_s)
        if messages is None:
            raise gone or _unknown_peer(endpoint)
        real = [message for message in messages if not isinstance(message, Beat)]
        if real:
            stream.put_back(real[1:])
            return real[0]
    raise _unknown_peer(endpoint)


def _unknown_peer(endpoint: str) -> LaunchError:
    return LaunchError(
        f"the peer at {endpoint} is not node 0 of shardwise", code="rendezvous.unknown-peer", fix="see --master-port"
    )
