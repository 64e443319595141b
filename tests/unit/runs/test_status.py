"""Who is behind, and many ranks in few rows."""

import pytest
from runs.synthetic import empty_run, record

from shardwise.monitor.terminal import fold_ranks
from shardwise.runs.console import rank_spans
from shardwise.runs.recorder import Mark
from shardwise.runs.status import RankRow, RankTable, lag_s

LEADER = [
    Mark(10.0, "data", 3),
    Mark(11.0, "forward", 3),
    Mark(12.0, "backward", 3),
    Mark(13.0, "forward", 3),  # of the second micro-batch
    Mark(14.0, "backward", 3),
    Mark(15.0, "optimizer", 3),
    Mark(16.0, "data", 4),
    Mark(17.0, "forward", 4),
]


@pytest.mark.parametrize(
    ("mark", "behind"),
    [
        (Mark(17.5, "forward", 4), 0.0),  # as far as the leader
        (Mark(19.0, "backward", 4), 0.0),  # further
        (Mark(16.5, "data", 4), 3.0),  # the leader left data at 17
        (Mark(14.5, "backward", 3), 5.0),  # and backward, the last time, at 15
        (Mark(10.5, "data", 3), 9.0),
        (Mark(1.0, "end", 1), 10.0),  # longer than its record
    ],
)
def test_lag_is_the_time_since_the_leader_went_further(mark, behind):
    assert lag_s(mark, LEADER, now=20.0) == behind


def test_rank_that_waits_for_its_data_is_behind_those_that_do_not(tmp_path):
    run = empty_run(tmp_path / "run")
    for rank in range(4):
        record(run, rank, step=7, late=rank == 2)
    ranks = RankTable(run)
    ranks.refresh(range(4))
    found = [ranks.status(rank, {}, None, now=ranks.newest + 2.0, state="running") for rank in range(4)]
    assert [rank.phase for rank in found] == ["backward", "backward", "data", "backward"]
    assert found[2].lag_s > 2.0
    assert [rank.lag_s for rank in found if rank.rank != 2] == [0.0] * 3
    assert {rank.lag_steps for rank in found} == {0}


def status(rank, **fields):
    return RankRow(rank=rank, **{"phase": "backward", "step": 9, "lag_s": 0.0, "lag_steps": 0, **fields})


def test_ranks_that_fit_have_a_row_each():
    rows = fold_ranks([status(rank) for rank in range(4)], most=4)
    assert [row.ranks for row in rows] == [(0,), (1,), (2,), (3,)]


def test_ranks_that_do_not_fit_are_folded_with_the_worst_first():
    ranks = [status(rank, host=f"node{rank // 8}", memory_bytes=float(rank)) for rank in range(64)]
    ranks[13] = status(13, phase="data", lag_s=3.0)
    ranks[40] = status(40, step=7, lag_s=2.0, lag_steps=2)
    ranks[5] = status(5, state="failed", message="SIGKILL")
    rows = fold_ranks(ranks, most=10)
    assert [row.ranks for row in rows[:3]] == [(5,), (40,), (13,)]
    assert rank_spans(rows[3].ranks) == "0-4, 6-12, 14-39, 41-63"
    assert (rows[3].host, rows[3].memory_bytes) == ("8 hosts", 63.0)


def test_rows_that_still_do_not_fit_are_counted():
    rows = fold_ranks([status(rank, step=rank, lag_steps=63 - rank) for rank in range(64)], most=5)
    assert len(rows) == 5
    assert [row.ranks for row in rows[:4]] == [(0,), (1,), (2,), (3,)]
    assert rows[4].label == "60 more"
