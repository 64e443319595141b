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


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """Result of checking one collective with one operation and dtype on a small tensor."""

    collective: str
    operation: str
    """Empty for collectives that do not reduce."""
    dtype: str
    """Empty for collectives without data."""
    wrong: int | None
    """Number of wrong elements; None if the backend does not support the case."""
    reason: str = msgspec.field(default="", name="words")
    """The backend's error for an unsupported case; the JSON key is `words`."""

    @property
    def case(self) -> tuple[str, str, str]:
        """The collective, operation and dtype."""
        return (self.collective, self.operation, self.dtype)


@dataclass(frozen=True, kw_only=True)
class SweepRow:
    """One row of the table, with the columns of nccl-tests and some more."""

    collective: str
    group: str
    ranks: int
    """Number of ranks of one group."""
    mode: str
    size: int
    """Bytes."""
    count: int
    """Elements."""
    type: str
    redop: str
    root: int
    """-1 for collectives without a root."""
    time_us: float
    """Median over blocks of calls on the slowest rank of all groups."""
    min_us: float
    p99_us: float
    algbw: float
    """GB/s, like busbw."""
    busbw: float
    wrong: int
    """Number of wrong elements on all ranks."""
    spread: float
    """Half the interquartile range of the time, as a fraction of the median."""
    repeats: int

    @property
    def key(self) -> tuple[str | int, ...]:
        """Key that identifies the same measurement in two runs."""
        return (self.collective, self.group, self.ranks, self.mode, self.size, self.type, self.redop, self.root)

    @property
    def series(self) -> tuple[str | int, ...]:
        """Key that is equal for rows that differ only in size."""
        return (self.collective, self.group, self.ranks, self.mode, self.type, self.redop, self.root)


@dataclass(frozen=True, kw_only=True)
class CommMeasurement:
    """All measurements of a sweep."""

    backend: str
    device: str
    world_size: int
    num_nodes: int
    rows: tuple[SweepRow, ...]
    checks: tuple[Check, ...]
    """Checks of operations and dtypes on small tensors, including unsupported ones."""
    ceilings: dict[str, Ceiling | None]
    """Group -> maximum bandwidth of its links."""
    left_out: tuple[str, ...]
    """Measurements that were skipped for lack of time."""
    seconds: float
    """Duration of the sweep, without starting the ranks."""
    facts: tuple[tuple[str, str], ...] = field(default=())

    @property
    def wrong(self) -> int:
        """Number of wrong elements in all rows and checks."""
        return sum(row.wrong for row in self.rows) + sum(check.wrong or 0 for check in self.checks)


def row_of(timing: Timing, *, collective: str, size: int, ranks: int, **columns: str | int) -> SweepRow:
    """Return the row of a timing, with its bandwidths."""
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
    """Return a line that lists the operations and dtypes a backend does not support; empty if it supports all."""
    checked: dict[tuple[str, str], list[bool]] = defaultdict(list)
    for check in checks:
        checked[check.operation, check.dtype].append(check.wrong is not None)
    missing = {case for case, supported in checked.items() if not any(supported)}
    dtypes = [dtype for dtype in TYPES if _all_missing(checked, missing, dtype=dtype)]
    operations = [name for name in OPERATIONS if _all_missing(checked, missing, operation=name)]
    rest: dict[str, list[str]] = defaultdict(list)
    for operation, dtype in sorted(missing):
        if operation and operation not in operations and dtype not in dtypes:
            rest[operation].append(dtype)
    joined: dict[str, list[str]] = defaultdict(list)
    for operation, names in rest.items():
        joined[", ".join(sorted(names, key=list(TYPES).index))].append(operation)
    parts = [*operations, *dtypes, *(f"{' '.join(names)} of {of}" for of, names in joined.items())]
    return f"{backend} does not support {'; '.join(parts)}" if parts else ""


def _all_missing(
    checked: dict[tuple[str, str], list[bool]], missing: set[tuple[str, str]], *, operation: str = "", dtype: str = ""
) -> bool:
    """Whether every checked case with an operation, or with a dtype, is unsupported."""
    cases = [case for case in checked if (operation and case[0] == operation) or (dtype and case[1] == dtype)]
    return bool(cases) and missing.issuperset(cases)


# A sweep of collectives as a table with the columns of nccl-tests, on a terminal and as CSV.


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
"""Name, width and unit, with the names of nccl-tests."""
_LEFT = 3
"""Number of text columns, which are aligned to the left."""
_OPTIONAL = {"group": "world", "mode": "sync"}
"""Columns that are hidden if all rows have this value."""


