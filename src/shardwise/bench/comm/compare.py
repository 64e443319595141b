"""A sweep beside an earlier one: which measurements are slower, by more than both runs vary."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from shardwise.bench.comm.result import Row  # noqa: TC001 - read at run time by msgspec
from shardwise.bench.comm.spec import written_size
from shardwise.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

VERSION = 1
"""Of what --json writes."""
TOLERATED = 0.1
"""How much slower is no news, however little both runs vary."""


@dataclass(frozen=True, kw_only=True)
class Earlier:
    """What is read of the JSON of an earlier run."""

    version: int
    rows: tuple[Row, ...]


@dataclass(frozen=True, kw_only=True)
class Change:
    """One measurement of both runs."""

    row: Row
    earlier_us: float
    ratio: float
    """Of the median times, this run's to the earlier one's."""
    is_regression: bool
    """Slower in median and minimum, by more than a tenth and than both runs vary."""

    @property
    def words(self) -> str:
        """Say it in one line."""
        row = self.row
        what = [row.collective, written_size(row.size), row.type, row.redop, row.mode, f"in {row.group}"]
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


def compare(rows: Iterable[Row], earlier: Sequence[Row], path: Path) -> list[Change]:
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


def _change(row: Row, before: Row) -> Change:
    ratio = row.time_us / before.time_us
    slower = ratio - 1 > max(TOLERATED, row.spread + before.spread)
    return Change(
        row=row,
        earlier_us=before.time_us,
        ratio=ratio,
        is_regression=slower and row.min_us / before.min_us > 1 + TOLERATED,
    )
