"""Latency and bandwidth between all pairs of hosts: the slow links, by the rules of `bench p2p`, and the table."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from shardwise.bench.p2p.verdict import find_slow, in_rate, in_time
from shardwise.doctor.network.addresses import culprits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.bench.p2p.pairs import Pairs
    from shardwise.doctor.network.facts import LinkFacts, Pair

FAR_S = 2e-3
"""Half a round trip from which on two hosts are not in one cluster: ten times what a busy Ethernet switch adds."""
THIN = 100e6
"""Bytes a second below which a link is slower than gigabit Ethernet, over which nobody trains twice."""


@dataclass(frozen=True)
class _Place:
    host: str
    node: int


@dataclass(frozen=True)
class _Links:
    """What `find_slow` reads of ranks, said of hosts with one rank each."""

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
        words = slow.sentence.replace(" across nodes", "")
        for host, index in number.items():
            words = words.replace(f"rank {index} ({host})", host)
        found.append(Slow(pairs=pairs, sentence=words))
    return found


def poor_links(hosts: Sequence[str], links: Sequence[LinkFacts]) -> list[Slow]:
    """Return what is slow by itself: pairs that are too far away, or thinner than gigabit Ethernet."""
    far = {(link.source, link.target): link.latency_s for link in links if link.latency_s > FAR_S}
    thin = {(link.source, link.target): link.bytes_per_s for link in links if link.bytes_per_s < THIN}
    found = []
    for pairs, quantity, shown, limit in (
        (far, "latency", in_time, f"over {in_time(FAR_S)}"),
        (thin, "bandwidth", in_rate, f"under {in_rate(THIN)}"),
    ):
        everywhere = len(pairs) == len(links) and len(hosts) > 2
        for who in [tuple(hosts)] if everywhere else culprits(hosts, pairs):
            mine = tuple(pair for pair in pairs if set(pair) <= set(who) or (len(who) == 1 and who[0] in pair))
            subject = "all pairs" if everywhere else f"every link of {who[0]}" if len(who) == 1 else " and ".join(who)
            value = statistics.median(pairs[pair] for pair in mine)
            found.append(Slow(pairs=mine, sentence=f"{subject}: {quantity} {shown(value)}, {limit}"))
    return found


def matrix(hosts: Sequence[str], links: Sequence[LinkFacts]) -> list[list[str]]:
    """Return rows of latency / bandwidth from row to column, under a header; "*" marks what is slow, "-" is cut."""
    slow = {pair for one in [*slow_links(hosts, links), *poor_links(hosts, links)] for pair in one.pairs}
    cells = {
        (link.source, link.target): f"{in_time(link.latency_s)} / {in_rate(link.bytes_per_s)}"
        + ("*" if (link.source, link.target) in slow else "")
        for link in links
    }
    rows = [[source, *(cells.get((source, target), "-") for target in hosts)] for source in hosts]
    return [["from \\ to", *hosts], *rows]
