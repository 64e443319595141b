"""Nodes that have lost each other while both still reach node 0: seen in the TCP connections of the ranks themselves.

A collective over a broken link neither fails nor ends: TCP sends again for a quarter of an hour. Every rank is inside
the call, so nobody is missing, and the heartbeats, which go to node 0 alone, all arrive. What is left is the kernel's
own state of each connection: data that was sent again and again and never acknowledged. It costs no packet and no port.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Sequence

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
    """Return what the connections of these ranks show; nothing unanswered where the kernel does not tell."""
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
