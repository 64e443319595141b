"""One node of a run on many machines: joins the hub, meets the others, runs its ranks, round after round."""

from __future__ import annotations

import contextlib
import platform
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.errors import LaunchError
from shardwise.launcher.nodes.hub import LOST_S, start_hub
from shardwise.launcher.nodes.link import HubLink, join_hub
from shardwise.launcher.nodes.membership import NodeLimits
from shardwise.launcher.nodes.messages import Hello
from shardwise.launcher.nodes.network import interface_of, is_loopback, is_own, listen, listening_address, resolve
from shardwise.runs.console import printable
from shardwise.versions import package_version

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from shardwise.runs import RunDirectory


@dataclass(frozen=True, kw_only=True)
class NodesSpec:
    """Which nodes a run has, which of them this one is, and where they meet."""

    least: int
    most: int
    """Nodes: the run goes on with any number between the two."""
    host: str
    """Host name or address of node 0."""
    port: int
    node_rank: int | None = None
    """Which node this is; None leaves that to the hub, which the node at `host` then runs."""
    run_id: str = "none"
    secret: str = ""
    """By which nodes of this run know each other; empty takes the run's id."""
    local_addr: str = ""
    """Address by which others reach this node, where it cannot be told from the way to `host`."""
    join_s: float = 600.0
    last_call_s: float = 5.0
    max_restarts: int = 0

    @property
    def shared_secret(self) -> str:
        """What only the nodes of this run know; the run's id where the user gave no secret."""
        return self.secret or self.run_id


def node_facts(nodes: NodesSpec, command: str) -> dict[str, str]:
    """Return what must be the same on every node, by what it is."""
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
    make_run: Callable[[Path | None], RunDirectory],
    note: Callable[[str], None],
) -> Iterator[tuple[HubLink, RunDirectory]]:
    """Run the hub if this is node 0, be welcomed by it, and yield the link and the run directory.

    `make_run` makes that directory: a new one, or the one that node 0 has named.
    """
    host = socket.gethostname()
    run, hub, where = None, None, nodes.host
    secret = nodes.shared_secret
    listener = _hub_listener(nodes)
    if listener is not None:
        with listener:
            where = str(listener.getsockname()[0])
            run = make_run(None)
            note(
                f"shardwise: node 0 waits for nodes at {where}:{nodes.port} on {interface_of(where) or 'its interface'}"
            )
            if not nodes.secret and not is_loopback(where):
                note(
                    f"shardwise: SHARDWISE_SECRET is not set: who reaches {where}:{nodes.port} and knows --rdzv-id"
                    f" {nodes.run_id!r} can join; export the same random secret on every node"
                )
            limits = NodeLimits(
                least=nodes.least,
                most=nodes.most,
                max_restarts=nodes.max_restarts,
                join_s=nodes.join_s,
                last_call_s=nodes.last_call_s,
            )
            hub = start_hub(listener, secret, limits, facts=facts, host=host, run=str(run.path.resolve()))
    hello = Hello(host, nodes.node_rank, dict(facts), is_host=hub is not None)
    try:
        link = join_hub(where, nodes.port, secret, hello, patience_s=nodes.join_s, note=note)
        try:
            yield link, run or make_run(Path(link.run))
        finally:
            link.close()
    finally:
        if hub is not None:
            deadline = time.monotonic() + LOST_S
            while hub.poll() is None and time.monotonic() < deadline:  # it tells the others how the run ended
                time.sleep(0.02)
            hub.end()


def _hub_listener(nodes: NodesSpec) -> socket.socket | None:
    """Return the socket of the hub if this is the node to run it."""
    if nodes.node_rank is None:
        if not any(is_own(address) for address in resolve(nodes.host, nodes.port)):
            return None
        address = listening_address(nodes.host, nodes.port, nodes.local_addr)
        with contextlib.suppress(LaunchError):  # another node of this machine was faster
            return listen(address, nodes.port)
        return None
    if nodes.node_rank > 0:
        return None
    return listen(listening_address(nodes.host, nodes.port, nodes.local_addr), nodes.port)
