"""Detects replica drift of any script from recorded fingerprints, and network partitions from TCP sockets of ranks."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from shardwise.runs import EventLog, Tail
from shardwise.runs.drift import Copies, Drift, DriftEvidence, find_drift

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Mapping, Sequence

    from shardwise.runs import RunDirectory
    from shardwise.runs.drift import Replica, ReplicaSpec


_POLL_S = 0.5
_MAX_OPEN = 64
"""Maximum number of steps that are kept while fingerprints of ranks that are behind or have ended are missing."""

Check = dict[str, Any]


class ReplicaWatch:
    """An observer of the launcher that compares the replicas of this machine's ranks and reports the first drift."""

    def __init__(self, run: RunDirectory, spec: ReplicaSpec, report: Callable[[str], None], node: int = 0) -> None:
        """Observe the ranks passed to `follow`; a drift is passed to `report` and written to this node's events."""
        self._run, self._spec, self._report = run, spec, report
        self._log_path = run.launcher_events(node)
        self._next_poll = 0.0
        self.follow(range(0))

    def follow(self, ranks: range) -> None:
        """Observe `ranks` from now on, in place of earlier ranks."""
        self.verdict = ""
        """The reported drift; empty while replicas are equal."""
        self._unreported = ""
        """The verdict until `tick` has returned it, so that restarted ranks are not stopped for it."""
        self._tails = {rank: Tail(self._run.replicas(rank)) for rank in ranks}
        self._tensors: dict[tuple[int, int], Check] = {}
        self._open: dict[tuple[int, int], dict[int, Check]] = {}
        self._last_equal: dict[int, int] = {}

    def tick(self) -> str:
        """Check the replicas if a check is due; return the verdict once if the ranks must be stopped, otherwise ''."""
        now = time.monotonic()
        if now >= self._next_poll:
            self._next_poll = now + _POLL_S
            with contextlib.suppress(OSError):  # a full disk or a removed directory must not end a launch
                self._poll()
        verdict, self._unreported = self._unreported, ""
        return verdict if self._spec.stops else ""

    def places(self) -> str:
        """Return an empty string, because replica checks do not record collectives."""
        return ""

    def _poll(self) -> None:
        for rank, tail in self._tails.items():
            for event in tail.events():
                key = event["optimizer"], event.get("step", 0)
                if event["kind"] == "tensors":  # once per process: data of an earlier process is obsolete
                    if (rank, key[0]) in self._tensors:
                        self.verdict = ""
                    self._tensors[rank, key[0]] = event
                    for checks in self._open.values():
                        checks.pop(rank, None)
                else:
                    self._open.setdefault(key, {})[rank] = event
        for key in sorted(self._open):
            if len(self._open[key]) == len(self._tails):
                self._compare(key, self._open.pop(key))
        while len(self._open) > _MAX_OPEN:
            del self._open[min(self._open, key=lambda key: key[1])]

    def _compare(self, key: tuple[int, int], checks: Mapping[int, Check]) -> None:
        number, step = key
        if self.verdict:
            return
        tensors = {rank: self._tensors[rank, number] for rank in checks}
        found = judge(step, checks, tensors, self._last_equal.get(number))
        if found is None:
            self._last_equal[number] = step
            return
        self.verdict = self._unreported = str(found)
        self._report(f"shardwise: {self.verdict}")
        log = EventLog(self._log_path)
        log.write("verdict", text=self.verdict)
        log.close()


def judge(step: int, checks: Mapping[int, Check], tensors: Mapping[int, Check], last_equal: int | None) -> Drift | None:
    """Return the drift in the fingerprints of one step, or None if all replicas are equal."""
    if step == 1:
        start = find_drift(0, None, _prints(checks, tensors, "before"), lambda _: DriftEvidence(at_start=True))
        if start is not None:
            return start
    found = _prints(checks, tensors, "after")
    return find_drift(step, last_equal, found, lambda copies: _evidence(step, checks, copies, last_equal))


def _evidence(step: int, checks: Mapping[int, Check], copies: Copies, last_equal: int | None) -> DriftEvidence:
    """Return whether the replicas' gradients, settings and previous values were equal at the step."""
    equal = {}
    for what in ("before", "gradients", "settings"):
        equal[what] = len({str(checks[rank][what]) for rank in copies.prints}) == 1
    return DriftEvidence(
        gradients_equal=equal["gradients"],
        settings_equal=equal["settings"],
        unsteady_update=frozenset(copies.odd_ranks if equal["before"] and equal["gradients"] else ()),
        is_step_cleared=last_equal == step - 1 and not equal["before"],
    )


