"""What is wrong with hosts, their names and clocks, and the launch line for those that work; pure."""

from __future__ import annotations

import ipaddress
import shlex
import statistics
from collections import Counter
from typing import TYPE_CHECKING

from shardwise.diagnosis.network.facts import count_hosts, cut_pairs, lost_pairs, name_few, name_hosts
from shardwise.diagnosis.network.link_checks import (
    check_exposure,
    check_links,
    check_mtu,
    check_port,
    check_reach,
    stuck_pairs,
)
from shardwise.diagnosis.verdicts import Verdict, fail, ok, warn

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from shardwise.diagnosis.network.facts import NetFacts, StorageFacts


# What is wrong with hosts: who lets us in, which versions, clocks and folders they have; pure.


LATE_S, VERY_LATE_S = 0.5, 10.0
"""Clocks apart by so much mix up what happened when; by the second, torchrun drops a node as dead (3 beats of 5 s)."""


def check_login(found: NetFacts) -> list[Verdict]:
    """Every host lets us in without a prompt, and no two names are one machine."""
    bad = [fail("login", problem.fact, problem.fix) for problem in found.problems.values()]
    seen: dict[tuple[str, ...], str] = {}
    for host, its in found.facts.items():
        addresses = tuple(sorted(its.addresses))
        if addresses and addresses in seen:
            fact = f"hosts {seen[addresses]} and {host} are one machine, which has {', '.join(addresses)}"
            bad.append(fail("login", fact, "name it once, or correct what one of the names resolves to"))
        seen[addresses] = host
    return bad or [ok("login", f"{count_hosts(found.hosts)} let us in without a prompt")]


def check_versions(found: NetFacts) -> list[Verdict]:
    """Python, shardwise, torch and NCCL are there, and the same on all hosts."""
    bad, versions = [], []
    for name in ("Python", "shardwise", "torch", "NCCL"):
        by_version: dict[str, list[str]] = {}
        for host, its in found.facts.items():
            by_version.setdefault(_compared(name, its.versions.get(name, "")), []).append(host)
        lacking = by_version.get("", [])
        if lacking and (name != "NCCL" or len(by_version) > 1):
            there = next(version for version in [*by_version, ""] if version or len(by_version) == 1)
            where = found.facts[lacking[0]].executable
            fact = f"{name_hosts(lacking)} {_has(lacking)} no {name} in {where}" + (
                f", others {there}" if there else ""
            )
            bad.append(fail("versions", fact, f"install {name} {there}".strip() + " there"))
        elif len(by_version) > 1:
            most = max(by_version, key=lambda version: len(by_version[version]))
            by_host = [f"{name_hosts(hosts)} {_has(hosts)} {version}" for version, hosts in by_version.items()]
            bad.append(fail("versions", f"{name} differs: {', '.join(by_host)}", f"install {name} {most} on all"))
        else:
            versions.append(f"{name} {next(iter(by_version), '') or 'not installed, as with CPU builds of torch'}")
    return bad or [ok("versions", f"the same everywhere: {', '.join(versions)}")]


def check_clocks(found: NetFacts) -> list[Verdict]:
    """All clocks show the same time, as far as the latency of the link lets us measure."""
    if not found.clocks:
        return []
    usual_s = statistics.median(clock.offset_s for clock in found.clocks.values())
    bad = []
    for host, clock in found.clocks.items():
        off_s = clock.offset_s - usual_s
        sure_s = abs(off_s) - clock.error_s
        if sure_s > LATE_S:
            way = "ahead of" if off_s > 0 else "behind"
            judge = fail if sure_s > VERY_LATE_S else warn
            fact = f"the clock of {host} is {abs(off_s):.1f} s {way} the others"
            bad.append(judge("clocks", fact, f"run chronyd or ntpd there; see: ssh {host} timedatectl"))
    widest_s = max(abs(clock.offset_s - usual_s) + clock.error_s for clock in found.clocks.values())
    return bad or [ok("clocks", f"apart by less than {1e3 * widest_s:.3g} ms")]


def check_storage(found: NetFacts) -> list[Verdict]:
    """Every folder asked for is there on all hosts, and the same one."""
    return [_check_folder(found, one) for one in found.storage]


