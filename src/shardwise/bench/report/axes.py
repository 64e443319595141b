"""Axes of a plot: where a value lies between its ends, and which values are written beside it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

BYTES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_CROWD = 12
"""As many distinct places get a tick each, when they lie far enough apart."""


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One direction of a plot, from `low` to `high`, both finite and apart; above 0 where it is logarithmic."""

    low: float
    high: float
    log: bool = False
    is_bytes: bool = False
    at: tuple[float, ...] = ()
    """The only places that have data, where they are few: better ticks than round numbers."""

    def place(self, value: float) -> float:
        """Return where `value` lies, 0 at the low end and 1 at the high one."""
        low, high, value = (math.log(x) if self.log else x for x in (self.low, self.high, value))
        return (value - low) / (high - low)

    def ticks(self, most: int) -> list[tuple[float, str]]:
        """Return up to about `most` values to write, with their words."""
        values = self._places(most) or self._round(most)
        return [(value, in_bytes(value) if self.is_bytes else in_digits(value)) for value in values]

    def _places(self, most: int) -> list[float]:
        places = [self.place(value) for value in self.at]
        near = any(b - a < 0.8 / most for a, b in pairwise(places))
        return [] if near or len(places) > _CROWD else list(self.at)

    def _round(self, most: int) -> list[float]:
        if not self.log:
            return _linear_ticks(self.low, self.high, most)
        if self.is_bytes:
            return _powers(self.low, self.high, most, base=2.0)
        tens = _powers(self.low, self.high, most, base=10.0)
        return tens if len(tens) > 2 else _ones_twos_fives(self.low, self.high) or tens


def axis_over(values: Iterable[float], *, log: bool, is_bytes: bool = False, from_zero: bool = False) -> Axis | None:
    """Return an axis that holds all `values` that it can show, None when there are none.

    `from_zero` makes a linear axis begin (or end) at 0, so that heights compare as lengths do.
    """
    shown = sorted({value for value in values if has_place(value, log=log)})
    if not shown:
        return None
    low, high = shown[0], shown[-1]
    if from_zero and not log:
        low, high = min(low, 0.0), max(high, 0.0)
    if low == high:
        low, high = (low / 2, low * 2) if log else (low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2)
    return Axis(low=low, high=high, log=log, is_bytes=is_bytes, at=tuple(shown) if len(shown) <= _CROWD else ())


def has_place(value: float, *, log: bool) -> bool:
    """Whether an axis can show this value."""
    return math.isfinite(value) and (value > 0 or not log)


def in_digits(value: float, digits: int = 4) -> str:
    """Return a number with at most so many digits that matter, as people write it; words where it is none."""
    if not math.isfinite(value):
        return "no number" if math.isnan(value) else ("infinite" if value > 0 else "minus infinite")
    size = abs(value)
    if size != 0 and (size < 1e-4 or size >= 1e12):
        mantissa, _, exponent = f"{value:.2e}".partition("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    places = max(0, digits - 1 - (math.floor(math.log10(size)) if size else 0))
    words = f"{value:,.{places}f}"
    return words.rstrip("0").rstrip(".") if "." in words else words


def in_bytes(value: float) -> str:
    """Return a number of bytes as 4 KiB or 1.5 MiB."""
    unit = min(len(BYTES) - 1, max(0, int(math.log2(abs(value)) // 10))) if value and math.isfinite(value) else 0
    return f"{in_digits(value / 1024**unit)} {BYTES[unit]}"


def _linear_ticks(low: float, high: float, most: int) -> list[float]:
    """Return multiples of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * size for size in (1, 2, 5, 10) if power * size >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [step * index for index in range(first, last + 1)]


def _powers(low: float, high: float, most: int, *, base: float) -> list[float]:
    """Return powers of `base`, leaving out evenly where they would crowd."""
    first, last = math.ceil(math.log(low, base) - 1e-9), math.floor(math.log(high, base) + 1e-9)
    step = max(1, math.ceil((last - first + 1) / most))
    return [base**exponent for exponent in range(first, last + 1) if (exponent - first) % step == 0]


def _ones_twos_fives(low: float, high: float) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.floor(math.log10(high)) + 1)
    return [10.0**decade * digit for decade in decades for digit in (1, 2, 5) if low <= 10.0**decade * digit <= high]
