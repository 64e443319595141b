"""Values in the words of a view: counts, bytes, times, and ranks that are many."""

from __future__ import annotations

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_TIMES = ((86400.0, "d", 3600.0, "h"), (3600.0, "h", 60.0, "min"), (60.0, "min", 1.0, "s"))


def count_words(value: float | None) -> str:
    """A whole number with its thousands apart."""
    return "-" if value is None else f"{value:,.0f}"


def number_words(value: float | None) -> str:
    """Four digits that matter."""
    return "-" if value is None else f"{value:.4g}"


def byte_words(value: float | None) -> str:
    """Bytes in the unit that gives the shortest number."""
    if value is None:
        return "-"
    unit = 0
    while abs(value) >= 1000 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.3g} {_UNITS[unit]}"


def time_words(seconds: float | None) -> str:
    """Seconds in the two largest units they fill."""
    if seconds is None:
        return "-"
    for large, large_name, small, small_name in _TIMES:
        if seconds >= large:
            return f"{int(seconds // large)} {large_name} {int(seconds % large // small)} {small_name}"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{max(0.0, seconds) * 1000:.0f} ms"
