"""What was found out about hosts and the links between them: plain values, for checks that are pure."""

from __future__ import annotations

import ipaddress
from typing import Literal

import msgspec

Pair = tuple[str, str]
"""Source and target, by the names that users gave the hosts."""


class Interface(msgspec.Struct, frozen=True):
    """A way out of a host that is up and has an IPv4 address."""

    name: str
    address: str
    mask: str
    mtu: int

    @property
    def network(self) -> str:
        """The network that its address is in, such as 10.0.0.0/24."""
        return str(ipaddress.ip_interface(f"{self.address}/{self.mask}").network)


class HostFacts(msgspec.Struct, frozen=True):
    """What a host says of itself."""

    hostname: str
    executable: str
    versions: dict[str, str]
    """Of Python, shardwise, torch and NCCL; empty for what is not installed."""
    interfaces: tuple[Interface, ...]
    folders: tuple[str, ...] = ()
    """Those asked for that it has."""

    @property
    def addresses(self) -> dict[str, Interface]:
        """Interface by address."""
        return {interface.address: interface for interface in self.interfaces}


class Lookups(msgspec.Struct, frozen=True):
    """What a host's resolver says; empty for a name or address that it does not know."""

    forward: dict[str, tuple[str, ...]]
    reverse: dict[str, tuple[str, ...]]


class Clock(msgspec.Struct, frozen=True):
    """How far a host's clock is ahead of ours."""

    offset_s: float
    error_s: float
    """Half the round trip that it was asked in: the truth is this far away at most."""


class Reached(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt to come from one host to an address of another."""

    source: str
    target: str
    address: str
    own: str = ""
    """The address of the source that it left from."""
    refusal: str = ""
    """Why it did not come there; empty when it did."""


class PortFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The port at which nodes are to meet, on the first host."""

    host: str
    address: str
    port: int
    refusal: str = ""
    """Why the host cannot listen there; empty when it can."""
    cut: dict[str, str] = {}
    """Hosts that do not come there, and why."""


class LinkFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What one host found when it sent to another."""

    source: str
    target: str
    latency_s: float
    """Half of a round trip, at best."""
    bytes_per_s: float
    """Of one TCP stream, at best."""


class PathFacts(msgspec.Struct, frozen=True, kw_only=True):
    """How large a packet arrives."""

    source: str
    target: str
    mtu: int
    """Bytes of the largest that was tried and arrived unfragmented; 0 when no datagram did."""
    ends: tuple[int, int]
    """MTU of the interfaces at both ends."""


class StorageFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Who sees what one host wrote into a folder."""

    folder: str
    writer: str = ""
    """Empty when nobody could write."""
    readers: tuple[str, ...] = ()
    """Hosts that read it back, the writer among them."""
    missing: tuple[str, ...] = ()
    """Hosts that have no such folder."""
    refusal: str = ""
    """Why nobody could write."""


class Problem(msgspec.Struct, frozen=True):
    """Why a host could not be asked."""

    fact: str
    fix: str


class Road(msgspec.Struct, frozen=True):
    """One address of every host that can be used: where the hosts are to talk."""

    kind: Literal["network", "interface", "first addresses"]
    name: str
    addresses: dict[str, str]
    """By host."""

    def __str__(self) -> str:
        return self.kind if self.kind == "first addresses" else f"{self.kind} {self.name}"


class NetFacts(msgspec.Struct, frozen=True, kw_only=True):
    """All that was found out; hosts by the names that users gave them, in their order."""

    hosts: tuple[str, ...]
    problems: dict[str, Problem] = {}
    """Hosts that could not be asked."""
    facts: dict[str, HostFacts] = {}
    lookups: dict[str, Lookups] = {}
    clocks: dict[str, Clock] = {}
    reached: tuple[Reached, ...] = ()
    road: Road | None = None
    """Where links were measured."""
    port: PortFacts | None = None
    links: tuple[LinkFacts, ...] = ()
    paths: tuple[PathFacts, ...] = ()
    storage: tuple[StorageFacts, ...] = ()

    @property
    def usable(self) -> tuple[str, ...]:
        """Hosts that could be asked, in order."""
        return tuple(host for host in self.hosts if host in self.facts)
