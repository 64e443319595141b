"""One node of a run on several hosts, and its connection to the hub, with heartbeats in a separate thread."""

from __future__ import annotations

import contextlib
import platform
import queue
import selectors
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from shardwise.environment import variables
from shardwise.errors import LaunchError
from shardwise.hardware.probe import package_version
from shardwise.launcher.nodes.hub import BEAT_S, start_hub
from shardwise.launcher.nodes.membership import NodeLimits
from shardwise.launcher.nodes.messages import (
    AUTHENTICATED_BYTES,
    LOST_S,
    PROTOCOL,
    Beat,
    Challenge,
    FromHub,
    Hello,
    Proof,
    Refused,
    RelayMessage,
    Welcome,
    is_proof,
    new_nonce,
    node_stream,
    prove,
)
from shardwise.launcher.nodes.network import interface_of, is_loopback, is_own, listen, listening_address, resolve
from shardwise.runs.console import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import msgspec

    from shardwise.launcher.transport import MessageStream
    from shardwise.runs import RunDirectory

_ATTEMPT_S = 2.0
_ANSWER_S = 5.0
_NOTE_AFTER_S = 3.0
"""Seconds after which a node logs that it waits for node 0."""


class HubLink:
    """The connection of a node's launcher to the hub; `lost` is set after the connection ended."""

    def __init__(self, stream: MessageStream[FromHub], welcome: Welcome) -> None:
        """Use a stream on which the hub has sent `welcome`."""
        self.node = welcome.node
        self.run = welcome.run
        self.decided = welcome.decided
        """What node 0 has decided for all nodes."""
        self._lost_s = welcome.lost_s
        connection = cast("socket.socket", stream.end)
        self.own_address = str(connection.getsockname()[0])
        """Address of this host on the connection to the hub."""
        self.hub_address = str(connection.getpeername()[0])
        self.lost = ""
        """Description of how the connection ended; empty while it is open."""
        self._stream = stream
        self._inbox: queue.SimpleQueue[FromHub] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[msgspec.Struct] = queue.SimpleQueue()
        self._relayed: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def send(self, message: msgspec.Struct) -> None:
        """Queue a message for the hub."""
        self._outbox.put(message)
        self._wake_writer.send(b".")

    def take(self) -> list[FromHub]:
        """Return the hub's messages since the last call."""
        found: list[FromHub] = []
        while not self._inbox.empty():
            found.append(self._inbox.get())
        return found

    def relay(self, body: str, *, to_all: bool = False) -> None:
        """Send a text to the observers of node 0, or from node 0 to the observers of all other nodes."""
        self.send(RelayMessage(body, to_all))

    def take_relayed(self) -> list[str]:
        """Return the texts that observers of other nodes have sent since the last call."""
        found = []
        while not self._relayed.empty():
            found.append(self._relayed.get())
        return found

    def close(self) -> None:
        """Send the queued messages and close the connection."""
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
                if messages is None or silent_s > self._lost_s:
                    how = "closed its connection" if messages is None else f"was silent for {silent_s:.0f} s"
                    self.lost = f"node 0 ({self.hub_address}), which runs the store, {how}"
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
    """Connect to the hub at `host`, waiting until it is up, authenticate, and join the run or raise LaunchError."""
    stream = node_stream(_connect(host, port, timeout_s, note), FromHub)
    try:
        return HubLink(stream, _authenticate(stream, f"{host}:{port}", secret, hello))
    except LaunchError:
        stream.close()
        raise


def _authenticate(stream: MessageStream[FromHub], endpoint: str, secret: str, hello: Hello) -> Welcome:
    challenge = _next(stream, endpoint)
    if not isinstance(challenge, Challenge) or challenge.protocol != PROTOCOL:
        raise LaunchError(
            f"node 0 at {endpoint} uses a different protocol: it has shardwise"
            f" {getattr(challenge, 'shardwise', '')!r}, but {hello.host} has {hello.facts['shardwise']!r}",
            code="rendezvous.protocol-mismatch",
            fix="install the same shardwise on all nodes",
        )
    nonce = new_nonce()
    stream.queue(Proof(prove(secret, "node", challenge.nonce, nonce), nonce))
    wrong_secret = LaunchError(
        f"node 0 at {endpoint} has a different secret",
        code="rendezvous.wrong-secret",
        fix="set the same SHARDWISE_SECRET and --rdzv-id on every node",
    )
    proof = _next(stream, endpoint, wrong_secret)
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
    """Return a connection to node 0, retrying until the timeout because nodes start in any order."""
    start, noted = time.monotonic(), False
    # The name of a pod resolves only while the pod exists; elsewhere a name that does not resolve is an error.
    resolving = {"timeout_s": timeout_s} if variables("KUBERNETES_SERVICE_HOST") else {}
    while True:
        resolve(host, port, **resolving)
        try:
            return socket.create_connection((host, port), timeout=_ATTEMPT_S)
        except OSError as error:
            waited_s = time.monotonic() - start
            reason = error.strerror or "no response"
        if waited_s > timeout_s:
            raise LaunchError(
                f"node 0 did not respond at {host}:{port} within {timeout_s:g} s ({reason})",
                code="rendezvous.unreachable",
                fix=f"start node 0 on {host}, and allow connections from this host to port {port}",
            )
        if waited_s > _NOTE_AFTER_S and not noted:
            noted = True
            note(f"waiting for node 0 at {host}:{port} ({reason})")
        time.sleep(0.1)


