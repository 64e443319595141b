"""Whether hosts know each other by name, and by address: what each one's resolver says beside what is true; pure."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

from shardwise.doctor.check import Verdict, ok, warn
from shardwise.doctor.network.host_names import count_hosts, name_few, name_hosts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardwise.doctor.network.facts import NetFacts


def check_names(found: NetFacts) -> list[Verdict]:
    """Every host knows itself and all others by name, at an address that is theirs, and addresses by the right name.

    Warnings only: launches that go by addresses work nevertheless. One host alone needs no name.
    """
    if len(found.usable) < 2:
        return []
    owner = {address: host for host, its in found.facts.items() for address in its.addresses}
    twins = _twins(found)
    single = [host for host in found.usable if not any(host in hosts for hosts in twins.values())]
    bad = [
        warn("names", f"{name_hosts(hosts)} all call themselves {name}", "on each: hostnamectl set-hostname NAME")
        for name, hosts in twins.items()
    ]
    bad += _check_forward(found, single, owner) + _check_reverse(found, single, owner)
    if bad:
        return bad
    has_reverse = all(any(one.reverse.get(address) for address in owner) for one in found.lookups.values())
    also = "" if has_reverse else ", not by address"
    return [ok("names", f"{count_hosts(found.usable)} know each other by name{also}")]


def _twins(found: NetFacts) -> dict[str, list[str]]:
    """Return the hosts that share a name, by that name."""
    named: dict[str, list[str]] = {}
    for host, its in found.facts.items():
        named.setdefault(its.hostname, []).append(host)
    return {name: hosts for name, hosts in named.items() if len(hosts) > 1}


def _check_forward(found: NetFacts, hosts: Sequence[str], owner: Mapping[str, str]) -> list[Verdict]:
    wrong: dict[tuple[str, str], list[str]] = {}
    unknown: dict[str, list[str]] = {}
    for host in hosts:
        missed_by = []
        for where, lookups in found.lookups.items():
            addresses = lookups.forward.get(found.facts[host].hostname, ())
            strange = [address for address in addresses if owner.get(address) != host]
            if strange and (where != host or all(map(_is_loopback, addresses))):
                wrong.setdefault((host, strange[0]), []).append(where)
            elif not addresses:
                missed_by.append(where)
        if missed_by:
            unknown.setdefault(_askers(found, host, missed_by), []).append(host)
    bad = []
    for (host, address), places in wrong.items():
        whom = "itself" if places == [host] else f"{host}, whose host name is {found.facts[host].hostname},"
        why = "a loopback that others miss" if _is_loopback(address) else "which is not its own"
        fact = f"{name_few(places)} {'takes' if len(places) == 1 else 'take'} {whom} for {address}, {why}"
        bad.append(warn("names", fact, _entry(found, host)))
    for places_, missed in unknown.items():
        names = name_few([f"{host} ({found.facts[host].hostname})" for host in missed])
        bad.append(warn("names", f"no address is known to {places_} of {names}", _entry(found, missed[0])))
    return bad


def _check_reverse(found: NetFacts, hosts: Sequence[str], owner: Mapping[str, str]) -> list[Verdict]:
    wrong: dict[tuple[str, str], list[str]] = {}
    for where, lookups in found.lookups.items():
        for address, names in lookups.reverse.items():
            host = owner.get(address, "")
            short = {name.split(".")[0] for name in names}
            if host in hosts and names and found.facts[host].hostname.split(".")[0] not in short:
                wrong.setdefault((address, names[0]), []).append(where)
    return [
        warn(
            "names",
            f"{address} of {found.facts[owner[address]].hostname} is called {name} on {name_few(places)}",
            f"correct the reverse entry of {address}",
        )
        for (address, name), places in wrong.items()
    ]


def _askers(found: NetFacts, host: str, places: Sequence[str]) -> str:
    """Say who does not know a host."""
    others = [other for other in found.lookups if other != host]
    return "the others" if others and set(others) <= set(places) else name_few(places)


def _entry(found: NetFacts, host: str) -> str:
    road = found.road.addresses if found.road is not None else {}
    address = road.get(host) or next(iter(found.facts[host].addresses), "ADDRESS")
    return f"write '{address} {found.facts[host].hostname}' into /etc/hosts there, or mend the name service"


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback
