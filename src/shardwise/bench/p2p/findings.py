"""What was found about the links between ranks, as tables and heat maps."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from shardwise.bench.p2p.pairs import WINDOW
from shardwise.bench.p2p.verdict import ACROSS_NODES, SAME_NODE, SLOW, find_slow, in_words, kind_of
from shardwise.bench.p2p.ways import WAYS
from shardwise.bench.report.findings import Findings, Heat, Section, Table
from shardwise.units import format_bandwidth, format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from shardwise.bench.p2p.pairs import Pairs, PairTiming
    from shardwise.bench.p2p.verdict import SlowLink

MOST_CELLS = 64
"""Ranks up to which a report has a cell for each pair; above, one for each pair of nodes."""
HEADER = ("way", "between", "pairs", "latency", "median", "99 %", "bandwidth", "median")


def find_links(pairs: Pairs, facts: tuple[tuple[str, str], ...]) -> Findings:
    """Return what a report says of the pairs."""
    words = in_words(pairs)
    slow = find_slow(pairs)
    maps = tuple(
        heat(f"{quantity}, from row to column", quantity, values, pairs, marked=slow_pairs(slow, quantity))
        for quantity, values in (("latency", pairs.latencies), ("bandwidth", pairs.rates))
    )
    hosts = ", ".join(dict.fromkeys(place.host for place in pairs.places))
    return Findings(
        title=f"Links between {len(pairs.places)} ranks ({pairs.backend})",
        verdict=words[0],
        facts=(*facts, ("ranks", str(len(pairs.places))), ("hosts", hosts), ("backend", pairs.backend)),
        method=method(pairs),
        sections=(
            Section(title="Each link in the way that suits it best", text="\n".join(words[1:]), parts=maps),
            Section(title="By way and kind", parts=(Table(header=HEADER, rows=tuple(kind_rows(pairs))),)),
            *(_of_way(pairs, way) for way in pairs.spec.ways if len(pairs.spec.ways) > 1),
        ),
    )


def slow_pairs(slow: Iterable[SlowLink], quantity: str) -> set[tuple[int, int]]:
    """Return the pairs of all links that are slow in this quantity."""
    links = [link for link in slow if link.quantity == quantity]
    return {pair for link in links for pair in link.pairs}


def method(pairs: Pairs) -> tuple[str, ...]:
    """Return how it was measured, in sentences."""
    spec = pairs.spec
    apart = (
        "Pairs that share no rank were measured at the same time, so they may have shared links."
        if spec.together
        else "One pair was measured at a time, all other ranks waiting."
    )
    small, large = format_bytes(spec.small_bytes), format_bytes(spec.large_bytes or 0)
    return (
        f"Latency is half a round trip of {small} that the row began.",
        f"Bandwidth is {WINDOW} messages of {large} from row to column, and one byte back.",
        f"The best of the repeats counts, as disturbance only adds time; GB is 10^9 bytes. {apart}",
        "All bytes of each pair's last repeat were compared with what was sent.",
        f"A link is slow at {SLOW:g} times the median of its kind (in one node, across nodes), if it stays so.",
        *(f"{way}: {WAYS[way].words}." for way in spec.ways),
    )


def kind_rows(pairs: Pairs) -> list[tuple[str, ...]]:
    """Return a row for each way and kind of pair: medians over the pairs."""
    rows = []
    for way in pairs.spec.ways:
        for kind in (SAME_NODE, ACROSS_NODES):
            cells = [
                cell
                for cell in pairs.timings
                if cell.way == way and kind_of(pairs.places, (cell.source, cell.target)) == kind
            ]
            if cells:
                rows.append((way, kind, str(len(cells)), *_medians(cells)))
    return rows


def heat(
    title: str, quantity: str, values: Mapping[tuple[int, int], float], pairs: Pairs, marked: set[tuple[int, int]]
) -> Heat:
    """Return a matrix of all pairs of ranks, or of nodes where ranks are many: the median of their pairs."""
    unit, size = unit_of(quantity, values.values())
    owners: tuple[int, ...] = tuple(range(len(pairs.places)))
    labels = tuple(f"{rank} {place.host}" for rank, place in enumerate(pairs.places))
    if len(owners) > MOST_CELLS:
        owners, labels = tuple(place.node for place in pairs.places), node_labels(pairs)
    blocks = by_block(values, owners)
    cells = tuple(
        tuple(
            statistics.median(block) / size if (block := blocks.get((row, column))) else None
            for column in _count(labels)
        )
        for row in _count(labels)
    )
    places = sorted({(owners[source], owners[target]) for source, target in marked})
    return Heat(title=title, unit=unit, row_labels=labels, column_labels=labels, values=cells, marked=tuple(places))


def by_block(values: Mapping[tuple[int, int], float], owners: tuple[int, ...]) -> dict[tuple[int, int], list[float]]:
    """Return the values of pairs by what owns the two ranks: `owners` has its number for every rank."""
    blocks: dict[tuple[int, int], list[float]] = {}
    for (source, target), value in values.items():
        blocks.setdefault((owners[source], owners[target]), []).append(value)
    return blocks


def node_labels(pairs: Pairs) -> tuple[str, ...]:
    """Return the host name of every node, by number."""
    hosts = {place.node: place.host for place in pairs.places}
    return tuple(hosts[node] for node in sorted(hosts))


def unit_of(quantity: str, values: Collection[float]) -> tuple[str, float]:
    """Return the unit that suits a matrix of seconds or bytes a second, and what it is in those."""
    if quantity == "latency":
        return ("ms", 1e-3) if min(values) >= 1e-3 else ("us", 1e-6)
    return ("MB/s", 1e6) if max(values) < 1e9 else ("GB/s", 1e9)


def _of_way(pairs: Pairs, way: str) -> Section:
    cells = {(cell.source, cell.target): cell for cell in pairs.timings if cell.way == way}
    latencies = {pair: cell.latency.min_s for pair, cell in cells.items()}
    rates = {pair: cell.bytes_per_s for pair, cell in cells.items()}
    return Section(
        title=way,
        text=f"{WAYS[way].words}.",
        parts=(
            heat(f"{way}: latency, from row to column", "latency", latencies, pairs, set()),
            heat(f"{way}: bandwidth, from row to column", "bandwidth", rates, pairs, set()),
        ),
    )


def _medians(cells: list[PairTiming]) -> tuple[str, ...]:
    latencies = [cell.latency for cell in cells]
    typical = [cell.bytes_per_s * cell.transfer.min_s / cell.transfer.median_s for cell in cells]
    medians = [statistics.median(getattr(each, part) for each in latencies) for part in ("min_s", "median_s", "p99_s")]
    return (
        *map(format_seconds, medians),
        format_bandwidth(statistics.median(cell.bytes_per_s for cell in cells)),
        format_bandwidth(statistics.median(typical)),
    )


def _count(labels: tuple[str, ...]) -> range:
    return range(len(labels))
