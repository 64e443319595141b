"""The result of a sweep of collectives: rows with the columns of nccl-tests, a table, and a comparison of sweeps."""

from __future__ import annotations

import csv
import io
import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from shardwise.errors import InputError
from shardwise.measurement.comm.limits import Ceiling  # noqa: TC001 - read at run time by msgspec
from shardwise.measurement.comm.spec import OPERATIONS, TYPES, bandwidths
from shardwise.units import write_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from shardwise.measurement.timing import Timing


@dataclass(frozen=True, kw_only=True)
class Check:
    """One collective with one operation and dtype, called once."""

    collective: str
    operation: str
    """"" where nothing is reduced."""
    dtype: str
    """"" where nothing moves."""
    wrong: int | None
    """Wrong elements; None where the backend has no such thing."""
    words: str = ""
    """What the backend raised then."""

    @property
    def case(self) -> tuple[str, str, str]:
        """What was checked."""
        return (self.collective, self.operation, self.dtype)


@dataclass(frozen=True, kw_only=True)
class SweepRow:
    """One line of the table: columns as nccl-tests names and defines them, and more."""

    collective: str
    group: str
    ranks: int
    """Of one group."""
    mode: str
    size: int
    """Bytes."""
    count: int
    """Elements."""
    type: str
    redop: str
    root: int
    """-1 where there is none."""
    time_us: float
    """Median over blocks of calls, of the slowest rank of all groups."""
    min_us: float
    p99_us: float
    algbw: float
    """GB/s, as busbw."""
    busbw: float
    wrong: int
    """Elements that came out other than they should, on all ranks together."""
    spread: float
    """Half the distance of the quartiles of the time, as a fraction of it."""
    repeats: int

    @property
    def key(self) -> tuple[str | int, ...]:
        """What makes two rows of two runs the same measurement."""
        return (self.collective, self.group, self.ranks, self.mode, self.size, self.type, self.redop, self.root)

    @property
    def series(self) -> tuple[str | int, ...]:
        """What rows have in common that differ in size only."""
        return (self.collective, self.group, self.ranks, self.mode, self.type, self.redop, self.root)


@dataclass(frozen=True, kw_only=True)
class CommMeasurement:
    """All that a sweep found."""

    backend: str
    device: str
    world_size: int
    num_nodes: int
    rows: tuple[SweepRow, ...]
    checks: tuple[Check, ...]
    """Of operations and dtypes on little data, what the backend lacks among them."""
    ceilings: dict[str, Ceiling | None]
    """Group -> what its links could carry."""
    left_out: tuple[str, ...]
    """What there was no time for."""
    seconds: float
    """That it took, without starting the ranks."""
    facts: tuple[tuple[str, str], ...] = field(default=())

    @property
    def wrong(self) -> int:
        """Wrong elements of all rows and checks."""
        return sum(row.wrong for row in self.rows) + sum(check.wrong or 0 for check in self.checks)


def row_of(timing: Timing, *, collective: str, size: int, ranks: int, **columns: str | int) -> SweepRow:
    """Return the line of a timing, with its bandwidths."""
    algorithm, bus = bandwidths(collective, size, timing.median_s, ranks)
    return SweepRow(
        collective=collective,
        size=size,
        ranks=ranks,
        time_us=timing.median_s * 1e6,
        min_us=timing.min_s * 1e6,
        p99_us=timing.p99_s * 1e6,
        algbw=algorithm,
        busbw=bus,
        spread=timing.spread,
        repeats=timing.repeats,
        **columns,  # type: ignore[arg-type]
    )


def missing_text(checks: Iterable[Check], backend: str) -> str:
    """Say in one line what a backend lacks of what was checked, "" where it lacks nothing."""
    asked: dict[tuple[str, str], list[bool]] = defaultdict(list)
    for check in checks:
        asked[check.operation, check.dtype].append(check.wrong is not None)
    lacks = {case for case, found in asked.items() if not any(found)}
    dtypes = [dtype for dtype in TYPES if _all_lack(asked, lacks, dtype=dtype)]
    operations = [name for name in OPERATIONS if _all_lack(asked, lacks, operation=name)]
    rest: dict[str, list[str]] = defaultdict(list)
    for operation, dtype in sorted(lacks):
        if operation and operation not in operations and dtype not in dtypes:
            rest[operation].append(dtype)
    joined: dict[str, list[str]] = defaultdict(list)
    for operation, names in rest.items():
        joined[", ".join(sorted(names, key=list(TYPES).index))].append(operation)
    parts = [*operations, *dtypes, *(f"{' '.join(names)} of {of}" for of, names in joined.items())]
    return f"{backend} has no {'; no '.join(parts)}" if parts else ""


def _all_lack(
    asked: dict[tuple[str, str], list[bool]], lacks: set[tuple[str, str]], *, operation: str = "", dtype: str = ""
) -> bool:
    """Whether everything with an operation, or with a dtype, is missing."""
    cases = [case for case in asked if (operation and case[0] == operation) or (dtype and case[1] == dtype)]
    return bool(cases) and lacks.issuperset(cases)


# A sweep of collectives as a table: the columns of nccl-tests, on a terminal and as CSV.


COLUMNS = (
    ("collective", 14, ""),
    ("group", 9, ""),
    ("mode", 5, ""),
    ("size", 11, "(B)"),
    ("count", 11, "(elements)"),
    ("type", 8, ""),
    ("redop", 6, ""),
    ("root", 4, ""),
    ("time", 9, "(us)"),
    ("min", 9, "(us)"),
    ("p99", 9, "(us)"),
    ("algbw", 7, "(GB/s)"),
    ("busbw", 7, "(GB/s)"),
    ("#wrong", 6, ""),
)
"""Name, width and unit; those of nccl-tests keep its names."""
_LEFT = 3
"""Columns that are words."""
_OPTIONAL = {"group": "world", "mode": "sync"}
"""Columns that are not shown while they have no other value than this."""


