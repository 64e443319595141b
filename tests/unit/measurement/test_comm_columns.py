"""Columns and bus-bandwidth factors are those of nccl-tests: cases worked out by hand from its definitions."""

import pytest

from shardwise.measurement.comm.spec import KINDS, bandwidths, buffer_bytes, count_of, size_of

# name, ranks, bytes asked, bytes an element, seconds -> count, size, algbw, busbw (GB/s of 1e9)
CASES = [
    ("all_reduce", 2, 1 << 20, 4, 1e-3, 262_144, 1_048_576, 1.048576, 1.048576),
    ("all_reduce", 4, 1 << 20, 4, 1e-3, 262_144, 1_048_576, 1.048576, 1.572864),
    ("all_reduce", 1, 4096, 4, 1e-3, 1024, 4096, 0.004096, 0.0),
    ("all_gather", 4, 1 << 20, 4, 1e-3, 65_536, 1_048_576, 1.048576, 0.786432),
    ("reduce_scatter", 8, 1 << 30, 2, 1e-2, 67_108_864, 1_073_741_824, 107.3741824, 93.9524096),
    ("broadcast", 8, 1000, 4, 1e-6, 250, 1000, 1.0, 1.0),
    ("broadcast", 8, 1003, 4, 1e-6, 250, 1000, 1.0, 1.0),
    ("reduce", 3, 6_000_000, 8, 3e-3, 750_000, 6_000_000, 2.0, 2.0),
    ("gather", 2, 1001, 4, 1e-6, 124, 992, 0.992, 0.496),  # 125 elements a rank, rounded down to 16 bytes
    ("scatter", 3, 1_000_000, 1, 1e-3, 333_328, 999_984, 0.999984, 0.666656),
    ("all_to_all", 4, 1 << 20, 2, 2e-3, 131_072, 1_048_576, 0.524288, 0.393216),
    ("all_to_all", 4, 8, 4, 1e-6, 1, 16, 0.016, 0.012),  # never none, where nccl-tests would move nothing
    ("barrier", 4, 1 << 20, 4, 1e-3, 0, 0, 0.0, 0.0),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}-{case[2]}")
def test_columns_are_as_worked_out_by_hand(case):
    name, ranks, asked, itemsize, seconds, count, size, algbw, busbw = case
    assert count_of(name, asked, itemsize, ranks) == count
    assert size_of(name, count, itemsize, ranks) == size
    assert bandwidths(name, size, seconds, ranks) == pytest.approx((algbw, busbw))


def test_every_collective_has_a_case():
    assert {case[0] for case in CASES} == set(KINDS)


def test_memory_is_that_of_what_is_sent_and_received():
    found = {name: buffer_bytes(name, 1000, 4) for name in KINDS}
    assert found == {
        "all_reduce": 1000,
        "all_gather": 1250,
        "reduce_scatter": 1250,
        "broadcast": 1000,
        "reduce": 1000,
        "gather": 1250,
        "scatter": 1250,
        "all_to_all": 2000,
        "barrier": 0,
    }
