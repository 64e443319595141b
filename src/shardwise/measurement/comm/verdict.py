"""Verdicts on the speed of collectives relative to their links: fits of latency and bandwidth, and the report."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from shardwise.errors import InputError
from shardwise.measurement.comm.result import COLUMNS, cells, missing_text, shown_columns
from shardwise.measurement.comm.spec import KINDS
from shardwise.plots.figures import Plot, Series, Table
from shardwise.plots.page import Findings, Section
from shardwise.units import write_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from shardwise.measurement.comm.limits import Ceiling
    from shardwise.measurement.comm.result import Change, CommMeasurement, SweepRow

    Point = tuple[float, float]

GOOD_OF_LISTED, GOOD_OF_MEASURED = 0.8, 0.5
"""Minimum share of the ceiling for a good collective. The share is lower for a measured ceiling: collectives also copy
and reduce on the CPU cores, and the measured TCP streams do not."""
LARGE = 1 << 20
"""Minimum size in bytes at which a collective is limited by bandwidth, not by latency."""

_NAMED = 9
"""Maximum number of good collectives that a sentence names; more are only counted."""


class SeriesVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on all sizes of one collective."""

    collective: str
    group: str
    ranks: int
    mode: str
    type: str
    redop: str
    root: int
    fit: AlphaBeta | None
    """Fit to the minimum of each size, since noise only adds time; None for fewer than three sizes."""
    held_out: float | None
    """Mean relative error of a fit to every second size, evaluated on the other sizes."""
    best_busbw: float
    """GB/s."""
    share: float | None
    """Share of the ceiling; None without a ceiling or without a large size."""
    is_good: bool | None
    text: str = msgspec.field(name="words")
    """The verdict as text; the JSON key is `words`."""

    @property
    def series(self) -> tuple[str | int, ...]:
        """Key of the rows of this verdict, as `SweepRow.series`."""
        return (self.collective, self.group, self.ranks, self.mode, self.type, self.redop, self.root)

    @property
    def name(self) -> str:
        """The collective with its type, operation, mode and group, without default values."""
        defaults = {"sync", "float", "sum", "none"}
        parts = [part for part in (self.type, self.redop, self.mode) if part not in defaults]
        if self.group != "world":
            parts.append(f"in {self.group}")
        return " ".join([self.collective, *parts])


def judge(found: CommMeasurement) -> tuple[SeriesVerdict, ...]:
    """Return a verdict for every series of sizes, in the order of the rows."""
    order = list(dict.fromkeys(row.series for row in found.rows))
    rows = sorted(found.rows, key=lambda row: (order.index(row.series), row.size))
    series = [list(alike) for _, alike in groupby(rows, key=lambda row: row.series)]
    return tuple(_judge(alike, found.ceilings.get(alike[0].group)) for alike in series)


def _judge(rows: list[SweepRow], ceiling: Ceiling | None) -> SeriesVerdict:
    first = rows[0]
    points = [(float(row.size), row.min_us / 1e6) for row in rows if row.size]
    best = max(row.busbw for row in rows)
    share, good, text = _compare(rows, best, ceiling)
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
        text=text,
    )


def _compare(rows: list[SweepRow], best: float, ceiling: Ceiling | None) -> tuple[float | None, bool | None, str]:
    """Return the share of the ceiling, whether it is good, and the verdict as text."""
    if not rows[-1].size:
        return None, None, f"{rows[0].time_us:.0f} us; barrier has no bandwidth"
    if rows[0].ranks == 1:
        return None, None, "one rank: no communication"
    if ceiling is None:
        return None, None, f"{best:.2f} GB/s; the bandwidth of the links is unknown"
    if rows[-1].size < LARGE:
        return None, None, f"sizes under {write_size(LARGE)} show latency, not bandwidth"
    rate = ceiling.alone if KINDS[rows[0].collective].is_rooted else ceiling.shared
    share = best * 1e9 / rate
    good = share >= (GOOD_OF_MEASURED if ceiling.is_measured else GOOD_OF_LISTED)
    grade = "good" if good else "slow"
    return share, good, f"{grade}: {share:.0%} of {rate / 1e9:.2f} GB/s by {ceiling.link}"


