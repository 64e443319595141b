"""Whether collectives are as fast as their links allow: a fit for each, and a verdict against the ceiling."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from shardwise.bench.comm.bus_bandwidth import KINDS
from shardwise.bench.comm.spec import written_size
from shardwise.bench.fit import AlphaBeta, fit_knee, held_out_error

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shardwise.bench.comm.ceiling import Ceiling
    from shardwise.bench.comm.result import CommMeasurement, Row

GOOD_OF_LISTED, GOOD_OF_MEASURED = 0.8, 0.5
"""From which share of the ceiling on a collective is good: what is listed is what collectives reach, while plain TCP
has none of their copies and additions, which take the same cores."""
LARGE = 1 << 20
"""Bytes from which on a collective shows bandwidth, not latency."""

_NAMED = 9
"""Good ones that a sentence names; more are counted."""


@dataclass(frozen=True, kw_only=True)
class SeriesVerdict:
    """What all sizes of one collective say together."""

    collective: str
    group: str
    ranks: int
    mode: str
    type: str
    redop: str
    root: int
    fit: AlphaBeta | None
    """To the minima of each size, since noise only adds; None for fewer than three sizes."""
    held_out: float | None
    """Mean relative error on every second size, when the others make the fit."""
    best_busbw: float
    """GB/s."""
    share: float | None
    """Of the ceiling; None where there is none, or where no size is large."""
    is_good: bool | None
    words: str

    @property
    def series(self) -> tuple[str | int, ...]:
        """What its rows have in common, as `Row.series`."""
        return (self.collective, self.group, self.ranks, self.mode, self.type, self.redop, self.root)

    @property
    def name(self) -> str:
        """What it is, without what goes without saying."""
        usual = {"world", "sync", "float", "sum", "none"}
        parts = (self.type, self.redop, self.mode, f"in {self.group}" if self.group != "world" else "world")
        return " ".join([self.collective, *(part for part in parts if part not in usual)])


def judge(found: CommMeasurement) -> tuple[SeriesVerdict, ...]:
    """Return a verdict for every series of sizes, in the order of the rows."""
    order = list(dict.fromkeys(row.series for row in found.rows))
    rows = sorted(found.rows, key=lambda row: (order.index(row.series), row.size))
    series = [list(alike) for _, alike in groupby(rows, key=lambda row: row.series)]
    return tuple(_judge(alike, found.ceilings.get(alike[0].group)) for alike in series)


def _judge(rows: list[Row], ceiling: Ceiling | None) -> SeriesVerdict:
    first = rows[0]
    points = [(float(row.size), row.min_us / 1e6) for row in rows if row.size]
    best = max(row.busbw for row in rows)
    share, good, words = _words(rows, best, ceiling)
    return SeriesVerdict(
        collective=first.collective,
        group=first.group,
        ranks=first.ranks,
        mode=first.mode,
        type=first.type,
        redop=first.redop,
        root=first.root,
        fit=fit_knee(points) if len(points) > 2 else None,
        held_out=held_out_error(points),
        best_busbw=best,
        share=share,
        is_good=good,
        words=words,
    )


def _words(rows: list[Row], best: float, ceiling: Ceiling | None) -> tuple[float | None, bool | None, str]:
    if not rows[-1].size:
        return None, None, f"{rows[0].time_us:.0f} us; there is no bandwidth to judge"
    if rows[0].ranks == 1:
        return None, None, "one rank: nothing travels"
    if ceiling is None:
        return None, None, f"{best:.2f} GB/s; nobody knows what the links carry"
    if rows[-1].size < LARGE:
        return None, None, f"sizes under {written_size(LARGE)} show latency, not bandwidth"
    rate = ceiling.alone if KINDS[rows[0].collective].is_rooted else ceiling.shared
    share = best * 1e9 / rate
    good = share >= (GOOD_OF_MEASURED if ceiling.is_measured else GOOD_OF_LISTED)
    return share, good, f"{'good' if good else 'slow'}: {share:.0%} of {rate / 1e9:.2f} GB/s by {ceiling.link}"


def sentence(found: CommMeasurement, verdicts: Iterable[SeriesVerdict]) -> str:
    """Return the one sentence to read: wrong results first, then what is good and what is slow."""
    if found.wrong:
        return f"wrong results: {', '.join(wrong_cases(found))}"
    checked = f"{len(found.rows) + sum(check.wrong is not None for check in found.checks)} results right"
    judged = [verdict for verdict in verdicts if verdict.share is not None]
    if not judged:
        reason = next((verdict.words for verdict in verdicts if verdict.collective != "barrier"), "nothing to judge")
        return f"{checked}; {reason}"
    good = [verdict.name for verdict in judged if verdict.is_good]
    slow = [f"{verdict.name} ({verdict.share:.0%})" for verdict in judged if not verdict.is_good]
    parts = [f"good: {', '.join(good)}" if len(good) <= _NAMED else f"{len(good)} good"] if good else []
    parts += [f"slow: {', '.join(slow)}"] if slow else []
    ceiling = next(found.ceilings[verdict.group] for verdict in judged)
    beside = f" (beside {ceiling.link}, {ceiling.words})" if ceiling is not None else ""
    return f"{checked}; {'; '.join(parts)}{beside}"


def wrong_cases(found: CommMeasurement) -> list[str]:
    """Name what came out wrong, and how many elements."""
    rows = [
        f"{row.collective} {row.type} {row.redop} {written_size(row.size)} {row.mode} in {row.group} ({row.wrong})"
        for row in found.rows
        if row.wrong
    ]
    checks = [" ".join(filter(None, check.case)) + f" ({check.wrong})" for check in found.checks if check.wrong]
    return [*rows, *checks]
