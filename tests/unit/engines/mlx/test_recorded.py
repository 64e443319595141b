"""Steps of MLX in the record of calls: issued when begun, waited for where somebody waits, left when done."""

import pytest

from shardwise.engines.mlx import step as mlx_step
from shardwise.runs.call_reader import CallReader
from shardwise.runs.calls import CallRing


@pytest.fixture
def done(monkeypatch):
    """Have the module compute nothing, and return the calls that reach it; what wraps it is undone."""
    calls = []
    monkeypatch.setattr(mlx_step, "begin", lambda step, *_: calls.append(("begin", step)))
    monkeypatch.setattr(mlx_step, "finish", lambda step, _: calls.append(("finish", step)))
    return calls


def recorded(path, world_size=2):
    """Record the module, and return a reader of the record."""
    mlx_step.record(CallRing(path), world_size)
    return CallReader(path)


def test_a_step_is_a_call_of_all_ranks_with_its_number_from_one(tmp_path, done):
    reader = recorded(tmp_path / "calls", world_size=3)
    mlx_step.begin(7, "array")
    (call,) = reader.refresh()
    assert (call.what.name, call.sequence, call.group.members) == ("the sums of step", 8, (0, 1, 2))
    assert done == [("begin", 7)]


def test_a_step_that_is_waited_for_is_left_once(tmp_path, done):
    reader = recorded(tmp_path / "calls")
    mlx_step.begin(0, "array")
    mlx_step.finish(0, "array")
    mlx_step.finish(0, "array")
    assert done == [("begin", 0), ("finish", 0), ("finish", 0)]
    (call,) = reader.refresh()
    assert call.left >= call.waited > call.entered > 0


def test_one_rank_is_not_recorded(tmp_path, done):
    reader = recorded(tmp_path / "calls", world_size=1)
    mlx_step.begin(0, "array")
    assert reader.refresh() == []
    assert done == [("begin", 0)]
