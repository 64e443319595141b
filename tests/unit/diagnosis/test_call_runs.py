"""Calls between nodes: few bytes, sent once by node, and the same when they arrive."""

import msgspec
from diagnosis.collectives import WORLD, call

from shardwise.diagnosis.guard.peers import CallReporters, CallRun, pack

STEP = [call(number, site=f"/x/train.py:{number % 3}") for number in range(5, 605)]


def test_runs_arrive_as_the_calls_that_were_packed():
    [run] = pack(2, STEP)
    assert msgspec.json.decode(msgspec.json.encode(run), type=CallRun).calls() == STEP


def test_a_call_that_repeats_costs_two_bytes():
    [run] = pack(2, STEP)
    assert len(msgspec.json.encode(run)) < 2 * len(STEP) + 400


def test_missing_numbers_and_other_channels_begin_new_runs():
    calls = [call(1), call(1, channel="0>1:0"), call(2), call(9)]
    assert [(run.first, len(run.order)) for run in pack(0, calls)] == [(1, 2), (1, 1), (9, 1)]


def test_one_rank_of_a_node_reports_a_channel():
    leads = CallReporters()
    assert [run.rank for run in leads.runs({2: [call(1)], 3: [call(1)]})] == [2]
    assert [run.rank for run in leads.runs({2: [], 3: [call(2)]})] == []


def test_calls_inside_a_node_are_not_reported():
    inside = call(1, group=WORLD, channel="2>3:0", peer=3)
    across = call(1, group=WORLD, channel="2>1:0", peer=1)
    assert [run.kinds[0][0].peer for run in CallReporters().runs({2: [inside, across], 3: []})] == [1]
