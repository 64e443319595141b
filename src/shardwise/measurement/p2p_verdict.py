"""Detection of slow links: each pair of ranks is compared with the pairs of its kind, in one node or across nodes."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwise.units import format_bandwidth, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from shardwise.measurement.p2p import Pairs, RankPlace

    Costs = Mapping[tuple[int, int], float]

SAME_NODE, ACROSS_NODES = "same node", "across nodes"
_WHERE = {SAME_NODE: "in one node", ACROSS_NODES: "across nodes"}
SLOW = 2.0
"""Minimum cost of a slow pair, as a multiple of the median of its kind."""
_FAR = 5 * 1.4826
"""Minimum distance of a slow pair from the median, in median absolute deviations: five sigma of normal noise."""


@dataclass(frozen=True, kw_only=True)
class SlowLink:
    """Slow pairs with a common cause: a single pair, or all pairs of one rank or host."""

    quantity: str
    """"latency" or "bandwidth"."""
    pairs: tuple[tuple[int, int], ...]
    """(source, target) of each pair."""
    factor: float
    """Slowdown relative to the other pairs of its kind."""
    sentence: str


def kind_of(places: tuple[RankPlace, ...], pair: tuple[int, int]) -> str:
    """Return "same node" or "across nodes" for a pair of ranks."""
    source, target = (places[rank].node for rank in pair)
    return SAME_NODE if source == target else ACROSS_NODES


def find_slow(pairs: Pairs) -> tuple[SlowLink, ...]:
    """Return the links that are slow in latency or bandwidth with every method, the worst first."""
    found = []
    costs_s_per_byte = {pair: 1 / rate for pair, rate in pairs.rates.items()}
    for quantity, costs in (("latency", pairs.latencies), ("bandwidth", costs_s_per_byte)):
        for kind in (SAME_NODE, ACROSS_NODES):
            alike = {pair: cost for pair, cost in costs.items() if kind_of(pairs.places, pair) == kind}
            found += _slow_of_kind(alike, kind, quantity, pairs)
    return tuple(sorted(found, key=lambda link: -link.factor))


def verdict_sentences(pairs: Pairs) -> list[str]:
    """Return sentences about wrong bytes and slow links; or a sentence that all links are alike."""
    size = len(pairs.places)
    sentences = []
    for cell in pairs.timings:
        if cell.wrong:
            link = f"{_rank(pairs, cell.source)} to {_rank(pairs, cell.target)}"
            sentences.append(f"WRONG: {cell.wrong:,} received bytes from {link} differ from those sent ({cell.way})")
    slow = find_slow(pairs)
    if slow:
        return [*sentences, *(f"slow: {link.sentence}" for link in slow)]
    if size == 2:
        return [*sentences, "all alike: both directions; two ranks have no other pair for a comparison"]
    return [*sentences, f"all alike: no pair of {size} ranks is {SLOW:g} times as slow as the others of its kind"]


def _slow_of_kind(costs: Costs, kind: str, quantity: str, pairs: Pairs) -> list[SlowLink]:
    """Return the slow links of one kind: hosts and ranks all of whose pairs are slow, then single pairs."""
    found = []

    def slow_link(subject: str, slow: Iterable[tuple[int, int]], usual: float, rest: Costs) -> SlowLink:
        slow_pairs = tuple(sorted(slow))
        cost = statistics.median(rest[pair] for pair in slow_pairs)
        sentence = (
            f"{subject}: {quantity} {_shown(quantity, cost)}, {cost / usual:.3g} times as slow as the"
            f" {_shown(quantity, usual)} of the others {_WHERE[kind]}"
        )
        return SlowLink(quantity=quantity, pairs=slow_pairs, factor=cost / usual, sentence=sentence)

    nodes = {rank: place.node for rank, place in enumerate(pairs.places)}
    rest = dict(costs)
    for member_of, name in ((nodes, _host), (dict(zip(nodes, nodes, strict=True)), _rank)):
        while (worst := _slow_member(rest, member_of)) is not None:
            mine = {pair for pair in rest if worst in (member_of[pair[0]], member_of[pair[1]])}
            others = [seconds for pair, seconds in rest.items() if pair not in mine]
            first = next(rank for rank, member in member_of.items() if member == worst)
            found.append(slow_link(f"every link of {name(pairs, first)}", mine, statistics.median(others), rest))
            rest = {pair: seconds for pair, seconds in rest.items() if pair not in mine}
    slow, usual = _slow_pairs(rest)
    for source, target in sorted(slow):
        both = {(source, target), (target, source)}
        if both <= slow and source > target:
            continue  # reported with the other direction
        joint = "and" if both <= slow else "to"
        subject = f"{_rank(pairs, source)} {joint} {_rank(pairs, target)}"
        found.append(slow_link(subject, both & slow, usual, rest))
    return found


def _slow_member(costs: Costs, member_of: Mapping[int, int]) -> int | None:
    """Return the slowest host or rank if all its pairs are slow compared with the other pairs, else None.

    With few hosts, the pairs of a slow host are the majority, so the median of all pairs would be theirs.
    """
    ratios = {}
    for member in {member_of[rank] for pair in costs for rank in pair}:
        mine = [seconds for pair, seconds in costs.items() if member in (member_of[pair[0]], member_of[pair[1]])]
        others = [seconds for pair, seconds in costs.items() if member not in (member_of[pair[0]], member_of[pair[1]])]
        if not others:
            continue
        slowest_usual = SLOW * statistics.median(others)
        if min(mine) >= slowest_usual and SLOW * min(mine) >= statistics.median(mine):
            ratios[member] = statistics.median(mine) / statistics.median(others)
    return max(ratios, key=lambda member: ratios[member]) if ratios else None


def _slow_pairs(costs: Costs) -> tuple[set[tuple[int, int]], float]:
    """Return the pairs whose cost is far above the median, and the median (the lower one of two middle costs)."""
    if not costs:
        return set(), 0.0
    usual = statistics.median_low(costs.values())
    distance = statistics.median_low(abs(seconds - usual) for seconds in costs.values())
    slow = {pair for pair, seconds in costs.items() if seconds >= SLOW * usual and seconds - usual > _FAR * distance}
    return slow, usual


def _rank(pairs: Pairs, rank: int) -> str:
    return f"rank {rank} ({pairs.places[rank].host})"


def _host(pairs: Pairs, rank: int) -> str:
    return pairs.places[rank].host


def _shown(quantity: str, cost: float) -> str:
    return format_seconds(cost) if quantity == "latency" else format_bandwidth(1 / cost)
