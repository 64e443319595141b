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
_ESTABLISHED, _RETRANSMITS = "01", "01"
"""State of a connection, and what its timer waits for, in /proc/net/tcp."""
_INODE = re.compile(r"socket:\[(\d+)\]")


class Links(msgspec.Struct, frozen=True, tag="links"):
    """One node, and the addresses that its ranks get no answer from."""

    node: int
    host: str
    address: str
    """By which other nodes reach it."""
    unanswered: tuple[str, ...] = ()


def look_at_links(node: int, address: str, pids: Iterable[int]) -> Links:
    """Return what the connections of these ranks show; nothing unanswered where the kernel does not tell."""
    found: set[str] = set()
    for pid in pids:
        for table in ("tcp", "tcp6"):
            found |= find_unanswered(_lines(f"/proc/{pid}/net/{table}"), _sockets(pid))
    return Links(node, socket.gethostname(), address, tuple(sorted(found)))


def describe_partition(found: Sequence[Links]) -> str:
    """Name the pairs of nodes that get no answer from each other; empty where there are none."""
    by_address = {links.address: links for links in found}
    pairs: dict[frozenset[str], tuple[Links, str]] = {}
    for links in sorted(found, key=lambda links: links.node):
        for address in links.unanswered:
            pairs.setdefault(frozenset((links.address, address)), (links, address))
    parts = []
    for links, address in pairs.values():
        other = _name(by_address[address]) if address in by_address else address
        parts.append(
            f"{_name(links)} gets no answer from {other} over the connections of its ranks, though its launcher reaches"
            " node 0: check the network between the two"
        )
    return "; ".join(parts)


def _name(links: Links) -> str:
    return f"node {links.node} ({links.host}, {links.address})"


def find_unanswered(table: Sequence[str], inodes: Container[str]) -> set[str]:
    """Return the addresses at the other ends of connections that wait for an answer, in the lines of /proc/net/tcp.

    `inodes` are those of the sockets to look at: the table has the whole machine's.
    """
    rows = [line.split() for line in table[1:]]
    return {_address(row[2]) for row in rows if len(row) > 9 and row[9] in inodes and _is_unanswered(row)}


def _is_unanswered(row: Sequence[str]) -> bool:
    """Whether a connection waits for an acknowledgement that does not come; see proc_pid_net(5) for the columns."""
    timer, _, _ = row[5].partition(":")
    return row[3] == _ESTABLISHED and timer == _RETRANSMITS and int(row[6], 16) >= _REPEATS


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