def sentence(found: CommMeasurement, verdicts: Iterable[SeriesVerdict]) -> str:
    """Return the summary: wrong results, otherwise good and slow collectives."""
    if found.wrong:
        return f"wrong results: {', '.join(wrong_cases(found))}"
    checked = f"{len(found.rows) + sum(check.wrong is not None for check in found.checks)} results correct"
    judged = [verdict for verdict in verdicts if verdict.share is not None]
    if not judged:
        reasons = [verdict.text for verdict in verdicts if verdict.collective != "barrier"]
        return f"{checked}; {reasons[0] if reasons else 'no bandwidth was measured'}"
    good = [verdict.name for verdict in judged if verdict.is_good]
    slow = [f"{verdict.name} ({verdict.share:.0%})" for verdict in judged if not verdict.is_good]
    parts = []
    if good:
        parts.append(f"good: {', '.join(good)}" if len(good) <= _NAMED else f"{len(good)} good")
    if slow:
        parts.append(f"slow: {', '.join(slow)}")
    ceiling = next(found.ceilings[verdict.group] for verdict in judged)
    reference = f" (compared with {ceiling.link}, {ceiling.source})" if ceiling is not None else ""
    return f"{checked}; {'; '.join(parts)}{reference}"


def wrong_cases(found: CommMeasurement) -> list[str]:
    """Return the names of wrong results with their number of wrong elements."""
    cases = []
    for row in found.rows:
        if row.wrong:
            name = f"{row.collective} {row.type} {row.redop} {write_size(row.size)} {row.mode} in {row.group}"
            cases.append(f"{name} ({row.wrong})")
    wrong = [check for check in found.checks if check.wrong]
    return cases + [" ".join(filter(None, check.case)) + f" ({check.wrong})" for check in wrong]


# The alpha-beta model of a link: latency in seconds and seconds per byte, fitted to measured messages.


_KNEE_POINTS = 8
"""Minimum number of sizes for a knee: with fewer, it would fit the noise."""


@dataclass(frozen=True, kw_only=True)
class AlphaBeta:
    """Seconds of a message are alpha_s + num_bytes x beta_s, without a knee."""

    alpha_s: float
    beta_s: float
    """Seconds per byte."""
    error: float
    """Mean relative error of the fit."""
    knee_bytes: float | None = None
    """Size from which each byte costs `beyond_s`, since the protocol changes or caches are exceeded."""
    beyond_s: float = 0.0

    def seconds(self, num_bytes: float) -> float:
        """Return the predicted seconds of a message of `num_bytes`."""
        knee = math.inf if self.knee_bytes is None else self.knee_bytes
        return self.alpha_s + min(num_bytes, knee) * self.beta_s + max(0.0, num_bytes - knee) * self.beyond_s

    @property
    def bytes_per_s(self) -> float:
        """The asymptotic bandwidth of large messages; infinite if they cost no more than small ones."""
        slope = self.beta_s if self.knee_bytes is None else self.beyond_s
        return 1 / slope if slope else math.inf


def fit_alpha_beta(points: Sequence[Point]) -> AlphaBeta:
    """Fit (bytes, seconds) by least squares of relative errors, so that small messages count as much as large ones.

    alpha and beta are never negative.
    """
    if len({num_bytes for num_bytes, _ in points}) < 2 or any(seconds <= 0 for _, seconds in points):
        raise InputError(
            f"a fit needs at least 2 sizes with positive times, got {list(points)}",
            code="bench.too-few-points",
            fix="measure at least 2 sizes with positive times",
        )
    return _fit(points, None)[0]


