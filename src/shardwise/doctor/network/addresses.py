"""Which addresses hosts are to use among themselves, and in which turns their pairs are measured; pure."""

from __future__ import annotations

from itertools import permutations
from typing import TYPE_CHECKING

from shardwise.doctor.network.facts import Road

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from shardwise.doctor.network.facts import HostFacts, Pair, PathFacts, Reached


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


def open_pairs(road: Road, reached: Iterable[Reached]) -> set[Pair]:
    """Return the pairs of which the source comes to the target on this road."""
    return {(one.source, one.target) for one in reached if not one.refusal and _is_on(road, one)}


def cut_pairs(road: Road, reached: Iterable[Reached]) -> dict[Pair, str]:
    """Return the pairs of which the source does not come to the target on this road, and why."""
    tried = {(one.source, one.target): one.refusal for one in reached if _is_on(road, one)}
    found = {pair: tried.get(pair, "it did not say") for pair in permutations(road.addresses, 2)}
    return {pair: why for pair, why in found.items() if why}


def choose_road(facts: Mapping[str, HostFacts], reached: Sequence[Reached]) -> Road | None:
    """Return the road that most pairs can take, of equal ones the first; None when a host has no address."""
    return max(roads(facts), key=lambda road: len(open_pairs(road, reached)), default=None)


def lost_pairs(paths: Iterable[PathFacts]) -> dict[Pair, int]:
    """Return the pairs between which packets are lost that both ends send, and the size that still arrives."""
    return {(path.source, path.target): path.mtu for path in paths if 0 < path.mtu < min(path.ends)}


def culprits(hosts: Sequence[str], bad: Collection[Pair]) -> list[tuple[str, ...]]:
    """Return whom the bad pairs point to, the worst first: a host all of whose pairs are bad, else both of a pair."""
    rest, left, found = set(bad), list(hosts), list[tuple[str, ...]]()
    while len(left) > 2:
        partners = {host: {other for pair in rest if host in pair for other in pair} - {host} for host in left}
        worst = max(left, key=lambda host: len(partners[host]))
        if len(partners[worst]) < len(left) - 1:
            break
        found.append((worst,))
        left.remove(worst)
        rest = {pair for pair in rest if worst not in pair}
    order = {host: number for number, host in enumerate(hosts)}
    couples = {tuple(sorted(pair, key=order.__getitem__)) for pair in rest}
    return [*found, *sorted(couples, key=lambda couple: [order[host] for host in couple])]


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


def _is_on(road: Road, one: Reached) -> bool:
    return road.addresses.get(one.target) == one.address
