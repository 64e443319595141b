"""Mixtures of sources: which source each row of the stream comes from, exact in every prefix.

Proportions become integers with a sum of at most 65,536, the length of a period. One period is a table of sources in
which every prefix has, of each source, its exact share within less than one row. The idea: row k of a source with share
p must lie in the window from k / p to (k + 1) / p, and the row with the earliest end of its window comes first. Such a
schedule exists for any shares (Baruah et al., "Proportionate progress", 1996), and the earliest deadline first finds
it. The invariant: counts of a prefix are a function of its length alone, so a position in the stream needs no history.
"""

from __future__ import annotations

import functools
import heapq
import math
from dataclasses import dataclass
from fractions import Fraction
from numbers import Real
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from shardwise.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LONGEST_PERIOD = 65_536


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Shares of several sources in the rows of a stream."""

    shares: tuple[int, ...]
    """Rows of each source in one period; 0 for a source that is not used."""

    @property
    def period(self) -> int:
        """Rows of one period."""
        return sum(self.shares)

    def counts(self, position: int) -> npt.NDArray[np.int64]:
        """Return how many of the first `position` rows come from each source."""
        periods, rest = divmod(position, self.period)
        counts: npt.NDArray[np.int64] = _prefix_counts(self.shares)[rest]
        return periods * np.array(self.shares, dtype=np.int64) + counts

    def sources(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return the source of each row from position `start` to `stop`."""
        return _table(self.shares)[np.arange(start, stop) % self.period]


def make_mixture(proportions: Mapping[str, float]) -> Mixture:
    """Return the mixture of sources with these proportions of rows, in their order.

    A period has as few rows as the exact proportions allow; if they need more than 65,536, they are rounded by the
    method of largest remainders, so that each is off by less than one row per period; but every positive proportion has
    at least one row, which the largest gives up.
    """
    if not proportions:
        raise DataError("a mixture must have a source", code="data.mixture-empty", fix="pass at least one source")
    for name, proportion in proportions.items():
        if not _is_proportion(proportion):
            raise DataError(
                f"the proportion of source {name} must be a number of at least 0, got {proportion!r}",
                code="data.proportion-invalid",
                fix="pass the relative number of rows of this source",
            )
    if len(proportions) > LONGEST_PERIOD:
        raise DataError(
            f"a mixture has {len(proportions)} sources, more than the {LONGEST_PERIOD} rows of a period",
            code="data.mixture-too-large",
            fix="join sources in one folder",
        )
    if not any(proportions.values()):
        raise DataError(
            "the proportions of all sources are 0",
            code="data.proportions-zero",
            fix="give at least one source a positive proportion",
        )
    return Mixture(shares=_apportion([Fraction(str(proportion)) for proportion in proportions.values()]))


def _is_proportion(value: object) -> bool:
    """Return whether a value is a finite number of at least 0; the scalars of NumPy are Real; True is excluded."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    return 0 <= float(value) < math.inf


def _apportion(weights: Sequence[Fraction]) -> tuple[int, ...]:
    """Return integers with these ratios and a sum of at most LONGEST_PERIOD, rounded only if necessary."""
    total = sum(weights, Fraction(0))
    exact = [weight / total for weight in weights]
    period = math.lcm(*(share.denominator for share in exact))
    if period <= LONGEST_PERIOD:
        return tuple(int(share * period) for share in exact)
    whole = [int(share * LONGEST_PERIOD) for share in exact]
    # A source with a positive proportion keeps at least one row per period, or it would never be read.
    whole = [max(rows, 1) if share else 0 for rows, share in zip(whole, exact, strict=True)]
    order = sorted(range(len(exact)), key=lambda each: (whole[each] - exact[each] * LONGEST_PERIOD, each))
    missing = LONGEST_PERIOD - sum(whole)
    for each in order[: max(0, missing)]:
        whole[each] += 1
    for _ in range(-missing):  # sources that were rounded up to one row take them from the largest
        whole[whole.index(max(whole))] -= 1
    return tuple(whole)


@functools.lru_cache(maxsize=8)
def _table(shares: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """Return the source of each row of one period."""
    period = sum(shares)
    waiting: list[tuple[int, int]] = []
    """(first position of the window, source) of the next row of each source whose window lies ahead."""
    ready: list[tuple[int, int]] = []
    """(end of the window, source) of the next row of each source whose window has begun."""
    taken = [0] * len(shares)
    for source, share in enumerate(shares):
        if share:
            heapq.heappush(waiting, (0, source))
    table = np.empty(period, dtype=np.int64)
    for position in range(period):
        while waiting and waiting[0][0] <= position:
            _, source = heapq.heappop(waiting)
            end = -(-(taken[source] + 1) * period // shares[source])
            heapq.heappush(ready, (end, source))
        _, source = heapq.heappop(ready)
        table[position] = source
        taken[source] += 1
        heapq.heappush(waiting, (taken[source] * period // shares[source], source))
    table.flags.writeable = False
    return table


@functools.lru_cache(maxsize=8)
def _prefix_counts(shares: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """Return [period + 1, sources]: the rows of each source among the first rows of a period."""
    table = _table(shares)
    counts = np.zeros((len(table) + 1, len(shares)), dtype=np.int64)
    for source in range(len(shares)):
        counts[1:, source] = np.cumsum(table == source)
    counts.flags.writeable = False
    return counts
