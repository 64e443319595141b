"""A sweep of collectives as findings: bandwidth and time over size, the fits, the table, what was checked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.bench.comm.result import missing_words
from shardwise.bench.comm.table import COLUMNS, cells, shown_columns
from shardwise.bench.comm.verdict import sentence
from shardwise.bench.report.findings import Findings, Plot, Section, Series, Table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.bench.comm.compare import Change
    from shardwise.bench.comm.result import CommMeasurement, Row
    from shardwise.bench.comm.verdict import SeriesVerdict

METHOD = (
    "Every rank calls each collective in blocks of at least 4 ms and mostly four calls, which begin together.",
    "Time is the host's, from an idle device to an idle device; a sample is a block's mean call on the slowest rank.",
    "time is the median of the samples, min the lowest, p99 the 99th percentile (the highest of less than a hundred).",
    "size, count, algbw and busbw are those of nccl-tests.",
    "all_reduce, reduce and broadcast work in place, the others out of place.",
    "Results are checked on inputs that differ by rank and element: whole numbers so small that results are exact.",
    "#wrong counts elements of all ranks that are not what they should be.",
    "A fit is seconds = alpha + bytes x beta to the minima, by least squares of relative errors.",
    "Where eight sizes or more show a knee, it is two lines that meet there.",
    "The held-out error is that on every second size, when the others make the fit.",
)


def findings(
    found: CommMeasurement, verdicts: Sequence[SeriesVerdict], changes: Sequence[Change] | None = None
) -> Findings:
    """Return all that a sweep has to say."""
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
    lines = {key: [row for row in found.rows if row.series == key] for key in named}
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
    words = [f"{verdict.name}: {verdict.words}." for verdict in verdicts]
    return Section(title="Speed", text=" ".join(words), parts=(bandwidth, *times) if times else ())


def _points(rows: Sequence[Row]) -> tuple[tuple[float, float], ...]:
    return tuple((float(row.size), row.time_us) for row in rows)


def _fitted(verdict: SeriesVerdict, rows: Sequence[Row]) -> tuple[Series, ...]:
    if verdict.fit is None:
        return ()
    points = tuple((float(row.size), verdict.fit.seconds(row.size) * 1e6) for row in rows)
    return (Series(name="fit of the minima", points=points, dashed=True),)


def _fits(verdicts: Sequence[SeriesVerdict]) -> Section:
    rows = [
        (
            verdict.name,
            f"{verdict.fit.alpha_s * 1e6:.1f}",
            f"{verdict.fit.bytes_per_s / 1e9:.2f}",
            "" if verdict.fit.knee_bytes is None else f"{verdict.fit.knee_bytes / 2**20:g} MiB",
            f"{verdict.fit.error:.1%}",
            "" if verdict.held_out is None else f"{verdict.held_out:.1%}",
            verdict.words,
        )
        for verdict in verdicts
        if verdict.fit is not None
    ]
    header = ("collective", "alpha (us)", "1 / beta (GB/s)", "knee", "error", "held-out error", "verdict")
    return Section(title="Fits and verdicts", parts=(Table(header=header, rows=tuple(rows)),) if rows else ())


def _checked(found: CommMeasurement) -> Section:
    right = sum(check.wrong == 0 for check in found.checks)
    words = [f"{right} combinations of collective, operation and dtype were called once and are right."]
    lacks = missing_words(found.checks, found.backend)
    words += [f"{lacks}."] if lacks else []
    words += [f"Left out for want of time: {', '.join(found.left_out)}."] if found.left_out else []
    return Section(title="Checked", text=" ".join(words))


def _all_rows(rows: Sequence[Row]) -> Section:
    shown = shown_columns(rows)
    header = tuple(" ".join(filter(None, (COLUMNS[index][0], COLUMNS[index][2]))) for index in shown)
    lines = tuple(tuple(cells(row)[index] for index in shown) for row in rows)
    return Section(title="All measurements", parts=(Table(header=header, rows=lines),))


def _compared(changes: Sequence[Change]) -> Section:
    slower = [change for change in changes if change.is_regression]
    text = f"{len(slower)} of {len(changes)} measurements are slower than before."
    lines = tuple((change.words,) for change in slower)
    return Section(
        title="Beside the earlier run", text=text, parts=(Table(header=("slower",), rows=lines),) if lines else ()
    )
