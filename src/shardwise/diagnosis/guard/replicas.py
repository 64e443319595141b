"""Replica drift of any script from recorded fingerprints, and nodes that lost each other; seen from outside."""

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


_LOOK_S = 0.5
_MOST_OPEN = 64
"""Checks that wait for ranks which are behind, or have ended; older ones are given up."""

Check = dict[str, Any]


class ReplicaWatch:
    """An observer of the launcher: compares the ranks of this machine, and gives one verdict."""

    def __init__(self, run: RunDirectory, spec: ReplicaSpec, report: Callable[[str], None], node: int = 0) -> None:
        """Watch ranks that are named by `follow`; what is found is reported and written to the events of this node."""
        self._run, self._spec, self._report = run, spec, report
        self._log_path = run.launcher_events(node)
        self._next_look = 0.0
        self.follow(range(0))

    def follow(self, ranks: range) -> None:
        """Watch these ranks from now on."""
        self.verdict = ""
        """Empty while replicas are equal."""
        self._unreported = ""
        """The verdict, until the launcher has heard it: ranks that are started again are not stopped for it."""
        self._tails = {rank: Tail(self._run.replicas(rank)) for rank in ranks}
        self._tensors: dict[tuple[int, int], Check] = {}
        self._open: dict[tuple[int, int], dict[int, Check]] = {}
        self._last_equal: dict[int, int] = {}

    def tick(self) -> str:
        """Check now, if it is due; returns the verdict if it is to stop the ranks, once, else nothing."""
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + _LOOK_S
            with contextlib.suppress(OSError):  # a full disk or a folder that was removed must not end a launch
                self._look()
        verdict, self._unreported = self._unreported, ""
        return verdict if self._spec.stops else ""

    def places(self) -> str:
        """Replicas add nothing about where ranks were."""
        return ""

    def _look(self) -> None:
        for rank, tail in self._tails.items():
            for event in tail.events():
                key = event["optimizer"], event.get("step", 0)
                if event["kind"] == "tensors":  # once by process: what an earlier one wrote counts no more
                    self.verdict = "" if (rank, key[0]) in self._tensors else self.verdict
                    self._tensors[rank, key[0]] = event
                    for checks in self._open.values():
                        checks.pop(rank, None)
                else:
                    self._open.setdefault(key, {})[rank] = event
        for key in sorted(self._open):
            if len(self._open[key]) == len(self._tails):
                self._compare(key, self._open.pop(key))
        while len(self._open) > _MOST_OPEN:
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
    """Return the drift that the checks of one step show, with the tensors of each rank; None where all are equal."""
    if step == 1:
        start = find_drift(0, None, _prints(checks, tensors, "before"), lambda _: DriftEvidence(at_start=True))
        if start is not None:
            return start
    found = _prints(checks, tensors, "after")
    return find_drift(step, last_equal, found, lambda copies: _evidence(step, checks, copies, last_equal))


def _evidence(step: int, checks: Mapping[int, Check], copies: Copies, last_equal: int | None) -> DriftEvidence:
    """Return what was recorded around the step on the ranks that hold the copies."""
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
    """Return the fingerprints of each rank by tensor, taken before or after the step."""
    found = {}
    for rank, check in checks.items():
        groups = [tuple(ranks) for ranks in tensors[rank]["groups"]]
        names = [(name, groups[index]) for name, index in tensors[rank]["tensors"]]
        found[rank] = dict(zip(names, check[what], strict=True))
    return found


# Nodes that have lost each other while both still reach node 0: seen in the TCP connections of the ranks
# themselves.
#
# A collective over a broken link neither fails nor ends: TCP sends again for a quarter of an hour. Every rank is
# inside the call, so nobody is missing, and the heartbeats, which go to node 0 alone, all arrive. What is left is
# the kernel's own state of each connection: data that was sent again and again and never acknowledged. It costs no
# packet and no port.


_REPEATS = 3
"""Times that TCP must have sent the same data again: 1.4 s without an answer at its shortest intervals."""
_STATES, _RETRANSMITS = ("01", "02"), "01"
"""Of a connection, established or being made, and what its timer waits for, in /proc/net/tcp."""
_INODE = re.compile(r"socket:\[(\d+)\]")


class Links(msgspec.Struct, frozen=True, tag="links"):
    """One node, and the addresses that its ranks get no answer from."""

    node: int
    host: str
    addresses: tuple[str, ...]
    """Its own: by which its launcher reaches node 0, and those of its ranks' connections."""
    unanswered: tuple[str, ...] = ()


class Connection(msgspec.Struct, frozen=True):
    """One TCP connection of a rank."""

    local: str
    remote: str
    is_answered: bool


def look_at_links(node: int, address: str, pids: Iterable[int]) -> Links:
    """Return what the connections of these ranks show; nothing unanswered where the kernel does not report it."""
    found: list[Connection] = []
    for pid in pids:
        inodes = _sockets(pid)
        for table in ("tcp", "tcp6"):
            found += find_connections(_lines(f"/proc/{pid}/net/{table}"), inodes)
    local = {each.local for each in found if not ipaddress.ip_address(each.local).is_loopback}
    unanswered = {each.remote for each in found if not each.is_answered}
    others = tuple(sorted(local - {address}))
    return Links(node, socket.gethostname(), (address, *others), tuple(sorted(unanswered)))


def describe_partition(found: Sequence[Links]) -> str:
    """Name the pairs of nodes that get no answer from each other; empty where there are none.

    Addresses of no node are left out: a rank may talk to a tracker or a storage, which stops no collective.
    """
    by_address = {address: links for links in found for address in links.addresses}
    pairs: dict[frozenset[int], tuple[Links, Links]] = {}
    for links in sorted(found, key=lambda links: links.node):
        for address in links.unanswered:
            other = by_address.get(address, links)
            if other is not links:
                pairs.setdefault(frozenset((links.node, other.node)), (links, other))
    return "; ".join(
        f"{_name(one)} gets no answer from {_name(other)} over the connections of its ranks, though its launcher"
        " reaches node 0: check the network between the two"
        for one, other in pairs.values()
    )


def _name(links: Links) -> str:
    return f"node {links.node} ({links.host}, {links.addresses[0]})"


def find_connections(table: Sequence[str], inodes: Container[str]) -> list[Connection]:
    """Return the connections in the lines of /proc/net/tcp; see proc_pid_net(5) for its columns.

    `inodes` are those of the sockets to look at: the table has the whole machine's.
    """
    rows = [line.split() for line in table[1:]]
    return [
        Connection(_address(row[1]), _address(row[2]), not _is_unanswered(row))
        for row in rows
        if len(row) > 9 and row[9] in inodes and row[3] in _STATES
    ]


def _is_unanswered(row: Sequence[str]) -> bool:
    """Whether a connection waits for an acknowledgement that does not come."""
    timer, _, _ = row[5].partition(":")
    return timer == _RETRANSMITS and int(row[6], 16) >= _REPEATS


def _sockets(pid: int) -> set[str]:
    """Return the inodes of the sockets that a process holds."""
    found = set()
    try:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            match = _INODE.match(str(entry.readlink()))
            if match is not None:
                found.add(match[1])
    except OSError:  # gone, or a descriptor was closed meanwhile
        return found
    return found


def _address(text: str) -> str:
    """Return the IP address of ADDRESS:PORT: words of four bytes, each in the order of this machine."""
    digits = text.partition(":")[0]
    words = [bytes.fromhex(digits[start : start + 8])[::-1] for start in range(0, len(digits), 8)]
    address = ipaddress.ip_address(b"".join(words))
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
