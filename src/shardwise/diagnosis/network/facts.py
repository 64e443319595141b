"""Facts about hosts and the links between them, and the addresses that hosts use among themselves."""

from __future__ import annotations

import ipaddress
from itertools import permutations
from typing import TYPE_CHECKING, Literal

import msgspec

from shardwise.errors import some_of
from shardwise.runs.console import counted

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence


Pair = tuple[str, str]
"""Source and target, by the names that users gave the hosts."""


class HostInterface(msgspec.Struct, frozen=True):
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
    """What a host reports of itself."""

    hostname: str
    executable: str
    versions: dict[str, str]
    """Of Python, shardwise, torch and NCCL; empty for what is not installed."""
    interfaces: tuple[HostInterface, ...]
    folders: tuple[str, ...] = ()
    """Those asked for that it has."""

    @property
    def addresses(self) -> dict[str, HostInterface]:
        """Interface by address."""
        return {interface.address: interface for interface in self.interfaces}


class Lookups(msgspec.Struct, frozen=True):
    """The answers of a host's resolver; empty for a name or address that it does not know."""

    forward: dict[str, tuple[str, ...]]
    reverse: dict[str, tuple[str, ...]]


class HostClock(msgspec.Struct, frozen=True):
    """How far a host's clock is ahead of ours."""

    offset_s: float
    error_s: float
    """Half the round trip that it was asked in: the truth is this far away at most."""


class ReachedHost(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt to come from one host to an address of another."""

    source: str
    target: str
    address: str
    own: str = ""
    """The address of the source that it left from."""
    refusal: str = ""
    """Why it did not come there; empty when it did."""


class PortFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The port of the rendezvous, on the first host."""

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
    """Empty when no host could write."""
    readers: tuple[str, ...] = ()
    """Hosts that read it back, the writer among them."""
    missing: tuple[str, ...] = ()
    """Hosts that have no such folder."""
    refusal: str = ""
    """Why no host could write."""


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
    clocks: dict[str, HostClock] = {}
    reached: tuple[ReachedHost, ...] = ()
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


# Names of hosts: few by name, many by number.


_MOST = 4


def name_hosts(names: Sequence[str]) -> str:
    """Return "host a", "hosts a, b" or "hosts a, b, c, d and 60 more"."""
    return f"host{'s' if len(names) > 1 else ''} {name_few(names)}"


def name_few(names: Sequence[str]) -> str:
    """Return "a", "a, b" or "a, b, c, d and 60 more"."""
    return some_of(names, most=_MOST)


def count_hosts(names: Sequence[str]) -> str:
    """Return "1 host" or "3 hosts"."""
    return counted(len(names), "host")


# Which addresses hosts are to use among themselves, and in which turns their pairs are measured; pure.


def roads(facts: Mapping[str, HostFacts]) -> list[Road]:
    """Return every way to give each host one address: one network, interfaces of one name, or the first of each."""
    found: dict[tuple[str, ...], Road] = {}

    def add(road: Road) -> None:
        if 0 < len(road.addresses) == len(facts):
            found.setdefault(tuple(road.addresses.values()), road)

    for kind in ("network", "interface"):
        named: dict[str, dict[str, str]] = {}
        for host, its in facts.items():
            for interface in its.interfaces:
                name = interface.network if kind == "network" else interface.name
                named.setdefault(name, {}).setdefault(host, interface.address)
        for name, addresses in named.items():
            add(Road("network" if kind == "network" else "interface", name, addresses))
    add(Road("first addresses", "", {host: its.interfaces[0].address for host, its in facts.items() if its.interfaces}))
    return list(found.values())


def open_pairs(road: Road, reached: Iterable[ReachedHost]) -> set[Pair]:
    """Return the pairs whose source reaches the target on this road."""
    return {(one.source, one.target) for one in reached if not one.refusal and _is_on(road, one)}


def cut_pairs(road: Road, reached: Iterable[ReachedHost]) -> dict[Pair, str]:
    """Return the pairs whose source does not reach the target on this road, and why."""
    tried = {(one.source, one.target): one.refusal for one in reached if _is_on(road, one)}
    found = {pair: tried.get(pair, "no reason given") for pair in permutations(road.addresses, 2)}
    return {pair: why for pair, why in found.items() if why}


def choose_road(facts: Mapping[str, HostFacts], reached: Sequence[ReachedHost]) -> Road | None:
    """Return the road that most pairs can take, of equal ones the first; None when a host has no address."""
    return max(roads(facts), key=lambda road: len(open_pairs(road, reached)), default=None)


def lost_pairs(paths: Iterable[PathFacts]) -> dict[Pair, int]:
    """Return the pairs between which packets are lost that both ends send, and the size that still arrives."""
    return {(path.source, path.target): path.mtu for path in paths if 0 < path.mtu < min(path.ends)}


def culprits(hosts: Sequence[str], bad: Collection[Pair]) -> list[tuple[str, ...]]:
    """Return whom the bad pairs point to, the worst first: a host all of whose pairs are bad, else both of a pair."""
    rest, left, found = set(bad), list(hosts), list[tuple[str, ...]]()
    while len(left) > 2:
        partners = {host: _partners(host, rest) for host in left}
        worst = max(left, key=lambda host: len(partners[host]))
        if len(partners[worst]) < len(left) - 1:
            break
        found.append((worst,))
        left.remove(worst)
        rest = {pair for pair in rest if worst not in pair}
    order = {host: number for number, host in enumerate(hosts)}
    couples = {tuple(sorted(pair, key=order.__getitem__)) for pair in rest}
    return [*found, *sorted(couples, key=lambda couple: [order[host] for host in couple])]


def _partners(host: str, pairs: Collection[Pair]) -> set[str]:
    """Return the hosts that are in a pair with this one."""
    own = [pair for pair in pairs if host in pair]
    return {other for pair in own for other in pair} - {host}


def turns(hosts: Sequence[str]) -> list[list[Pair]]:
    """Return all pairs in turns, of which each has every host once at most, by the circle method; each pair once."""
    seats: list[str | None] = [*hosts, *([None] if len(hosts) % 2 else [])]
    found = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        couples = zip(seats[:half], reversed(seats[half:]), strict=True)
        found.append([(one, other) for one, other in couples if one is not None and other is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return found


def _is_on(road: Road, one: ReachedHost) -> bool:
    return road.addresses.get(one.target) == one.address
