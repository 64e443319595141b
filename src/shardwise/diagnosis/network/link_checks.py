"""Checks of the links between hosts: unreachable pairs, ports, packet sizes, slow links; pure functions."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from ipaddress import ip_address
from typing import TYPE_CHECKING, cast

from shardwise.diagnosis.network.facts import (
    blocked_pairs,
    common_hosts,
    lossy_pairs,
    name_hosts,
    open_pairs,
    routes,
)
from shardwise.diagnosis.verdicts import Verdict, fail, ok, warn
from shardwise.measurement.p2p_verdict import find_slow
from shardwise.units import format_bandwidth, format_seconds

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from shardwise.diagnosis.network.facts import LinkFacts, NetFacts, Pair, Route
    from shardwise.measurement.p2p import Pairs


def check_reach(found: NetFacts) -> list[Verdict]:
    """Check that every host reaches every other host over one route."""
    if len(found.usable) < 2:
        return []
    if found.route is None:
        isolated = min(found.usable, key=lambda host: len(found.facts[host].interfaces))
        fact = f"{isolated} has no IPv4 address except loopback"
        return [fail("pairs", fact, f"connect {isolated} to the network; check it with ssh {isolated} ip addr")]
    bad = _describe_blocked(found.route, blocked_pairs(found.route, found.reached))
    if bad:
        return bad
    text = f"all {len(found.usable) * (len(found.usable) - 1)} pairs connect over {found.route}"
    for route in routes(found.facts):
        if route != found.route and not blocked_pairs(route, found.reached):
            text += f", also over {route}"
    return [ok("pairs", text)]


def _describe_blocked(route: Route, blocked: dict[Pair, str]) -> list[Verdict]:
    """Return one verdict for each host that reaches no other host, and one for each other pair."""
    bad = []
    for hosts in common_hosts(tuple(route.addresses), blocked):
        if len(hosts) == 1:
            host, address = hosts[0], route.addresses[hosts[0]]
            pair = next(pair for pair in blocked if host in pair)
            reason = blocked[pair]
            fact = f"{host} at {address} and the other hosts cannot connect to each other ({reason})"
            fix = f"check that {address} is up and its firewall accepts TCP: ssh {host} ip addr"
            bad.append(fail("pairs", fact, fix))
            continue
        source, target = hosts if hosts in blocked else (hosts[1], hosts[0])
        address = route.addresses[target]
        fact = f"{source} does not reach {target} at {address} ({blocked[source, target]})"
        if (target, source) in blocked:
            fact += ", nor in the other direction"
        bad.append(fail("pairs", fact, f"run ssh {source} ip route get {address}, and check the firewall"))
    return bad


def check_port(found: NetFacts) -> list[Verdict]:
    """Check that the rendezvous port is free on the first host, and that all other hosts reach it."""
    port = found.port
    if port is None:
        return []
    where = f"port {port.port} of {port.host} ({port.address})"
    if port.refusal:
        fix = f"pass a different --master-port, or find the process that uses it: ssh {port.host} ss -ltnp"
        return [warn("port", f"{port.host} cannot listen on port {port.port} ({port.address}): {port.refusal}", fix)]
    if port.cut:
        host, reason = next(iter(port.cut.items()))
        if len(port.cut) > 1:
            host = f"{host} and {len(port.cut) - 1} more"
        fact = f"{host} cannot connect to {where}: {reason}"
        return [fail("port", fact, "open the port, or pass a different --master-port")]
    return [ok("port", f"{where} is free, and all other hosts reach it")]


def check_exposure(found: NetFacts) -> list[Verdict]:
    """Check that the unauthenticated ports of gloo and NCCL are on private addresses."""
    if found.route is None or len(found.usable) < 2:
        return []  # ranks of one machine listen on loopback
    public = [host for host, address in found.route.addresses.items() if ip_address(address).is_global]
    if not public:
        return [ok("exposure", "the unauthenticated ports of gloo and NCCL are on private addresses")]
    fact = (
        f"gloo and NCCL would open unauthenticated ports on public addresses of {name_hosts(public)},"
        f" such as {found.route.addresses[public[0]]}"
    )
    return [warn("exposure", fact, "allow only these hosts in the firewall, or use a private network")]


def check_mtu(found: NetFacts) -> list[Verdict]:
    """Check that interfaces have the same MTU and that packets of this size arrive."""
    if found.route is None or len(found.usable) < 2:
        return []
    interfaces = {}
    for host, facts in found.facts.items():
        interfaces[host] = facts.addresses[found.route.addresses[host]]
    lossy = lossy_pairs(found.paths)
    bad = []
    for hosts in common_hosts(found.usable, lossy):
        size = min(mtu for pair, mtu in lossy.items() if set(hosts) <= set(pair))
        interface = interfaces[hosts[0]]
        fact = f"packets above {size} bytes are lost between {_ends(hosts)}, although the MTU is {interface.mtu}"
        fix = f"find the device that drops them, or run ip link set {interface.name} mtu {size} on both hosts"
        bad.append(fail("MTU", fact, fix))
    sizes = sorted({interface.mtu for interface in interfaces.values()})
    if len(sizes) > 1:
        mtus = ", ".join(f"{host} {interface.mtu} on {interface.name}" for host, interface in interfaces.items())
        fact = f"the MTU differs: {mtus}"
        bad.append(warn("MTU", fact, "set the same MTU on all hosts: ip link set INTERFACE mtu BYTES"))
    if bad:
        return bad
    if not any(path.mtu for path in found.paths):
        return [ok("MTU", f"{sizes[0]} bytes on all hosts; not tested because datagrams do not pass")]
    return [ok("MTU", f"{sizes[0]} bytes on all hosts, and such packets arrive")]


def _ends(hosts: Sequence[str]) -> str:
    """Return "a and b", or "a and the other hosts" for a single host."""
    return f"{hosts[0]} and the other hosts" if len(hosts) == 1 else f"{hosts[0]} and {hosts[1]}"


def check_links(found: NetFacts) -> list[Verdict]:
    """Check that no link is slow compared with the other links, or slow in absolute terms."""
    if found.route is None or len(found.usable) < 2:
        return []
    slow = slow_links(found.usable, found.links)
    known: set[Pair] = set()
    for one in slow:
        known.update(one.pairs)
    slow += [one for one in poor_links(found.usable, found.links) if not known.issuperset(one.pairs)]
    bad = [warn("links", one.sentence, _link_fix(one.pairs)) for one in slow]
    for hosts in common_hosts(found.usable, stuck_pairs(found)):
        fact = f"connections between {_ends(hosts)} open, but no data arrives"
        fix = "correct the MTU if its check failed; otherwise find the firewall that drops the data"
        bad.append(fail("links", fact, fix))
    if bad or not found.links:
        return bad
    result = "no link is slow compared with the others" if len(found.usable) > 2 else "in both directions"
    return [ok("links", f"{len(found.links)} measured, {result}")]


def stuck_pairs(found: NetFacts) -> set[Pair]:
    """Return the pairs that can connect, but whose links could not be measured."""
    if found.route is None:
        return set()
    return open_pairs(found.route, found.reached) - {(link.source, link.target) for link in found.links}


def _link_fix(pairs: tuple[Pair, ...]) -> str:
    shared = set(pairs[0]).intersection(*pairs)
    if not shared:
        return "use a faster network: set its interface with NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME"
    hosts = sorted(shared)
    if len(shared) > 1:
        hosts = sorted(set(pairs[0]).union(*pairs))
    return f"check the cable, port and load of {' and '.join(hosts)}, or exclude one host"


# Latency and bandwidth of all pairs of hosts: slow links, by the rules of `bench p2p`, and the table of all links.


FAR_S = 2e-3
"""Latency above which two hosts are not in the same cluster: ten times the latency of a busy Ethernet switch."""
THIN = 100e6
"""Bandwidth in bytes/s below which a link is slower than gigabit Ethernet, over which training does not scale."""


@dataclass(frozen=True)
class _Place:
    host: str
    node: int


@dataclass(frozen=True)
class _Links:
    """The fields of `Pairs` that `find_slow` reads, for hosts with one rank each."""

    places: tuple[_Place, ...]
    latencies: dict[tuple[int, int], float]
    rates: dict[tuple[int, int], float]


@dataclass(frozen=True, kw_only=True)
class Slow:
    """Links that are slow for the same reason."""

    pairs: tuple[Pair, ...]
    sentence: str
    """Names the pair, or the host with only slow links."""


def slow_links(hosts: Sequence[str], links: Sequence[LinkFacts]) -> list[Slow]:
    """Return the links that are slow compared with the others, the slowest first; empty for fewer than three hosts."""
    if len(hosts) < 3:
        return []
    number = {host: index for index, host in enumerate(hosts)}
    latencies, rates = {}, {}
    for link in links:
        pair = number[link.source], number[link.target]
        latencies[pair], rates[pair] = link.latency_s, link.bytes_per_s
    places = tuple(_Place(host, index) for index, host in enumerate(hosts))
    measured = _Links(places=places, latencies=latencies, rates=rates)
    found = []
    for slow in find_slow(cast("Pairs", measured)):  # the constructor of Pairs needs torch
        pairs = tuple((hosts[source], hosts[target]) for source, target in slow.pairs)
        # Every rank is a host here, and every pair is across nodes.
        sentence = slow.sentence.replace(" across nodes", "")
        for host, index in number.items():
            sentence = sentence.replace(f"rank {index} ({host})", host)
        found.append(Slow(pairs=pairs, sentence=sentence))
    return found


def poor_links(hosts: Sequence[str], links: Sequence[LinkFacts]) -> list[Slow]:
    """Return the links with a latency too high for a cluster, or a bandwidth below gigabit Ethernet."""
    far, thin = {}, {}
    for link in links:
        if link.latency_s > FAR_S:
            far[link.source, link.target] = link.latency_s
        if link.bytes_per_s < THIN:
            thin[link.source, link.target] = link.bytes_per_s
    found = []
    for values, quantity, shown, limit in (
        (far, "latency", format_seconds, f"above {format_seconds(FAR_S)}"),
        (thin, "bandwidth", format_bandwidth, f"below {format_bandwidth(THIN)}"),
    ):
        if len(values) == len(links) and len(hosts) > 2:
            subjects = {"all pairs": tuple(values)}
        else:
            subjects = _group_pairs(hosts, values)
        for subject, pairs in subjects.items():
            median = statistics.median(values[pair] for pair in pairs)
            found.append(Slow(pairs=pairs, sentence=f"{subject}: {quantity} {shown(median)}, {limit}"))
    return found


def _group_pairs(hosts: Sequence[str], values: Collection[Pair]) -> dict[str, tuple[Pair, ...]]:
    """Return the slow pairs grouped by a host with only slow links, or by the two hosts of a pair."""
    groups = {}
    for names in common_hosts(hosts, values):
        subject = f"every link of {names[0]}" if len(names) == 1 else " and ".join(names)
        groups[subject] = tuple(pair for pair in values if set(names) <= set(pair))
    return groups


def matrix(hosts: Sequence[str], links: Sequence[LinkFacts]) -> list[list[str]]:
    """Return a table of latency / bandwidth from row to column; "*" marks slow links, "-" links without data."""
    slow: set[Pair] = set()
    for one in [*slow_links(hosts, links), *poor_links(hosts, links)]:
        slow.update(one.pairs)
    cells = {}
    for link in links:
        pair = link.source, link.target
        cells[pair] = f"{format_seconds(link.latency_s)} / {format_bandwidth(link.bytes_per_s)}"
        if pair in slow:
            cells[pair] += "*"
    rows = [["from \\ to", *hosts]]
    for source in hosts:
        row = [cells.get((source, target), "-") for target in hosts]
        rows.append([source, *row])
    return rows
