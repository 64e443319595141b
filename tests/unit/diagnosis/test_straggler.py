"""Slow ranks, named by when they come to collectives."""

import os
import subprocess
import sys

import pytest
from diagnosis.collectives import call

from e2e.processes import wait_for
from shardwise.diagnosis.guard.straggler import CoreLoad, Skew, read_core_load
from shardwise.runs.calls import GroupKey

GROUP = GroupKey("0", 0, (0, 1, 2))


def findings(lag_of, *, data_s=(0.0, 0.0, 0.0), calls=52, windows=1, times=1, crowding=None):
    """Feed calls that come 0.1 s apart, rank `rank` late by `lag_of(number, rank)`; return what is found."""
    skew = Skew(window_s=5.0, windows=windows)
    start = crowding and CoreLoad(runnable_per_core=crowding.runnable_per_core)
    found = skew.findings(dict.fromkeys(range(3), 0.0), 0.0, start)
    for turn in range(times):
        numbers = range(1 + turn * calls, 1 + (turn + 1) * calls)
        for rank in range(3):
            skew.feed(rank, [call(n, group=GROUP, entered=n * 0.1 + lag_of(n, rank)) for n in numbers])
        found += skew.findings(dict(enumerate(data_s)), 5.0 * (turn + 1), crowding)
    return found


def test_a_rank_that_comes_last_is_named_with_line_and_share():
    [text] = findings(lambda n, rank: 0.05 if rank == 2 else n % 2 * 1e-4 * rank)
    assert text.startswith(
        "rank 2 is slow: other ranks wait for it 51% of the time, most in all_reduce at /x/train.py:8"
    )
    assert "it computes longer" in text


def test_a_rank_that_waits_for_data_is_reported_as_such():
    [text] = findings(lambda n, rank: 0.05 if rank == 2 else 0.0, data_s=(0.1, 0.1, 2.5))
    assert "it waits longer for data" in text


def test_ranks_that_take_turns_are_not_slow():
    assert findings(lambda n, rank: 0.05 if n % 3 == rank else 0.0) == []


def test_a_little_late_is_not_slow():
    assert findings(lambda n, rank: 0.005 if rank == 2 else 0.0) == []


def test_one_long_wait_is_not_slow():
    assert findings(lambda n, rank: 4.0 if (n, rank) == (1, 2) else 0.0001 * rank) == []


def test_a_window_that_is_not_over_reports_nothing():
    assert findings(lambda n, rank: 0.05 * rank, calls=45) == []


def test_where_windows_are_short_a_rank_must_be_slow_again_and_again():
    def late(n, rank):
        return 0.05 if rank == 2 else 0.0

    assert findings(late, windows=2, times=1) == []
    assert len(findings(late, windows=2, times=2)) == 1


def test_a_slow_rank_is_named_once():
    assert len(findings(lambda n, rank: 0.05 if rank == 2 else 0.0, times=4)) == 1


def late(_, rank):
    return 0.05 if rank == 2 else 0.0


@pytest.mark.parametrize(
    ("crowding", "data_s", "is_named"),
    [
        (CoreLoad(queued_s={2: 0.4}), 0.0, True),  # late by 2.6 s in all
        (CoreLoad(queued_s={2: 2.0}), 0.0, False),
        (CoreLoad(queued_s={0: 2.0, 1: 2.0}), 0.0, True),
        (CoreLoad(stolen_s=2.0), 0.0, False),
        (CoreLoad(runnable_per_core=4.0), 0.0, True),  # it had a core when it wanted one
        (CoreLoad(runnable_per_core=4.0), 2.5, False),  # those who load its data may not have had one
        (CoreLoad(runnable_per_core=1.0), 2.5, True),
    ],
    ids=str,
)
def test_a_rank_that_others_kept_from_its_core_is_not_named(crowding, data_s, is_named):
    assert bool(findings(late, data_s=(0.0, 0.0, data_s), crowding=crowding)) == is_named


def test_a_process_that_shares_its_core_is_seen_to_wait_for_it():
    busy = [sys.executable, "-c", "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\nwhile 1: pass"]
    processes = [subprocess.Popen(busy) for _ in range(2)]
    try:
        pids = {rank: process.pid for rank, process in enumerate(processes)}
        wait_for(lambda: all(seconds > 0.1 for seconds in read_core_load(pids).queued_s.values()))
        wait_for(lambda: read_core_load(pids).runnable_per_core >= 2 / os.cpu_count())
    finally:
        for process in processes:
            process.kill()
            process.wait()
