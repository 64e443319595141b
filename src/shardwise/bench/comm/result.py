"""What a sweep of collectives found, as values: rows with the columns of nccl-tests, checks, ceilings."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shardwise.bench.comm.bus_bandwidth import OPERATIONS, TYPES, bandwidths
from shardwise.bench.comm.ceiling import Ceiling  # noqa: TC001 - read at run time by msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shardwise.bench.timing import Timing


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
    """What the backend said then."""

    @property
    def case(self) -> tuple[str, str, str]:
        """What was checked."""
        return (self.collective, self.operation, self.dtype)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table: columns as nccl-tests names and defines them, and what they do not say."""

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
    rows: tuple[Row, ...]
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


def row_of(timing: Timing, *, collective: str, size: int, ranks: int, **columns: str | int) -> Row:
    """Return the line of a timing, with its bandwidths."""
    algorithm, bus = bandwidths(collective, size, timing.median_s, ranks)
    return Row(
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


def missing_words(checks: Iterable[Check], backend: str) -> str:
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
