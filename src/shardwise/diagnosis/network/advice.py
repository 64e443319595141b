"""Checks of hosts, their names, clocks and storage, and the launch command for the hosts that pass; pure functions."""

from __future__ import annotations

import ipaddress
import shlex
import statistics
from collections import Counter
from typing import TYPE_CHECKING

from shardwise.diagnosis.network.facts import blocked_pairs, count_hosts, lossy_pairs, name_few, name_hosts
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
    from collections.abc import Mapping, Sequence

    from shardwise.diagnosis.network.facts import NetFacts, StorageFacts


LATE_S, VERY_LATE_S = 0.5, 10.0
"""Clock offsets above which a check warns (misleading timestamps) or fails (torchrun drops a node after 15 s)."""


def check_login(found: NetFacts) -> list[Verdict]:
    """Check that every host accepts a login without a prompt, and that no two names are the same machine."""
    bad = [fail("login", problem.fact, problem.fix) for problem in found.problems.values()]
    by_addresses: dict[tuple[str, ...], str] = {}
    for host, facts in found.facts.items():
        addresses = tuple(sorted(facts.addresses))
        if addresses and addresses in by_addresses:
            fact = f"hosts {by_addresses[addresses]} and {host} are the same machine with {', '.join(addresses)}"
            bad.append(fail("login", fact, "list the machine once, or correct the address of one of the names"))
        by_addresses[addresses] = host
    return bad or [ok("login", f"{count_hosts(found.hosts)} accept a login without a prompt")]


def check_versions(found: NetFacts) -> list[Verdict]:
    """Check that Python, shardwise, torch and NCCL are installed with the same version on all hosts."""
    bad, versions = [], []
    for name in ("Python", "shardwise", "torch", "NCCL"):
        by_version: dict[str, list[str]] = {}
        for host, facts in found.facts.items():
            by_version.setdefault(_comparable(name, facts.versions.get(name, "")), []).append(host)
        lacking = by_version.pop("", [])
        if lacking and (name != "NCCL" or by_version):
            bad.append(_missing_version(found, name, lacking, next(iter(by_version), "")))
        elif len(by_version) > 1:
            most = max(by_version, key=lambda version: len(by_version[version]))
            by_host = [f"{name_hosts(hosts)} {_has(hosts)} {version}" for version, hosts in by_version.items()]
            bad.append(fail("versions", f"{name} differs: {', '.join(by_host)}", f"install {name} {most} on all hosts"))
        else:
            versions.append(f"{name} {next(iter(by_version), 'not installed, as with CPU builds of torch')}")
    return bad or [ok("versions", f"the same on all hosts: {', '.join(versions)}")]


def _missing_version(found: NetFacts, name: str, lacking: Sequence[str], version: str) -> Verdict:
    """Return the verdict on hosts without a package; `version` is that of other hosts, empty if none has it."""
    fact = f"{name_hosts(lacking)} {_has(lacking)} no {name} in {found.facts[lacking[0]].executable}"
    if not version:
        return fail("versions", fact, f"install {name} on {name_hosts(lacking)}")
    return fail("versions", f"{fact}, other hosts have {version}", f"install {name} {version} on {name_hosts(lacking)}")


def check_clocks(found: NetFacts) -> list[Verdict]:
    """Check that all clocks agree, within the error of the measurement over the network."""
    if not found.clocks:
        return []
    median_s = statistics.median(clock.offset_s for clock in found.clocks.values())
    bad = []
    widest_s = 0.0
    for host, clock in found.clocks.items():
        offset_s = clock.offset_s - median_s
        widest_s = max(widest_s, abs(offset_s) + clock.error_s)
        certain_s = abs(offset_s) - clock.error_s
        if certain_s > LATE_S:
            direction = "ahead of" if offset_s > 0 else "behind"
            state = fail if certain_s > VERY_LATE_S else warn
            fact = f"the clock of {host} is {abs(offset_s):.1f} s {direction} the other clocks"
            bad.append(state("clocks", fact, f"run chronyd or ntpd on {host}; check it with ssh {host} timedatectl"))
    return bad or [ok("clocks", f"differ by less than {1e3 * widest_s:.3g} ms")]