def cells(row: SweepRow) -> tuple[str, ...]:
    """Return the cells of one row, in the order of COLUMNS."""
    times = (f"{number:.1f}" for number in (row.time_us, row.min_us, row.p99_us))
    rates = (f"{number:.2f}" for number in (row.algbw, row.busbw))
    names = (row.collective, row.group, row.mode, str(row.size), str(row.count), row.type, row.redop, str(row.root))
    return (*names, *times, *rates, str(row.wrong))


def shown_columns(rows: Sequence[SweepRow]) -> list[int]:
    """Return the indices of the columns that are shown for these rows."""
    return [index for index, (name, _, _) in enumerate(COLUMNS) if _is_shown(name, rows)]


def _is_shown(name: str, rows: Sequence[SweepRow]) -> bool:
    return name not in _OPTIONAL or any(getattr(row, name) != _OPTIONAL[name] for row in rows)


def table_lines(rows: Sequence[SweepRow]) -> list[str]:
    """Return the table for a terminal: names, units, then one line per row."""
    shown = shown_columns(rows)

    def line(texts: Sequence[str]) -> str:
        padded = []
        for index in shown:
            width = COLUMNS[index][1]
            padded.append(texts[index].ljust(width) if index < _LEFT else texts[index].rjust(width))
        return " ".join(padded).rstrip()

    heads = [line([column[0] for column in COLUMNS]), line([column[2] for column in COLUMNS])]
    return [*heads, *(line(cells(row)) for row in rows)]


def csv_text(rows: Iterable[SweepRow]) -> str:
    """Return all rows as CSV with a header; the names contain the units."""
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


# Comparison with an earlier sweep: measurements that are slower by more than the spread of both runs.


VERSION = 1
"""Version of the JSON that --json writes."""
TOLERATED = 0.1
"""Relative slowdown that is always tolerated."""


@dataclass(frozen=True, kw_only=True)
class Earlier:
    """The fields of an earlier run's JSON that are compared."""

    version: int
    rows: tuple[SweepRow, ...]


@dataclass(frozen=True, kw_only=True)
class Change:
    """The change of one measurement between two runs."""

    row: SweepRow
    earlier_us: float
    ratio: float
    """Median time of this run divided by that of the earlier run."""
    is_regression: bool
    """Whether median and minimum are slower, by more than a tenth and more than the spread of both runs."""

    @property
    def text(self) -> str:
        """The change in one line."""
        row = self.row
        parts = [row.collective, write_size(row.size), row.type, row.redop, row.mode, f"in {row.group}"]
        name = " ".join(part for part in parts if part != "none")
        return f"{name}: {self.earlier_us:.0f} -> {row.time_us:.0f} us ({self.ratio - 1:+.0%})"


def read_earlier(path: Path) -> Earlier:
    """Read the JSON of an earlier run; raise InputError if it is invalid."""
    again = "create it with shardwise bench comm --json"
    try:
        earlier = msgspec.json.decode(path.read_bytes(), type=Earlier)
    except OSError as error:
        raise InputError(
            f"{path} cannot be read ({error.strerror})",
            code="bench.baseline-read-failed",
            fix="pass the JSON file of an earlier run",
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputError(
            f"{path} is not the JSON of an earlier run ({error})", code="bench.baseline-invalid", fix=again
        ) from error
    if earlier.version != VERSION:
        raise InputError(
            f"{path} has version {earlier.version}, expected {VERSION}", code="bench.baseline-version", fix=again
        )
    for index, row in enumerate(earlier.rows):
        numbers = (row.time_us, row.min_us, row.p99_us, row.spread)
        are_valid = all(math.isfinite(number) and number >= 0 for number in numbers)
        if not are_valid or row.time_us == 0 or row.min_us == 0:
            raise InputError(
                f"{path}: row {index} ({row.collective}) has an invalid time of {row.time_us} us",
                code="bench.baseline-time-invalid",
                fix=again,
            )
    return earlier


def compare(rows: Iterable[SweepRow], earlier: Sequence[SweepRow], path: Path) -> list[Change]:
    """Return the changes of measurements that both runs have; raise InputError if there are none."""
    before = {row.key: row for row in earlier}
    changes = [_change(row, before[row.key]) for row in rows if row.key in before]
    if not changes:
        raise InputError(
            f"{path} has no measurement in common with this run",
            code="bench.baseline-no-overlap",
            fix="use the --nproc, --sizes, --dtypes, --ops and --group of the earlier run",
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
