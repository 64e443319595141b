"""Quantities are written by one rule each, and sizes are read back as they were written."""

import math

import pytest

from shardwise import units


@pytest.mark.parametrize(
    ("function", "values", "texts"),
    [
        (units.format_number, (None, 0, 1234.5, 0.012346, 12.5), ["-", "0", "1,234", "0.01235", "12.5"]),
        (units.format_number, (1e15, 2.5e-7, -3.0, math.nan, -math.inf), ["1e15", "2.5e-7", "-3", "NaN", "-inf"]),
        (units.format_whole, (None, 1234567.8), ["-", "1,234,568"]),
        (units.format_count, (6.74e9, 125_000, 12, 999_600), ["6.74 billion", "125 thousand", "12", "1 million"]),
        (units.format_bytes, (None, 0, 1, 1023, 4096), ["-", "0 B", "1 B", "1,023 B", "4 KiB"]),
        (units.format_bytes, (3 * 2**19, 3 << 30, 2**40), ["1.5 MiB", "3 GiB", "1 TiB"]),
        (units.format_bytes_si, (999, 1500, 5e9, 2e12, 999_700), ["999 B", "1.5 kB", "5 GB", "2 TB", "1 MB"]),
        (units.format_gb, (3310.0, 9.9e6, 1.5e9, 999.7e9), ["3.31 kB", "9.9 MB", "1.5 GB", "1,000 GB"]),
        (units.format_seconds, (2.5, 0.0193, 25e-6, 1463, 0.9996), ["2.5 s", "19.3 ms", "25 us", "1,463 s", "1 s"]),
        (units.format_duration, (None, 0.0421, 7.25, 515), ["-", "42 ms", "7.2 s", "8 min 35 s"]),
        (units.format_duration, (90_061, 700_210_000), ["1 d 1 h", "8,104 d 6 h"]),
        (units.format_rate, (1234.4, 99.96, 41.23, 0.5), ["1,234", "100", "41.2", "0.500"]),
        (units.format_bandwidth, (12.34e9, 250e6), ["12.3 GB/s", "250 MB/s"]),
    ],
)
def test_quantities_are_written_in_the_unit_that_suits_them(function, values, texts):
    assert [function(value) for value in values] == texts


def test_bytes_of_few_digits_for_narrow_columns():
    assert units.format_bytes(1500, 3) == "1.46 KiB"


def test_sizes_are_read_as_they_are_written():
    sizes = (1, 1000, 1024, 5 << 30)
    assert [units.read_size(units.write_size(size)) for size in sizes] == list(sizes)
    assert [units.read_size(text) for text in ("1.5MiB", "1MB", "2K", "1TiB")] == [1_572_864, 10**6, 2048, 1 << 40]