def fit_knee(points: Sequence[Point]) -> AlphaBeta:
    """Fit (bytes, seconds) by a line, or by two lines that join at a measured size if that fits much better.

    Two lines require eight sizes and a lower Bayesian information criterion (BIC).
    """
    plain = fit_alpha_beta(points)
    sizes = sorted({num_bytes for num_bytes, _ in points})
    if len(sizes) < _KNEE_POINTS:
        return plain
    line, squares = _fit(points, None)
    bent, fewest = min((_fit(points, knee) for knee in sizes[1:-1]), key=lambda found: found[1])
    gain = len(points) * math.log(max(squares, 1e-12) / max(fewest, 1e-12))
    return bent if gain > 2 * math.log(len(points)) else line


def held_out_error(points: Sequence[Point]) -> float | None:
    """Return the mean relative error of a fit to every second size, on the others; None for fewer than five sizes."""
    ordered = sorted(points)
    if len(ordered) < 5:
        return None
    fit = fit_knee(ordered[::2])
    errors = [abs(fit.seconds(num_bytes) / seconds - 1) for num_bytes, seconds in ordered[1::2]]
    return sum(errors) / len(errors)


def _fit(points: Sequence[Point], knee: float | None) -> tuple[AlphaBeta, float]:
    """Return the best fit with a given knee, and the sum of its squared relative errors."""
    sizes, seconds = np.array(points, dtype=np.float64).T
    below = sizes if knee is None else np.minimum(sizes, knee)
    above = np.zeros_like(sizes) if knee is None else np.maximum(sizes - knee, 0.0)
    # alpha/t + beta below/t + beyond above/t = 1 for every point
    rows = np.stack([np.ones_like(sizes), below, above], axis=1) / seconds[:, None]
    numbers = _at_least_zero(rows, [0, 1] if knee is None else [0, 1, 2])
    errors = rows @ numbers - 1
    alpha, beta, beyond = (float(number) for number in numbers)
    found = AlphaBeta(alpha_s=alpha, beta_s=beta, error=float(np.abs(errors).mean()))
    if knee is not None:
        found = replace(found, knee_bytes=knee, beyond_s=beyond)
    return found, float(errors @ errors)


def _at_least_zero(rows: NDArray[np.float64], columns: list[int]) -> NDArray[np.float64]:
    """Solve rows @ numbers = 1 by non-negative least squares: negative numbers are set to 0, lowest first."""
    numbers = np.zeros(rows.shape[1])
    while columns:
        scale = np.abs(rows[:, columns]).max(axis=0)  # bytes and ones are twelve orders of magnitude apart
        found = np.linalg.lstsq(rows[:, columns] / scale, np.ones(len(rows)), rcond=None)[0] / scale
        if (found >= 0).all():
            numbers[columns] = found
            break
        columns = [column for column in columns if column != columns[int((found * scale).argmin())]]
    return numbers


# The report of a sweep: bandwidth and time over size, the fits, the table and the checks.


METHOD = (
    "Every rank calls each collective in blocks of at least 4 ms and usually four calls; ranks start a block together.",
    "Times are host times, with the device synchronized before and after a block.",
    "A sample is the mean time of a call in a block on the slowest rank.",
    "time is the median of the samples, min the minimum, p99 the 99th percentile (below 100 samples: the maximum).",
    "size, count, algbw and busbw are defined as in nccl-tests.",
    "all_reduce, reduce and broadcast work in place, the others out of place.",
    "Results are checked on inputs that differ by rank and element: integers so small that results are exact.",
    "#wrong counts the wrong elements of all ranks.",
    "A fit is seconds = alpha + bytes x beta to the minima, by least squares of relative errors.",
    "If eight sizes or more show a knee, the fit has two lines that join there.",
    "The held-out error is the error on every second size of a fit to the other sizes.",
)


def findings(
    found: CommMeasurement, verdicts: Sequence[SeriesVerdict], changes: Sequence[Change] | None = None
) -> Findings:
    """Return the content of the report of a sweep."""
    sections = [_speed(found, verdicts), _fits(verdicts), _checked(found), _all_rows(found.rows)]
    if changes is not None:
        sections.insert(0, _compared(changes))
    return Findings(
        title=f"Collectives: {found.backend}, {found.world_size} ranks, {found.device}",
        verdict=sentence(found, verdicts),
        facts=found.facts,
        method=METHOD,
        sections=tuple(sections),
    )


