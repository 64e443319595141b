"""The numbers of a link: seconds to begin, and seconds per byte, fitted to measured messages."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from shardwise.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Point = tuple[float, float]

_KNEE_POINTS = 8
"""Sizes that a knee needs: with fewer it follows the noise."""


@dataclass(frozen=True, kw_only=True)
class AlphaBeta:
    """Seconds of a message are alpha_s + num_bytes x beta_s, where there is no knee."""

    alpha_s: float
    beta_s: float
    """Per byte."""
    error: float
    """Mean distance of the points from the line, as a fraction of each."""
    knee_bytes: float | None = None
    """Where another protocol begins, or the caches end: bytes above it cost `beyond_s` each."""
    beyond_s: float = 0.0

    def seconds(self, num_bytes: float) -> float:
        """Return the seconds of a message."""
        knee = math.inf if self.knee_bytes is None else self.knee_bytes
        return self.alpha_s + min(num_bytes, knee) * self.beta_s + max(0.0, num_bytes - knee) * self.beyond_s

    @property
    def bytes_per_s(self) -> float:
        """What the largest messages come near to; infinite where they cost no more than small ones."""
        slope = self.beta_s if self.knee_bytes is None else self.beyond_s
        return 1 / slope if slope else math.inf


def fit_alpha_beta(points: Sequence[Point]) -> AlphaBeta:
    """Fit (bytes, seconds) by least squares of relative errors, so that small messages count as much as large ones.

    None of the numbers is ever below 0.
    """
    if len({num_bytes for num_bytes, _ in points}) < 2 or any(seconds <= 0 for _, seconds in points):
        raise InputError(
            f"{len(points)} points do not make a line",
            code="bench.too-few-points",
            fix="measure two sizes or more, in seconds above 0",
        )
    return _fit(points, None)[0]


def fit_knee(points: Sequence[Point]) -> AlphaBeta:
    """Fit (bytes, seconds) by a line, or by two that meet at a measured size where that is so much better.

    So much: the two numbers more must be worth it by Schwarz's criterion, and there must be eight sizes.
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
    """Return how far predictions of every second size are off, as a mean fraction, when the others make the fit.

    None for less than five sizes.
    """
    ordered = sorted(points)
    if len(ordered) < 5:
        return None
    fit = fit_knee(ordered[::2])
    errors = [abs(fit.seconds(num_bytes) / seconds - 1) for num_bytes, seconds in ordered[1::2]]
    return sum(errors) / len(errors)


def _fit(points: Sequence[Point], knee: float | None) -> tuple[AlphaBeta, float]:
    """Return the best line with a given knee, and the sum of its squared relative errors."""
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
    """Solve rows @ numbers = 1 by least squares; a number that would be below 0 is 0, the lowest first."""
    numbers = np.zeros(rows.shape[1])
    while columns:
        scale = np.abs(rows[:, columns]).max(axis=0)  # bytes and ones are twelve orders of magnitude apart
        found = np.linalg.lstsq(rows[:, columns] / scale, np.ones(len(rows)), rcond=None)[0] / scale
        if (found >= 0).all():
            numbers[columns] = found
            break
        columns = [column for column in columns if column != columns[int((found * scale).argmin())]]
    return numbers