def check_storage(found: NetFacts) -> list[Verdict]:
    """Check that every requested directory exists on all hosts and is shared storage."""
    return [_check_folder(found, storage) for storage in found.storage]


def _check_folder(found: NetFacts, storage: StorageFacts) -> Verdict:
    folder = storage.folder
    if storage.missing:
        fact = f"{name_hosts(storage.missing)} {_has(storage.missing)} no directory {folder}"
        return fail("storage", fact, "share the directory, or copy it to the same path on every host")
    if not storage.writer:
        fact = f"{folder} cannot be compared: no host can write to it ({storage.refusal})"
        return warn("storage", fact, "pass a writable directory with --folder")
    separate = [host for host in found.usable if host not in storage.readers]
    if separate:
        fact = f"{folder} of {name_hosts(separate)} is not shared with {storage.writer}"
        return warn("storage", fact, "store checkpoints and runs on shared storage; data may be copied to each host")
    return ok("storage", f"{folder} is shared by {count_hosts(found.usable)}")


def _comparable(name: str, version: str) -> str:
    """Return the part of a version that must be equal: for Python, the major and minor number."""
    return ".".join(version.split(".")[:2]) if name == "Python" else version


def _has(names: Sequence[str]) -> str:
    return "has" if len(names) == 1 else "have"


# Name resolution: the results of each host's resolver compared with the real addresses.


def check_names(found: NetFacts) -> list[Verdict]:
    """Check that every host resolves the names and addresses of all hosts correctly.

    Problems are warnings, because launches by address still work. A single host is not checked.
    """
    if len(found.usable) < 2:
        return []
    owner = {address: host for host, facts in found.facts.items() for address in facts.addresses}
    by_name: dict[str, list[str]] = {}
    for host, facts in found.facts.items():
        by_name.setdefault(facts.hostname, []).append(host)
    bad, unique = [], []
    for name, hosts in by_name.items():
        if len(hosts) == 1:
            unique += hosts
            continue
        fact = f"{name_hosts(hosts)} have the same host name {name}"
        bad.append(warn("names", fact, "run hostnamectl set-hostname NAME on each host"))
    bad += _check_forward(found, unique, owner) + _check_reverse(found, unique, owner)
    if bad:
        return bad
    text = f"{count_hosts(found.usable)} resolve each other by name"
    for lookups in found.lookups.values():
        if not any(lookups.reverse.get(address) for address in owner):
            return [ok("names", f"{text}, not by address")]
    return [ok("names", text)]


def _check_forward(found: NetFacts, hosts: Sequence[str], owner: Mapping[str, str]) -> list[Verdict]:
    """Return warnings about host names that resolve to a wrong address or to none."""
    wrong: dict[tuple[str, str], list[str]] = {}
    unknown: dict[str, list[str]] = {}
    for host in hosts:
        unresolved_on = []
        for where, lookups in found.lookups.items():
            addresses = lookups.forward.get(found.facts[host].hostname, ())
            foreign = [address for address in addresses if owner.get(address) != host]
            if foreign and (where != host or all(map(_is_loopback, addresses))):
                wrong.setdefault((host, foreign[0]), []).append(where)
            elif not addresses:
                unresolved_on.append(where)
        if unresolved_on:
            unknown.setdefault(_name_resolvers(found, host, unresolved_on), []).append(host)
    bad = []
    for (host, address), places in wrong.items():
        why = "a loopback address" if _is_loopback(address) else "an address of a different machine"
        name = found.facts[host].hostname
        fact = f"{name}, the host name of {host}, resolves on {name_few(places)} to {address}, {why}"
        bad.append(warn("names", fact, _hosts_entry(found, host)))
    for where, unresolved in unknown.items():
        names = name_few([f"{host} ({found.facts[host].hostname})" for host in unresolved])
        bad.append(warn("names", f"{where} cannot resolve {names}", _hosts_entry(found, unresolved[0])))
    return bad