def cells(row: SweepRow) -> tuple[str, ...]:
    """Return one line's cells, in the order of COLUMNS."""
    times = (f"{number:.1f}" for number in (row.time_us, row.min_us, row.p99_us))
    rates = (f"{number:.2f}" for number in (row.algbw, row.busbw))
    words = (row.collective, row.group, row.mode, str(row.size), str(row.count), row.type, row.redop, str(row.root))
    return (*words, *times, *rates, str(row.wrong))


def shown_columns(rows: Sequence[SweepRow]) -> list[int]:
    """Return which columns have information for these rows."""
    return [index for index, (name, _, _) in enumerate(COLUMNS) if _is_shown(name, rows)]


def _is_shown(name: str, rows: Sequence[SweepRow]) -> bool:
    return name not in _OPTIONAL or any(getattr(row, name) != _OPTIONAL[name] for row in rows)


def table_lines(rows: Sequence[SweepRow]) -> list[str]:
    """Return the table for a terminal: names, units, then one line a row."""
    shown = shown_columns(rows)

    def line(texts: Sequence[str]) -> str:
        padded = (
            texts[index].ljust(COLUMNS[index][1]) if index < _LEFT else texts[index].rjust(COLUMNS[index][1])
            for index in shown
        )
        return " ".join(padded).rstrip()

    heads = [line([column[0] for column in COLUMNS]), line([column[2] for column in COLUMNS])]
    return [*heads, *(line(cells(row)) for row in rows)]


def csv_text(rows: Iterable[SweepRow]) -> str:
    """Return all rows as CSV with a header; units are in the names."""
    names = ("collective", "group", "ranks", "mode", "size_bytes", "count", "type", "redop", "root")
    numbers = ("time_us", "min_us", "p99_us", "algbw_gbs", "busbw_gbs", "wrong", "repeats")
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*names, *numbers])
    for row in rows:
        writer.writerow(
            [row.collective, row.group, row.ranks, row.mode, row.size, row.count, row.type, row.redop, row.root]
            + [f"{number:.3f}" for number in (row.time_us, row.min_us, row.p99_us)]
            + [f"{number:.4f}" for number in (row.algbw, row.busbw)]
            + [row.wrong, row.repeats]
        )
    return out.getvalue()


# A sweep beside an earlier one: which measurements are slower, by more than both runs vary.


VERSION = 1
"""Of what --json writes."""
TOLERATED = 0.1
"""How much slower is within tolerance, however little both runs vary."""


@dataclass(frozen=True, kw_only=True)
class Earlier:
    """What is read of the JSON of an earlier run."""

    version: int
    rows: tuple[SweepRow, ...]


@dataclass(frozen=True, kw_only=True)
class Change:
    """One measurement of both runs."""

    row: SweepRow
    earlier_us: float
    ratio: float
    """Of the median times, this run's to the earlier one's."""
    is_regression: bool
    """Slower in median and minimum, by more than a tenth and than both runs vary."""

    @property
    def words(self) -> str:
        """Say it in one line."""
        row = self.row
        what = [row.collective, write_size(row.size), row.type, row.redop, row.mode, f"in {row.group}"]
        named = " ".join(part for part in what if part != "none")
        return f"{named}: {self.earlier_us:.0f} -> {row.time_us:.0f} us ({self.ratio - 1:+.0%})"


def read_earlier(path: Path) -> Earlier:
    """Read what an earlier run wrote with --json; anything else is refused."""
    again = "write it with: shardwise bench comm --json"
    try:
        earlier = msgspec.json.decode(path.read_bytes(), type=Earlier)
    except OSError as error:
        raise InputError(
            f"{path} cannot be read ({error.strerror})",
            code="bench.baseline-read-failed",
            fix="name the JSON of an earlier run",
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputError(
            f"{path} is not the JSON of an earlier run ({error})", code="bench.baseline-invalid", fix=again
        ) from error
    if earlier.version != VERSION:
        raise InputError(
            f"{path} has version {earlier.version}, and {VERSION} is known", code="bench.baseline-version", fix=again
        )
    for index, row in enumerate(earlier.rows):
        numbers = (row.time_us, row.min_us, row.p99_us, row.spread)
        if not all(math.isfinite(number) and number >= 0 for number in numbers) or not row.time_us * row.min_us:
            raise InputError(
                f"{path}: row {index} ({row.collective}) has a time of {row.time_us} us",
                code="bench.baseline-time-invalid",
                fix=again,
            )
    return earlier


def compare(rows: Iterable[SweepRow], earlier: Sequence[SweepRow], path: Path) -> list[Change]:
    """Return every measurement that both runs have; none in common is refused."""
    before = {row.key: row for row in earlier}
    changes = [_change(row, before[row.key]) for row in rows if row.key in before]
    if not changes:
        raise InputError(
            f"{path} has no measurement in common with this run",
            code="bench.baseline-no-overlap",
            fix="use the --nproc, --sizes, --dtypes, --ops and --group of then",
        )
    return changes


def _change(row: SweepRow, before: SweepRow) -> Change:
    ratio = row.time_us / before.time_us
    slower = ratio - 1 > max(TOLERATED, row.spread + before.spread)
    return Change(
        row=row,
        earlier_us=before.time_us,
        ratio=ratio,
        is_regression=slower and row.min_us / before.min_us > 1 + TOLERATED,
    )
