"""Timed collectives: every one runs, sizes are correct, and the slowest rank counts."""

import time

import pytest
import torch
import torch.distributed as dist

from refusals import refuses
from shardwise.measurement.timing import COLLECTIVES, Timing, measure_collective, time_calls
from shardwise.testing import run_ranks

CPU = torch.device("cpu")


def measure_all(world, dtype):
    return [measure_collective(name, 4096, dist.group.WORLD, CPU, dtype=dtype, budget_s=0.005) for name in COLLECTIVES]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_collective_is_timed_alike_on_every_rank(dtype):
    first, second = run_ranks(measure_all, 2, dtype)
    assert first == second
    assert [timed.name for timed in first] == list(COLLECTIVES)
    assert all(timed.timing.repeats >= 3 and timed.timing.min_s > 0 for timed in first)
    assert {timed.num_bytes for timed in first if timed.name != "barrier"} == {4096}


def measure_odd(world):
    group = dist.new_group([0, 2])
    if world.rank == 1:
        return None
    return measure_collective("all_gather", 1001, group, CPU, budget_s=0.005)


def test_a_group_of_some_ranks_is_timed_with_parts_of_sixteen_bytes():
    first, outside, second = run_ranks(measure_odd, 3)
    assert outside is None
    assert first == second
    assert (first.ranks, first.num_bytes) == (2, 992)


def measure_with_a_slow_rank(world):
    real = dist.all_reduce

    def slow(tensor, *args, **kwargs):
        if world.rank == 1 and tensor.numel() == 256:
            time.sleep(0.01)
        return real(tensor, *args, **kwargs)

    dist.all_reduce = slow
    return measure_collective("all_reduce", 1024, dist.group.WORLD, CPU, budget_s=0.05)


def test_the_slowest_rank_is_what_counts():
    for timed in run_ranks(measure_with_a_slow_rank, 2):
        assert timed.timing.median_s > 0.009


def refused(world, name, *refusal):
    with refuses(*refusal):
        measure_collective(name, 8, dist.group.WORLD, CPU)


def test_an_unknown_collective_and_a_lonely_send_are_refused():
    run_ranks(refused, 1, "allreduce", "bench.unknown-choice", "'allreduce'", "'all_reduce'")
    run_ranks(refused, 1, "send", "bench.too-few-ranks", "send")


def test_a_timing_has_median_extremes_and_spread():
    timing = Timing.of([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (timing.min_s, timing.median_s, timing.p99_s) == (1.0, 3.0, 5.0)
    assert timing.spread == pytest.approx(1.5 / 3)
    assert Timing.of([2.0]).spread == 0


def test_calls_on_the_cpu_are_timed_by_the_hosts_clock():
    timing = time_calls(lambda: time.sleep(0.002), CPU, budget_s=0.02)
    assert 0.002 <= timing.min_s <= timing.median_s < 0.2