def _check_reverse(found: NetFacts, hosts: Sequence[str], owner: Mapping[str, str]) -> list[Verdict]:
    """Return warnings about addresses that resolve to the name of a different machine."""
    wrong: dict[tuple[str, str], list[str]] = {}
    for where, lookups in found.lookups.items():
        for address, names in lookups.reverse.items():
            host = owner.get(address, "")
            short = {name.split(".")[0] for name in names}
            if host in hosts and names and found.facts[host].hostname.split(".")[0] not in short:
                wrong.setdefault((address, names[0]), []).append(where)
    bad = []
    for (address, name), places in wrong.items():
        fact = f"{address} of {found.facts[owner[address]].hostname} resolves to {name} on {name_few(places)}"
        bad.append(warn("names", fact, f"correct the reverse entry of {address}"))
    return bad


def _name_resolvers(found: NetFacts, host: str, places: Sequence[str]) -> str:
    """Return, as text, the hosts that cannot resolve `host`."""
    others = set(found.lookups) - {host}
    return "all other hosts" if others and others <= set(places) else name_few(places)


def _hosts_entry(found: NetFacts, host: str) -> str:
    """Return the fix for a host name that does not resolve correctly."""
    address = next(iter(found.facts[host].addresses), "ADDRESS")
    if found.route is not None:
        address = found.route.addresses.get(host, address)
    return f"add '{address} {found.facts[host].hostname}' to /etc/hosts on these hosts, or correct DNS"


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


CHECKS = (  # a check follows the checks that it depends on
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
    """Return the verdicts of all network checks; only the login check runs if no host responds."""
    checks = CHECKS if found.usable else (check_login,)
    verdicts = []
    for check in checks:
        verdicts += check(found)
    return verdicts


def good_hosts(found: NetFacts) -> tuple[str, ...]:
    """Return the hosts that respond, have the most common versions and all directories, and reach each other.

    Hosts with the most broken links are removed first.
    """
    if not found.facts:
        return ()
    versions = {host: tuple(sorted(facts.versions.items())) for host, facts in found.facts.items()}
    [(most_common, _)] = Counter(versions.values()).most_common(1)
    hosts = [host for host in found.usable if versions[host] == most_common]
    for storage in found.storage:
        hosts = [host for host in hosts if host not in storage.missing]
    broken = stuck_pairs(found) | set(lossy_pairs(found.paths))
    if found.route is not None:
        broken |= set(blocked_pairs(found.route, found.reached))
    while between := [pair for pair in broken if set(pair) <= set(hosts)]:
        ends = Counter(host for pair in between for host in pair)
        hosts.remove(max(reversed(hosts), key=lambda host: ends[host]))
    return tuple(hosts)


def launch_lines(found: NetFacts, typed: Mapping[str, str]) -> list[str]:
    """Return the launch command, and the variables for launchers that do not select an interface.

    The result is empty if no two hosts work together. `typed` contains each host as written in --hosts.
    """
    hosts = good_hosts(found)
    if found.route is None or len(hosts) < min(2, len(found.hosts)):
        return []
    lines = []
    excluded = [host for host in found.hosts if host not in hosts]
    if excluded:
        lines.append(f"# without {', '.join(excluded)}")
    names = ",".join(typed[host] for host in hosts)
    argv = ["shardwise", "launch", "--hosts", names, "--master-addr", found.route.addresses[hosts[0]]]
    lines.append(f"{shlex.join(argv)} train.py")
    variables = {}
    for host in hosts:
        interface = found.facts[host].addresses[found.route.addresses[host]].name
        variables[host] = f"GLOO_SOCKET_IFNAME={interface} NCCL_SOCKET_IFNAME={interface}"
    needed = variables[hosts[0]]
    if len(set(variables.values())) > 1:
        needed = "; ".join(f"on {host}: {text}" for host, text in variables.items())
    lines.append(f"# shardwise selects the interface; torchrun needs: {needed}")
    return lines
