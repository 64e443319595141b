"""One node of a run on many machines: it runs the hub if it is node 0, and joins it."""

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
class NodesSpec(NodeLimits):
    """Which nodes a run has, which of them this one is, and where they join."""

    host: str
    """Host name or address of node 0."""
    port: int
    node_rank: int | None = None
    """Which node this is; None leaves that to the hub, which the node at `host` then runs."""
    run_id: str = "none"
    secret: str = ""
    """By which nodes of this run know each other; empty takes the run's id."""
    local_addr: str = ""
    """Address by which others reach this node, where the route to `host` does not give it."""

    @property
    def shared_secret(self) -> str:
        """What only the nodes of this run know; the run's id where the user gave no secret."""
        return self.secret or self.run_id


def node_facts(nodes: NodesSpec, command: str) -> dict[str, str]:
    """Return what must be the same on every node, by name."""
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
            hub = start_hub(listener, secret, nodes, facts=facts, host=host, run=str(run.path.resolve()))
    hello = Hello(host, nodes.node_rank, dict(facts), is_host=hub is not None)
    try:
        link = join_hub(where, nodes.port, secret, hello, timeout_s=nodes.join_s, note=note)
        try:
            yield link, run or make_run(Path(link.run))
        finally:
            link.close()
    finally:
        if hub is not None:
            deadline = time.monotonic() + LOST_S
            while hub.poll() is None and time.monotonic() < deadline:  # it reports to the others how the run ended
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
