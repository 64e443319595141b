"""`bench p2p`: measures all pairs of ranks, and reports them as matrices, tables and heat maps."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

import msgspec

from shardwise.environment import identify
from shardwise.errors import InputError
from shardwise.hardware import probe_gpus
from shardwise.measurement.comm.collectives import WAYS
from shardwise.measurement.p2p import WINDOW, Pairs, PairSettings, measure_pairs
from shardwise.measurement.p2p_verdict import ACROSS_NODES, SAME_NODE, SLOW, find_slow, kind_of, verdict_sentences
from shardwise.measurement.report import BenchReport, machine_facts
from shardwise.measurement.specs import rank_zero
from shardwise.planner.settle import local_device
from shardwise.plots.figures import Heat, Table, table_lines
from shardwise.plots.page import Findings, Section
from shardwise.runs.console import CHECK_FAILED
from shardwise.units import format_bandwidth, format_bytes, format_rate, format_seconds, read_size

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from shardwise.measurement.p2p import PairTiming
    from shardwise.measurement.p2p_verdict import SlowLink
    from shardwise.measurement.specs import P2pSpec

MOST_CELLS = 64
"""Maximum number of ranks for which a report has a cell per pair of ranks; beyond it, a cell per pair of nodes."""
HEADER = ("way", "between", "pairs", "latency", "median", "99 %", "bandwidth", "median")


def find_links(pairs: Pairs, facts: tuple[tuple[str, str], ...]) -> Findings:
    """Return the content of the report: heat maps, tables and the verdict."""
    sentences = verdict_sentences(pairs)
    slow = find_slow(pairs)
    maps = tuple(
        heat(f"{quantity}, from row to column", quantity, values, pairs, marked=slow_pairs(slow, quantity))
        for quantity, values in (("latency", pairs.latencies), ("bandwidth", pairs.rates))
    )
    hosts = ", ".join(dict.fromkeys(place.host for place in pairs.places))
    return Findings(
        title=f"Links between {len(pairs.places)} ranks ({pairs.backend})",
        verdict=sentences[0],
        facts=(*facts, ("ranks", str(len(pairs.places))), ("hosts", hosts), ("backend", pairs.backend)),
        method=method(pairs),
        sections=(
            Section(title="Each link with its fastest method", text="\n".join(sentences[1:]), parts=maps),
            Section(title="By method and kind of link", parts=(Table(header=HEADER, rows=tuple(kind_rows(pairs))),)),
            *(_of_way(pairs, way) for way in pairs.spec.ways if len(pairs.spec.ways) > 1),
        ),
    )


def slow_pairs(slow: Iterable[SlowLink], quantity: str) -> set[tuple[int, int]]:
    """Return the pairs of all links that are slow in this quantity."""
    links = [link for link in slow if link.quantity == quantity]
    return {pair for link in links for pair in link.pairs}


def method(pairs: Pairs) -> tuple[str, ...]:
    """Return sentences about the method of measurement."""
    spec = pairs.spec
    order = "One pair was measured at a time, while all other ranks waited."
    if spec.together:
        order = "Disjoint pairs were measured at the same time, so they may have shared links."
    small, large = format_bytes(spec.small_bytes), format_bytes(spec.large_bytes or 0)
    return (
        f"Latency is half a round trip of {small} that the rank of the row starts.",
        f"Bandwidth is that of {WINDOW} messages of {large} from row to column, and one byte back.",
        f"The fastest repeat counts, since disturbance only adds time; GB is 10^9 bytes. {order}",
        "All bytes of each pair's last repeat were compared with the sent bytes.",
        f"A link is slow at {SLOW:g} times the median of its kind (in one node, across nodes), also when repeated.",
        *(f"{way}: {WAYS[way].description}." for way in spec.ways),
    )


def kind_rows(pairs: Pairs) -> list[tuple[str, ...]]:
    """Return table rows with medians over all pairs, one for each method and kind of link."""
    groups: dict[tuple[str, str], list[PairTiming]] = {}
    for way in pairs.spec.ways:
        for kind in (SAME_NODE, ACROSS_NODES):
            groups[way, kind] = []
    for cell in pairs.timings:
        groups[cell.way, kind_of(pairs.places, (cell.source, cell.target))].append(cell)
    return [(way, kind, str(len(cells)), *_medians(cells)) for (way, kind), cells in groups.items() if cells]


def heat(
    title: str, quantity: str, values: Mapping[tuple[int, int], float], pairs: Pairs, marked: set[tuple[int, int]]
) -> Heat:
    """Return a heat map of all pairs of ranks, or, for many ranks, of the medians of all pairs of nodes."""
    unit, size = unit_of(quantity, values.values())
    owners: tuple[int, ...] = tuple(range(len(pairs.places)))
    labels = tuple(f"{rank} {place.host}" for rank, place in enumerate(pairs.places))
    if len(owners) > MOST_CELLS:
        owners, labels = tuple(place.node for place in pairs.places), node_labels(pairs)
    blocks = by_block(values, owners)
    cells = []
    for row in range(len(labels)):
        row_blocks = [blocks.get((row, column)) for column in range(len(labels))]
        cells.append(tuple(statistics.median(block) / size if block else None for block in row_blocks))
    slow = tuple(sorted({(owners[source], owners[target]) for source, target in marked}))
    return Heat(title=title, unit=unit, row_labels=labels, column_labels=labels, values=tuple(cells), marked=slow)


def by_block(values: Mapping[tuple[int, int], float], owners: tuple[int, ...]) -> dict[tuple[int, int], list[float]]:
    """Group the values of pairs by (row, column) of a matrix; `owners` has the row of each rank."""
    blocks: dict[tuple[int, int], list[float]] = {}
    for (source, target), value in values.items():
        blocks.setdefault((owners[source], owners[target]), []).append(value)
    return blocks


def node_labels(pairs: Pairs) -> tuple[str, ...]:
    """Return the host name of every node, by number."""
    hosts = {place.node: place.host for place in pairs.places}
    return tuple(hosts[node] for node in sorted(hosts))


def unit_of(quantity: str, values: Collection[float]) -> tuple[str, float]:
    """Return the unit for latencies in seconds or bandwidths in bytes per second, and its size."""
    if quantity == "latency":
        return ("ms", 1e-3) if min(values) >= 1e-3 else ("us", 1e-6)
    return ("MB/s", 1e6) if max(values) < 1e9 else ("GB/s", 1e9)


def _of_way(pairs: Pairs, way: str) -> Section:
    cells = {(cell.source, cell.target): cell for cell in pairs.timings if cell.way == way}
    latencies = {pair: cell.latency.min_s for pair, cell in cells.items()}
    rates = {pair: cell.bytes_per_s for pair, cell in cells.items()}
    return Section(
        title=way,
        text=f"{WAYS[way].description}.",
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


MOST_COLUMNS = 16
"""Maximum number of columns of a matrix on a terminal."""


class P2pReport(BenchReport, frozen=True, kw_only=True):
    """Latency and bandwidth of every pair of ranks."""

    pairs: Pairs

    def __post_init__(self) -> None:
        """Set the exit code: 3 if received bytes are wrong."""
        if any(cell.wrong for cell in self.pairs.timings):
            msgspec.structs.force_setattr(self, "exit_code", CHECK_FAILED)

    def to_json(self) -> str:
        """Return all pairs, the best values of each link, slow links, and the verdict."""
        pairs, rates, links = self.pairs, self.pairs.rates, []
        for (source, target), latency_s in pairs.latencies.items():
            rate = rates[source, target]
            links.append({"source": source, "target": target, "latency_s": latency_s, "bytes_per_s": rate})
        document = {"pairs": pairs, "links": links, "slow": find_slow(pairs), "verdict": verdict_sentences(pairs)}
        return msgspec.json.encode(document).decode()

    def findings(self) -> Findings:
        """Return the content of the HTML or Markdown report."""
        return find_links(self.pairs, machine_facts(None))

    def to_text(self) -> str:
        """Return matrices of latency and bandwidth by rank (by node for many ranks), a table, and the verdict."""
        pairs, spec, hosts = self.pairs, self.pairs.spec, node_labels(self.pairs)
        apart = "disjoint pairs together" if spec.together else "one pair at a time"
        where = hosts[0] if len(hosts) == 1 else f"{len(hosts)} nodes"
        lines = [f"{len(pairs.places)} ranks on {where} · {pairs.backend} · {pairs.places[0].device} · {apart}"]
        slow = find_slow(pairs)
        for quantity, values in (("latency", pairs.latencies), ("bandwidth", pairs.rates)):
            size = format_bytes(spec.small_bytes if quantity == "latency" else spec.large_bytes or 0)
            unit, scale = unit_of(quantity, values.values())
            lines += ["", f"best {quantity} of {size} in {unit}, from row to column"]
            scaled = {pair: value / scale for pair, value in values.items()}
            lines += _matrix_lines(scaled, pairs, slow_pairs(slow, quantity))
        table = Table(header=HEADER, rows=tuple(kind_rows(pairs)))
        return "\n".join([*lines, "", *table_lines(table, num_left=2), "", *verdict_sentences(pairs)])


def _matrix_lines(values: Mapping[tuple[int, int], float], pairs: Pairs, marked: set[tuple[int, int]]) -> list[str]:
    """Return a matrix by rank, or by node for many ranks; slow pairs are marked with a star."""
    ranks, rows = range(len(pairs.places)), []
    if len(ranks) <= MOST_COLUMNS:
        for row in ranks:
            cells = [_cell(values.get((row, column)), is_slow=(row, column) in marked) for column in ranks]
            rows.append((f"{row} {pairs.places[row].host}", *cells))
        return table_lines(Table(header=("", *map(str, ranks)), rows=tuple(rows)))
    nodes = node_labels(pairs)
    if len(nodes) > MOST_COLUMNS:
        return [f"{len(nodes)} nodes are too many for a terminal: add --report links.html"]
    blocks = by_block(values, tuple(place.node for place in pairs.places))
    for row, name in enumerate(nodes):
        rows.append((name, *(_block(blocks.get((row, column), [])) for column in range(len(nodes)))))
    header = ("", *nodes)
    return ["(minimum / median / maximum of each pair of nodes)", *table_lines(Table(header=header, rows=tuple(rows)))]


def _cell(value: float | None, *, is_slow: bool) -> str:
    if value is None:
        return "-"
    return f"{format_rate(value)}*" if is_slow else format_rate(value)


def _block(values: list[float]) -> str:
    if not values:
        return "-"
    return " / ".join(format_rate(value) for value in (min(values), statistics.median(values), max(values)))


def measure(spec: P2pSpec) -> P2pReport | None:
    """Measure all pairs of ranks; return None on ranks other than 0 of an existing world."""
    small_bytes, large_bytes = read_size(spec.small), read_size(spec.size) if spec.size else None
    _check_ranks(spec)
    settings = PairSettings(
        ways=tuple(dict.fromkeys(spec.ways)) or tuple(WAYS),
        small_bytes=small_bytes,
        large_bytes=large_bytes,
        together=spec.together,
        budget_s=spec.seconds,
        device=spec.place.device,
        backend=spec.place.backend,
    )
    pairs: Pairs | None = rank_zero(measure_pairs, spec.nproc, settings, backend=settings.backend)
    return None if pairs is None else P2pReport(pairs=pairs)


def _check_ranks(spec: P2pSpec) -> None:
    """Raise InputError for settings that the ranks could not run, before any rank starts."""
    size, nproc = identify().world_size, spec.nproc or 1
    if max(nproc, size) < 2:
        raise InputError(
            "bench p2p needs at least 2 ranks, got 1",
            code="bench.too-few-ranks",
            fix="pass --nproc 2, or start 2 ranks with torchrun",
        )
    if size > 1:
        return
    gpus = len(probe_gpus()) if spec.place.device != "cpu" else 0
    if 0 < gpus < nproc and spec.place.backend != "gloo":
        raise InputError(
            f"--nproc {nproc} with NCCL needs a GPU for each rank (number of visible GPUs: {gpus})",
            code="launch.nproc-exceeds-gpus",
            fix="add --backend gloo, with which ranks may share a GPU, or --device cpu",
        )
    local_device(spec.place.device, 1)
