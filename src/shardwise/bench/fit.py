"""The two numbers of a link: seconds to begin, and seconds per byte, fitted to measured collectives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwise.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, kw_only=True)
class AlphaBeta:
    """Seconds of a message are alpha_s + num_bytes x beta_s."""

    alpha_s: float
    beta_s: float
    """Per byte."""
    error: float
    """Mean distance of the points from the line, as a fraction of each."""

    def seconds(self, num_bytes: float) -> float:
        """Return the seconds of a message."""
        return self.alpha_s + num_bytes * self.beta_s


def fit_alpha_beta(points: Sequence[tuple[float, float]]) -> AlphaBeta:
    """Fit (bytes, seconds) by least squares of relative errors, so that small messages count as much as large ones.

    Neither number is ever below 0.
    """
    if len({num_bytes for num_bytes, _ in points}) < 2 or any(seconds <= 0 for _, seconds in points):
        raise InputError(
            f"{len(points)} points do not make a line", fix="measure two sizes or more, in seconds above 0"
        )
    # alpha/t + beta n/t = 1 for every point: normal equations of two unknowns.
    rows = [(1 / seconds, num_bytes / seconds) for num_bytes, seconds in points]
    aa, ab, bb = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a, b = (sum(row[i] for row in rows) for i in (0, 1))
    determinant = aa * bb - ab * ab
    alpha, beta = (a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant
    if alpha < 0:
        alpha, beta = 0.0, b / bb
    elif beta < 0:
        alpha, beta = a / aa, 0.0
    error = sum(abs(alpha * row[0] + beta * row[1] - 1) for row in rows) / len(rows)
    return AlphaBeta(alpha_s=alpha, beta_s=beta, error=error)
