"""How the links between ranks look on a terminal: two matrices, a table, and what is slow."""

from __future__ import annotations

import statistics
import sys
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from shardwise.bench.p2p.findings import HEADER, by_block, kind_rows, node_labels, slow_pairs, unit_of
from shardwise.bench.p2p.verdict import find_slow, in_words
from shardwise.runs.console import say
from shardwise.units import format_bytes, format_rate

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardwise.bench.p2p.pairs import Pairs

MOST_COLUMNS = 16
"""Of a matrix that can be read on a terminal."""


def show_pairs(pairs: Pairs) -> None:
    """Show latency and bandwidth of every pair (of nodes, where ranks are many), a table by way, and the verdict."""
    hosts = node_labels(pairs)
    spec = pairs.spec
    apart = "disjoint pairs together" if spec.together else "one pair at a time"
    where = f"{hosts[0]}" if len(hosts) == 1 else f"{len(hosts)} nodes"
    say(f"{len(pairs.places)} ranks on {where} · {pairs.backend} · {pairs.places[0].device} · {apart}")
    slow = find_slow(pairs)
    for quantity, values in (("latency", pairs.latencies), ("bandwidth", pairs.rates)):
        size = format_bytes(spec.small_bytes if quantity == "latency" else spec.large_bytes or 0)
        say("")
        unit, scale = unit_of(quantity, values.values())
        say(f"{quantity} of {size} in {unit}, from row to column, at best")
        _show_matrix({pair: value / scale for pair, value in values.items()}, pairs, slow_pairs(slow, quantity))
    say("")
    _print(_table(HEADER, kind_rows(pairs), left=2))
    say("")
    for sentence in in_words(pairs):
        say(sentence)


def _show_matrix(values: Mapping[tuple[int, int], float], pairs: Pairs, marked: set[tuple[int, int]]) -> None:
    if len(pairs.places) <= MOST_COLUMNS:
        ranks = range(len(pairs.places))
        rows = [
            (
                f"{row} {pairs.places[row].host}",
                *(_cell(values.get((row, column)), (row, column) in marked) for column in ranks),
            )
            for row in ranks
        ]
        _print(_table(("", *map(str, ranks)), rows, left=1))
        return
    nodes = node_labels(pairs)
    if len(nodes) > MOST_COLUMNS:
        say(f"{len(nodes)} nodes are too many for a terminal: add --report links.html")
        return
    blocks = by_block(values, tuple(place.node for place in pairs.places))
    rows = [
        (name, *(_block(blocks.get((row, column), [])) for column in range(len(nodes))))
        for row, name in enumerate(nodes)
    ]
    say("(least / median / most of each pair of nodes)")
    _print(_table(("", *nodes), rows, left=1))


def _cell(value: float | None, slow: bool) -> str:  # noqa: FBT001 - two states of a cell
    if value is None:
        return "-"
    return f"{format_rate(value)}{'*' if slow else ''}"


def _block(values: list[float]) -> str:
    if not values:
        return "-"
    return " / ".join(format_rate(value) for value in (min(values), statistics.median(values), max(values)))


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]], *, left: int) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, column in enumerate(header):
        table.add_column(column, no_wrap=True, justify="left" if number < left else "right")
    for row in rows:
        table.add_row(*(f"[bold red]{cell}[/]" if cell.endswith("*") else cell for cell in row))
    return table


def _print(table: Table) -> None:
    Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else 200).print(table)
