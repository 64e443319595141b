"""What is wrong with links between hosts: unreachable pairs, ports, packet sizes, slow links; pure."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from ipaddress import ip_address
from typing import TYPE_CHECKING, cast

from shardwise.diagnosis.network.facts import culprits, cut_pairs, lost_pairs, name_hosts, open_pairs, roads
from shardwise.diagnosis.verdicts import Verdict, fail, ok, warn
from shardwise.measurement.p2p.verdict import find_slow
from shardwise.units import format_bandwidth, format_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.diagnosis.network.facts import LinkFacts, NetFacts, Pair, Road
    from shardwise.measurement.p2p.pairs import Pairs


def check_reach(found: NetFacts) -> list[Verdict]:
    """Every host reaches every other, at addresses of one network or of interfaces of one name."""
    if len(found.usable) < 2:
        return []
    if found.road is None:
        lonely = next((host for host, its in found.facts.items() if not its.interfaces), found.usable[0])
        return [fail("pairs", f"{lonely} has no IPv4 address but loopback", f"connect it; see: ssh {lonely} ip addr")]
    cut = cut_pairs(found.road, found.reached)
    bad = _name_cut(found.road, cut)
    others = [road for road in roads(found.facts) if road != found.road]
    whole = [str(road) for road in others if not cut_pairs(road, found.reached)]
    also = f"; also on {', '.join(whole)}" if whole else ""
    number = len(found.usable) * (len(found.usable) - 1)
    return bad or [ok("pairs", f"all {number} ways are open on {found.road}{also}")]


def _name_cut(road: Road, cut: dict[Pair, str]) -> list[Verdict]:
    """Return one verdict for a host that reaches none, and one for every other pair."""
    bad = []
    for who in culprits(tuple(road.addresses), cut):
        if len(who) == 1:
            host, address = who[0], road.addresses[who[0]]
            why = next(why for pair, why in cut.items() if host in pair)
            fix = f"see whether {address} is up and its firewall lets TCP in: ssh {host} ip addr"
            bad.append(fail("pairs", f"{host} at {address} and the others do not come to each other ({why})", fix))
            continue
        source, target = who if who in cut else (who[1], who[0])
        address = road.addresses[target]
        back = ", nor back" if (target, source) in cut else ""
        fact = f"{source} does not reach {target} at {address} ({cut[source, target]}){back}"
        bad.append(fail("pairs", fact, f"open the way: see ssh {source} ip route get {address}, and the firewall"))
    return bad


def check_port(found: NetFacts) -> list[Verdict]:
    """The port of the rendezvous is free on the first host, and all others reach it."""
    port = found.port
    if port is None:
        return []
    where = f"port {port.port} of {port.host} ({port.address})"
    if port.refusal:
        fix = f"name another with --master-port, or see who has it: ssh {port.host} ss -ltnp"
        return [warn("port", f"{where} cannot be listened on: {port.refusal}", fix)]
    if port.cut:
        host, why = next(iter(port.cut.items()))
        more = f" and {len(port.cut) - 1} more" if len(port.cut) > 1 else ""
        return [fail("port", f"{host}{more} cannot come to {where}: {why}", "open it, or name another: --master-port")]
    return [ok("port", f"{where} is free, and all others come there")]


def check_exposure(found: NetFacts) -> list[Verdict]:
    """The ports that ask for no secret, which torch opens on every host, are on a network of private addresses."""
    if found.road is None or len(found.usable) < 2:
        return []  # ranks of one machine listen on loopback
    public = [host for host, address in found.road.addresses.items() if ip_address(address).is_global]
    if not public:
        return [ok("exposure", "gloo's and NCCL's ports, which ask for no secret, are on private addresses")]
    fact = (
        f"gloo and NCCL would listen on public addresses, such as {found.road.addresses[public[0]]}, of"
        f" {name_hosts(public)}: their ports ask for no secret"
    )
    return [warn("exposure", fact, "let a firewall drop what is not from these hosts, or use a private network")]


def check_mtu(found: NetFacts) -> list[Verdict]:
    """Interfaces agree on how large a packet may be, and packets of that size arrive."""
    if found.road is None or len(found.usable) < 2:
        return []
    own = {host: its.addresses[found.road.addresses[host]] for host, its in found.facts.items()}
    lost = lost_pairs(found.paths)
    bad = []
    for who in culprits(found.usable, lost):
        size = min(mtu for pair, mtu in lost.items() if set(who) <= set(pair))
        between = f"{who[0]} and {'the others' if len(who) == 1 else who[1]}"
        fact = f"between {between} packets over {size} bytes are lost, and {own[who[0]].mtu} are sent"
        fix = f"find what drops them, or at both ends: ip link set {own[who[0]].name} mtu {size}"
        bad.append(fail("MTU", fact, fix))
    sizes = sorted({interface.mtu for interface in own.values()})
    if len(sizes) > 1:
        mtus = ", ".join(f"{host} {interface.mtu} on {interface.name}" for host, interface in own.items())
        bad.append(warn("MTU", f"interfaces differ: {mtus}", "give all the same: ip link set INTERFACE mtu BYTES"))
    untried = not any(path.mtu for path in found.paths)
    seen = "; the way between was not tried, since datagrams do not pass" if untried else ", and such packets arrive"
    return bad or [ok("MTU", f"{sizes[0]} bytes on all{seen}")]


def check_links(found: NetFacts) -> list[Verdict]:
    """No link is slow beside the others, or by itself."""
    if found.road is None or len(found.usable) < 2:
        return []
    slow = slow_links(found.usable, found.links)
    known = {pair for one in slow for pair in one.pairs}
    slow += [one for one in poor_links(found.usable, found.links) if not set(one.pairs) <= known]
    unmeasured = stuck_pairs(found)
    bad = [warn("links", one.sentence, _look_at(one.pairs)) for one in slow]
    for who in culprits(found.usable, unmeasured):
        between = f"{who[0]} and {'the others' if len(who) == 1 else who[1]}"
        fact = f"connections between {between} open, and then nothing gets through"
        bad.append(fail("links", fact, "see the verdict on the MTU; else look for a firewall that cuts streams"))
    if bad or not found.links:
        return bad
    alike = "none is slow beside the others" if len(found.usable) > 2 else "both ways"
    return [ok("links", f"{len(found.links)} measured, {alike}")]


def stuck_pairs(found: NetFacts) -> set[Pair]:
    """Return the pairs that reached each other and could not be measured."""
    reached = open_pairs(found.road, found.reached) if found.road is not None else set()
    return reached - {(link.source, link.target) for link in found.links}


def _look_at(pairs: tuple[Pair, ...]) -> str:
    hosts = {host for pair in pairs for host in pair}
    shared = set(pairs[0]).intersection(*pairs)
    if not shared:
        return "use a faster network: name its interface with NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME"
    blamed = sorted(shared if len(shared) == 1 else hosts)
    return f"look at the cable, port and load of {' and '.join(blamed)}, or leave one out"


# Latency and bandwidth between all pairs of hosts: the slow links, by the rules of `bench p2p`, and the table.


FAR_S = 2e-3
"""Half a round trip from which on two hosts are not in one cluster: ten times what a busy Ethernet switch adds."""
THIN = 100e6
"""Bytes a second below which a link is slower than gigabit Ethernet, over which training does not scale."""


@dataclass(frozen=True)
class _Place:
    host: str
    node: int


@dataclass(frozen=True)
class _Links:
    """What `find_slow` reads of ranks, for hosts with one rank each."""

    places: tuple[_Place, ...]
    latencies: dict[tuple[int, int], float]
    rates: dict[tuple[int, int], float]


@dataclass(frozen=True, kw_only=True)
class Slow:
    """Links that are slow for one reason."""

    pairs: tuple[Pair, ...]
    sentence: str
    """Names the pair, or the host all of whose links are slow."""


def slow_links(hosts: Sequence[str], links: Sequence[LinkFacts]) -> list[Slow]:
    """Return the links that are slow beside the others, the worst first; fewer than three hosts have none."""
    if len(hosts) < 3:
        return []
    number = {host: index for index, host in enumerate(hosts)}
    measured = _Links(
        places=tuple(_Place(host, index) for index, host in enumerate(hosts)),
        latencies={(number[link.source], number[link.target]): link.latency_s for link in links},
        rates={(number[link.source], number[link.target]): link.bytes_per_s for link in links},
    )
    found = []
    for slow in find_slow(cast("Pairs", measured)):  # which needs torch to be made
        pairs = tuple((hosts[source], hosts[target]) for source, target in slow.pairs)
        # "rank 0 (host0)" is a host here; and so is "across nodes", where every pair is
        sentence = slow.sentence.replace(" across nodes", "")
        for host, index in number.items():
            sentence = sentence.replace(f"rank {index} ({host})", host)
        found.append(Slow(pairs=pairs, sentence=sentence))
    return found


def poor_links(hosts: Sequence[str], links: Sequence[LinkFacts]) -> list[Slow]:
    """Return what is slow by itself: pairs that are too far away, or thinner than gigabit Ethernet."""
    far = {(link.source, link.target): link.latency_s for link in links if link.latency_s > FAR_S}
    thin = {(link.source, link.target): link.bytes_per_s for link in links if link.bytes_per_s < THIN}
    found = []
    for pairs, quantity, shown, limit in (
        (far, "latency", format_seconds, f"over {format_seconds(FAR_S)}"),
        (thin, "bandwidth", format_bandwidth, f"under {format_bandwidth(THIN)}"),
    ):
        everywhere = len(pairs) == len(links) and len(hosts) > 2
        for who in [tuple(hosts)] if everywhere else culprits(hosts, pairs):
            mine = tuple(pair for pair in pairs if set(pair) <= set(who) or (len(who) == 1 and who[0] in pair))
            subject = " and ".join(who)
            if everywhere:
                subject = "all pairs"
            elif len(who) == 1:
                subject = f"every link of {who[0]}"
            value = statistics.median(pairs[pair] for pair in mine)
            found.append(Slow(pairs=mine, sentence=f"{subject}: {quantity} {shown(value)}, {limit}"))
    return found


def matrix(hosts: Sequence[str], links: Sequence[LinkFacts]) -> list[list[str]]:
    """Return rows of latency / bandwidth from row to column, under a header; "*" marks what is slow, "-" is cut."""
    slow = {pair for one in [*slow_links(hosts, links), *poor_links(hosts, links)] for pair in one.pairs}
    cells = {
        (link.source, link.target): f"{format_seconds(link.latency_s)} / {format_bandwidth(link.bytes_per_s)}"
        + ("*" if (link.source, link.target) in slow else "")
        for link in links
    }
    rows = [[source, *(cells.get((source, target), "-") for target in hosts)] for source in hosts]
    return [["from \\ to", *hosts], *rows]
