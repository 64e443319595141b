"""Formatting of bytes, times, counts and rates for all tables and messages, and the sizes of dtypes."""

from __future__ import annotations

import math
import re

from shardwise.errors import InputError

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
GB = 1e9

ELEMENT_BYTES: dict[str, int] = {"fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int8": 1}
"""dtype -> bytes per element."""

MISSING = "-"
"""Text for an unknown value."""

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_DECIMAL = ("B", "kB", "MB", "GB", "TB")
_COUNTS = ((1e12, "trillion"), (1e9, "billion"), (1e6, "million"), (1e3, "thousand"))
_ROUNDS_UP = 0.9995
"""Part of a unit that three significant digits round up to one: 999.6 ms are 1 s and not 1e+03 ms."""
_DURATIONS = ((86400.0, "d", 3600.0, "h"), (3600.0, "h", 60.0, "min"), (60.0, "min", 1.0, "s"))


def format_number(value: float | None, digits: int = 4) -> str:
    """Return a number with at most `digits` significant digits and thousands separators: 1,234, 0.01235, 2.5e-7."""
    if value is None:
        return MISSING
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else str(value)
    size = abs(value)
    if size != 0 and (size < 1e-4 or size >= 1e12):
        mantissa, _, exponent = f"{value:.2e}".partition("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    magnitude = math.floor(math.log10(size)) if size else 0
    text = f"{value:,.{max(0, digits - 1 - magnitude)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def format_whole(value: float | None) -> str:
    """Return a number rounded to an integer, with thousands separators."""
    return MISSING if value is None else f"{value:,.0f}"


def format_count(number: float) -> str:
    """Return a large number with three significant digits: 6.74 billion."""
    for size, name in _COUNTS:
        if number >= _ROUNDS_UP * size:
            return f"{number / size:.3g} {name}"
    return f"{number:.3g}"


def format_bytes(num_bytes: float | None, digits: int = 4) -> str:
    """Return bytes in binary units: 4 KiB, 1.5 MiB."""
    if num_bytes is None:
        return MISSING
    unit = 0
    if num_bytes and math.isfinite(num_bytes):
        unit = min(len(_BINARY) - 1, max(0, int(math.log2(abs(num_bytes)) // 10)))
    return f"{format_number(num_bytes / 1024**unit, digits)} {_BINARY[unit]}"


def format_bytes_si(num_bytes: float) -> str:
    """Return bytes in decimal units with three significant digits: 1.5 MB."""
    unit = 0
    while num_bytes >= 1000 * _ROUNDS_UP and unit < len(_DECIMAL) - 1:
        num_bytes, unit = num_bytes / 1000, unit + 1
    return f"{num_bytes:.3g} {_DECIMAL[unit]}"


def format_gb(num_bytes: float) -> str:
    """Return bytes in GB (10^9), so that the rows of a table are comparable, and in MB, kB or B below 0.01 GB."""
    size = num_bytes / GB
    if size < 0.01:
        return format_bytes_si(num_bytes)
    return f"{format_three_digits(size)} GB"


def format_three_digits(value: float) -> str:
    """Return a number with three significant digits, or from 1,000 as an integer."""
    return f"{value:,.0f}" if value >= 1000 * _ROUNDS_UP else f"{value:.3g}"


def format_seconds(seconds: float) -> str:
    """Return a time in s, ms or us with three significant digits, such as that of a step or a message."""
    if seconds >= _ROUNDS_UP:
        return f"{format_three_digits(seconds)} s"
    if seconds >= _ROUNDS_UP * 1e-3:
        return f"{1e3 * seconds:.3g} ms"
    return f"{1e6 * seconds:.3g} us"


def format_duration(seconds: float | None) -> str:
    """Return a duration in its two largest units: 8 min 35 s."""
    if seconds is None:
        return MISSING
    for large, large_name, small, small_name in _DURATIONS:
        if seconds >= large:
            return f"{int(seconds // large):,} {large_name} {int(seconds % large // small)} {small_name}"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{max(0.0, seconds) * 1000:.0f} ms"


def format_rate(per_s: float) -> str:
    """Return a rate without a unit: three significant digits below 100, else an integer: 41.2, 1,234."""
    return f"{per_s:,.0f}" if per_s >= 99.95 else f"{per_s:#.3g}"


def format_bandwidth(bytes_per_s: float) -> str:
    """Return a bandwidth in GB/s (10^9), or in MB/s below 1 GB/s, with three significant digits."""
    return f"{bytes_per_s / 1e9:.3g} GB/s" if bytes_per_s >= 0.9995e9 else f"{bytes_per_s / 1e6:.3g} MB/s"


# Sizes on the command line, parsed and formatted without loss.


_SIZES: dict[str, int] = {
    "": 1,
    "b": 1,
    "k": KIB,
    "kib": KIB,
    "kb": 10**3,  # a bare K is 1024, as in nccl-tests
    "m": MIB,
    "mib": MIB,
    "mb": 10**6,
    "g": GIB,
    "gib": GIB,
    "gb": 10**9,
    "t": 1 << 40,
    "tib": 1 << 40,
    "tb": 10**12,
}
"""Unit suffix in lower case -> bytes."""


def read_size(text: str) -> int:
    """Return the number of bytes of a size such as 64MiB, 100MB, 32M or 4096."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].lower() not in _SIZES:
        raise InputError(
            f"{text!r} is not a size in bytes",
            code="bench.size-syntax",
            fix="write a number with an optional unit, such as 4096, 64KiB, 100MB",
        )
    num_bytes = round(float(match[1]) * _SIZES[match[2].lower()])
    if num_bytes < 1:
        raise InputError(f"size must be positive, got {text!r}", code="bench.size-zero", fix="use at least 1 byte")
    return num_bytes


def write_size(num_bytes: int) -> str:
    """Return a size for `read_size`: 64KiB, or plain bytes if it is not a multiple of a unit."""
    for unit, base in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if num_bytes and num_bytes % base == 0:
            return f"{num_bytes // base}{unit}"
    return f"{num_bytes}B"