def _speed(found: CommMeasurement, verdicts: Sequence[SeriesVerdict]) -> Section:
    named = {verdict.series: verdict for verdict in verdicts if verdict.collective != "barrier"}
    lines = defaultdict(list)
    for row in found.rows:
        lines[row.series].append(row)
    bandwidth = Plot(
        title="Bus bandwidth",
        x_label="size",
        y_label="GB/s",
        series=tuple(
            Series(name=verdict.name, points=tuple((float(row.size), row.busbw) for row in lines[key]))
            for key, verdict in named.items()
        ),
        log_x=True,
        x_is_bytes=True,
    )
    times = [
        Plot(
            title=f"Time of {verdict.name}",
            x_label="size",
            y_label="us",
            series=(Series(name="measured", points=_points(lines[key])), *_fitted(verdict, lines[key])),
            log_x=True,
            log_y=True,
            x_is_bytes=True,
        )
        for key, verdict in named.items()
        if len(lines[key]) > 1
    ]
    sentences = [f"{verdict.name}: {verdict.text}." for verdict in verdicts]
    return Section(title="Speed", text=" ".join(sentences), parts=(bandwidth, *times) if times else ())


def _points(rows: Sequence[SweepRow]) -> tuple[tuple[float, float], ...]:
    return tuple((float(row.size), row.time_us) for row in rows)


def _fitted(verdict: SeriesVerdict, rows: Sequence[SweepRow]) -> tuple[Series, ...]:
    if verdict.fit is None:
        return ()
    points = tuple((float(row.size), verdict.fit.seconds(row.size) * 1e6) for row in rows)
    return (Series(name="fit of the minima", points=points, dashed=True),)


def _fits(verdicts: Sequence[SeriesVerdict]) -> Section:
    rows = []
    for verdict in verdicts:
        fit = verdict.fit
        if fit is None:
            continue
        knee = "" if fit.knee_bytes is None else f"{fit.knee_bytes / 2**20:g} MiB"
        held_out = "" if verdict.held_out is None else f"{verdict.held_out:.1%}"
        numbers = (f"{fit.alpha_s * 1e6:.1f}", f"{fit.bytes_per_s / 1e9:.2f}", knee, f"{fit.error:.1%}", held_out)
        rows.append((verdict.name, *numbers, verdict.text))
    header = ("collective", "alpha (us)", "1 / beta (GB/s)", "knee", "error", "held-out error", "verdict")
    return Section(title="Fits and verdicts", parts=(Table(header=header, rows=tuple(rows)),) if rows else ())


def _checked(found: CommMeasurement) -> Section:
    correct = sum(check.wrong == 0 for check in found.checks)
    sentences = [f"{correct} combinations of collective, operation and dtype were called once and are correct."]
    missing = missing_text(found.checks, found.backend)
    if missing:
        sentences.append(f"{missing}.")
    if found.left_out:
        sentences.append(f"Skipped for lack of time: {', '.join(found.left_out)}.")
    return Section(title="Checks", text=" ".join(sentences))


def _all_rows(rows: Sequence[SweepRow]) -> Section:
    shown = shown_columns(rows)
    header = tuple(" ".join(filter(None, (COLUMNS[index][0], COLUMNS[index][2]))) for index in shown)
    lines = tuple(tuple(cells(row)[index] for index in shown) for row in rows)
    return Section(title="All measurements", parts=(Table(header=header, rows=lines),))


def _compared(changes: Sequence[Change]) -> Section:
    slower = [change for change in changes if change.is_regression]
    text = f"{len(slower)} of {len(changes)} measurements are slower than in the earlier run."
    lines = tuple((change.text,) for change in slower)
    parts = (Table(header=("slower",), rows=lines),) if lines else ()
    return Section(title="Comparison with the earlier run", text=text, parts=parts)