def _prints(checks: Mapping[int, Check], tensors: Mapping[int, Check], what: str) -> dict[int, dict[Replica, int]]:
    """Return the fingerprints of each rank by tensor, from before or after the step."""
    found = {}
    for rank, check in checks.items():
        groups = [tuple(ranks) for ranks in tensors[rank]["groups"]]
        names = [(name, groups[index]) for name, index in tensors[rank]["tensors"]]
        found[rank] = dict(zip(names, check[what], strict=True))
    return found


# Network partitions between nodes that can still reach node 0, found in the TCP connections of the ranks.
#
# A collective over a broken link neither fails nor completes: TCP retransmits for 15 minutes. Every rank is inside the
# call, so no rank is missing, and heartbeats are only sent to node 0, so they all arrive. The kernel's state of each
# connection shows data that was retransmitted and never acknowledged. Reading it needs no packet and no port.


_MIN_RETRANSMITS = 3
"""Number of retransmissions after which data counts as unanswered: 1.4 s without answer at the shortest intervals."""
_STATES, _RETRANSMITS = ("01", "02"), "01"
"""Values in /proc/net/tcp: established or connecting, and a pending retransmission timer."""
_INODE = re.compile(r"socket:\[(\d+)\]")


class Links(msgspec.Struct, frozen=True, tag="links"):
    """The addresses of one node, and the remote addresses that do not answer its ranks."""

    node: int
    host: str
    addresses: tuple[str, ...]
    """Addresses of this node: of its launcher's connection to node 0 and of its ranks' connections."""
    unanswered: tuple[str, ...] = ()


class Connection(msgspec.Struct, frozen=True):
    """A TCP connection of a rank."""

    local: str
    remote: str
    is_answered: bool


def read_links(node: int, address: str, pids: Iterable[int]) -> Links:
    """Return the state of the ranks' TCP connections; all count as answered if the kernel reports no retransmits."""
    found: list[Connection] = []
    for pid in pids:
        inodes = _sockets(pid)
        for table in ("tcp", "tcp6"):
            found += find_connections(_lines(f"/proc/{pid}/net/{table}"), inodes)
    local, unanswered = set(), set()
    for connection in found:
        if not ipaddress.ip_address(connection.local).is_loopback and connection.local != address:
            local.add(connection.local)
        if not connection.is_answered:
            unanswered.add(connection.remote)
    return Links(node, socket.gethostname(), (address, *sorted(local)), tuple(sorted(unanswered)))


def describe_partition(found: Sequence[Links]) -> str:
    """Return the pairs of nodes that cannot reach each other as text; empty if there are none.

    Addresses outside the nodes are ignored: a connection to a tracker or a storage service does not block collectives.
    """
    by_address = {address: links for links in found for address in links.addresses}
    texts: dict[frozenset[int], str] = {}
    for links in sorted(found, key=lambda links: links.node):
        for address in links.unanswered:
            other = by_address.get(address, links)
            if other is not links:
                text = (
                    f"{_name(links)} gets no answer from {_name(other)} over the connections of its ranks, although"
                    " its launcher reaches node 0: check the network between the two nodes"
                )
                texts.setdefault(frozenset((links.node, other.node)), text)
    return "; ".join(texts.values())


def _name(links: Links) -> str:
    return f"node {links.node} ({links.host}, {links.addresses[0]})"


def find_connections(table: Sequence[str], inodes: Container[str]) -> list[Connection]:
    """Return the connections in the lines of /proc/net/tcp; see proc_pid_net(5) for its columns.

    `inodes` selects the sockets: the table lists all sockets of the machine.
    """
    connections = []
    for line in table[1:]:
        row = line.split()
        if len(row) > 9 and row[9] in inodes and row[3] in _STATES:
            connections.append(Connection(_address(row[1]), _address(row[2]), not _is_unanswered(row)))
    return connections


def _is_unanswered(row: Sequence[str]) -> bool:
    """Return whether a connection waits for an overdue acknowledgement."""
    timer, _, _ = row[5].partition(":")
    return timer == _RETRANSMITS and int(row[6], 16) >= _MIN_RETRANSMITS


def _sockets(pid: int) -> set[str]:
    """Return the inodes of the open sockets of a process."""
    found = set()
    try:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            match = _INODE.match(str(entry.readlink()))
            if match is not None:
                found.add(match[1])
    except OSError:  # the process has ended, or a descriptor was closed meanwhile
        return found
    return found


def _address(text: str) -> str:
    """Return the IP address of ADDRESS:PORT, which consists of 4-byte groups in host byte order."""
    digits = text.partition(":")[0]
    packed = b""
    for start in range(0, len(digits), 8):
        packed += bytes.fromhex(digits[start : start + 8])[::-1]
    address = ipaddress.ip_address(packed)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