def _check_folder(found: NetFacts, one: StorageFacts) -> Verdict:
    if one.missing:
        there = "share it, or copy it to the same path"
        return fail("storage", f"{name_hosts(one.missing)} {_has(one.missing)} no folder {one.folder}", there)
    if not one.writer:
        fact = f"{one.folder} cannot be compared: no host can write there ({one.refusal})"
        return warn("storage", fact, "name a folder that can be written with --folder")
    others = [host for host in found.usable if host not in one.readers]
    if others:
        whose = f"{one.folder} of {name_hosts(others)}"
        fact = f"{whose} is not the storage of {one.writer}: what one writes, others do not see"
        return warn("storage", fact, "keep checkpoints and runs on storage that all share; data may be copied to each")
    return ok("storage", f"{one.folder} is the same on {count_hosts(found.usable)}")


def _compared(name: str, version: str) -> str:
    """Return what has to be equal: of Python major and minor number."""
    return ".".join(version.split(".")[:2]) if name == "Python" else version


def _has(names: Iterable[str]) -> str:
    return "has" if len(list(names)) == 1 else "have"


# Whether hosts know each other by name, and by address: the answers of each resolver beside the true ones; pure.


def check_names(found: NetFacts) -> list[Verdict]:
    """Every host knows itself and all others by name, at an address that is theirs, and addresses by the right name.

    Warnings only: launches that go by addresses work nevertheless. One host alone needs no name.
    """
    if len(found.usable) < 2:
        return []
    owner = {address: host for host, its in found.facts.items() for address in its.addresses}
    twins = _twins(found)
    shared = {host for hosts in twins.values() for host in hosts}
    single = [host for host in found.usable if host not in shared]
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
    """Return who does not know a host."""
    others = [other for other in found.lookups if other != host]
    return "the others" if others and set(others) <= set(places) else name_few(places)


def _entry(found: NetFacts, host: str) -> str:
    road = found.road.addresses if found.road is not None else {}
    address = road.get(host) or next(iter(found.facts[host].addresses), "ADDRESS")
    return f"write '{address} {found.facts[host].hostname}' into /etc/hosts there, or correct the name service"


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


CHECKS = (  # in the order in which one thing rests on another
    check_login,
    check_versions,
    check_names,
    check_clocks,
    check_storage,
    check_reach,
    check_port,
    check_exposure,
    check_mtu,
    check_links,
)


def diagnose(found: NetFacts) -> list[Verdict]:
    """Return the verdicts of every check; where no host answers, only that."""
    checks = CHECKS if found.usable else (check_login,)
    return [verdict for check in checks for verdict in check(found)]


def good_hosts(found: NetFacts) -> tuple[str, ...]:
    """Return hosts that answer, have what the most have, and all reach each other; the worst connected leave first."""
    kinds = {host: tuple(sorted(its.versions.items())) for host, its in found.facts.items()}
    usual = Counter(kinds.values()).most_common(1)[0][0] if kinds else ()
    without = {host for one in found.storage for host in one.missing}
    hosts = [host for host in found.usable if kinds[host] == usual and host not in without]
    cut = set(cut_pairs(found.road, found.reached)) if found.road is not None else set()
    cut |= stuck_pairs(found) | set(lost_pairs(found.paths))
    while between := [pair for pair in cut if set(pair) <= set(hosts)]:
        ends = Counter(host for pair in between for host in pair)
        hosts.remove(max(reversed(hosts), key=lambda host: ends[host]))
    return tuple(hosts)


def launch_lines(found: NetFacts, typed: Mapping[str, str]) -> list[str]:
    """Return what to type, then what launchers without a choice of interface need; empty when no two hosts are good.

    `typed` is how to name each host to --hosts.
    """
    hosts = good_hosts(found)
    if found.road is None or len(hosts) < min(2, len(found.hosts)):
        return []
    left_out = [host for host in found.hosts if host not in hosts]
    named = ",".join(typed[host] for host in hosts)
    argv = ["shardwise", "launch", "--hosts", named, "--master-addr", found.road.addresses[hosts[0]]]
    interfaces = {host: found.facts[host].addresses[found.road.addresses[host]].name for host in hosts}
    names = dict.fromkeys(interfaces.values())
    if len(names) == 1:
        name = next(iter(names))
        variables = f"GLOO_SOCKET_IFNAME={name} NCCL_SOCKET_IFNAME={name}"
    else:
        variables = "; ".join(
            f"on {host}: GLOO_SOCKET_IFNAME={name} NCCL_SOCKET_IFNAME={name}" for host, name in interfaces.items()
        )
    return [
        *([f"# without {', '.join(left_out)}"] if left_out else []),
        f"{shlex.join(argv)} train.py",
        f"# shardwise names the interface by itself; torchrun needs: {variables}",
    ]