def _next(stream: MessageStream[FromHub], endpoint: str, gone: LaunchError | None = None) -> FromHub:
    """Return the next message other than a heartbeat; raise `gone` if the peer disconnects, LaunchError on timeout."""
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
        f"the process at {endpoint} is not shardwise's node 0",
        code="rendezvous.unknown-peer",
        fix="pass the --master-port of node 0",
    )


@dataclass(frozen=True, kw_only=True)
class NodesSpec(NodeLimits):
    """The resolved settings of a run on several nodes: limits, rendezvous endpoint, and the rank of this node."""

    host: str
    """Host name or address of node 0."""
    port: int
    node_rank: int | None = None
    """Rank of this node; if None, the hub assigns it, and the node with the address `host` runs the hub."""
    run_id: str = "none"
    secret: str = ""
    """Secret with which the nodes authenticate each other; if empty, the run id."""
    local_addr: str = ""
    """Address at which other nodes reach this one; if empty, the source address of the route to `host`."""

    @property
    def shared_secret(self) -> str:
        """The user's secret, or the run id if the user did not set one."""
        return self.secret or self.run_id


def node_facts(nodes: NodesSpec, command: str) -> dict[str, str]:
    """Return the versions and options that must be the same on every node, by name."""
    return {
        "shardwise": package_version("shardwise"),
        "torch": package_version("torch").partition("+")[0],
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "--nnodes": f"{nodes.least}:{nodes.most}",
        "--rdzv-id": nodes.run_id,
        "command": printable(command),
    }


@contextlib.contextmanager
def join_run(
    nodes: NodesSpec,
    facts: Mapping[str, str],
    make_run: Callable[[Path | None, str], RunDirectory],
    note: Callable[[str], None],
    *,
    decides: str = "",
) -> Iterator[tuple[HubLink, RunDirectory]]:
    """Start the hub if this is node 0, join it, and yield the connection and the run directory.

    `make_run` creates that directory: a new one for None, or the path that node 0 has sent. It also receives the text
    that node 0 `decides` for all nodes.
    """
    host = socket.gethostname()
    run, hub, where = None, None, nodes.host
    secret = nodes.shared_secret
    listener = _hub_listener(nodes)
    if listener is not None:
        with listener:
            where = str(listener.getsockname()[0])
            run = make_run(None, decides)
            note(
                f"shardwise: node 0 waits for nodes at {where}:{nodes.port} on {interface_of(where) or 'its interface'}"
            )
            if not nodes.secret and not is_loopback(where):
                note(
                    f"shardwise: SHARDWISE_SECRET is not set, so any host that can connect to {where}:{nodes.port} with"
                    f" --rdzv-id {nodes.run_id!r} can join; export the same random secret on every node"
                )
            path = str(run.path.resolve())
            hub = start_hub(listener, secret, nodes, facts=facts, host=host, run=path, decided=decides)
    hello = Hello(host, nodes.node_rank, dict(facts), is_host=hub is not None)
    try:
        link = join_hub(where, nodes.port, secret, hello, timeout_s=nodes.join_s, note=note)
        try:
            yield link, run or make_run(Path(link.run), link.decided)
        finally:
            link.close()
    finally:
        if hub is not None:
            deadline = time.monotonic() + LOST_S
            while hub.poll() is None and time.monotonic() < deadline:  # it sends the result to the other nodes
                time.sleep(0.02)
            hub.end()


def _hub_listener(nodes: NodesSpec) -> socket.socket | None:
    """Return the listening socket of the hub if this node runs it, else None."""
    if nodes.node_rank is None:
        if not any(is_own(address) for address in resolve(nodes.host, nodes.port)):
            return None
        address = listening_address(nodes.host, nodes.port, nodes.local_addr)
        with contextlib.suppress(LaunchError):  # a different node on this host already runs the hub
            return listen(address, nodes.port)
        return None
    if nodes.node_rank > 0:
        return None
    return listen(listening_address(nodes.host, nodes.port, nodes.local_addr), nodes.port)
