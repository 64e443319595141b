"""Steps of MLX in the record of calls: issued when begun, waited for where somebody waits, left when done."""

from types import SimpleNamespace

from shardwise.recorder.start import record_steps
from shardwise.runs.call_reader import CallReader
from shardwise.runs.calls import CallRing


def recorded(path, world_size=2):
    """Return a module of waits that is recorded, what it did, and a reader of the record."""
    done = []
    waits = SimpleNamespace(
        begin=lambda step, *_: done.append(("begin", step)), finish=lambda step, _: done.append(("finish", step))
    )
    record_steps(CallRing(path), world_size, waits)
    return waits, done, CallReader(path)


def test_a_step_is_a_call_of_all_ranks_with_its_number_from_one(tmp_path):
    waits, done, reader = recorded(tmp_path / "calls", world_size=3)
    waits.begin(7, "array")
    (call,) = reader.refresh()
    assert (call.what.name, call.sequence, call.group.members) == ("the sums of step", 8, (0, 1, 2))
    assert done == [("begin", 7)]


def test_a_step_that_is_waited_for_is_left_once(tmp_path):
    waits, done, reader = recorded(tmp_path / "calls")
    waits.begin(0, "array")
    waits.finish(0, "array")
    waits.finish(0, "array")
    assert done == [("begin", 0), ("finish", 0), ("finish", 0)]
    (call,) = reader.refresh()
    assert call.left >= call.waited > call.entered > 0


def test_one_rank_is_not_recorded(tmp_path):
    waits, _, reader = recorded(tmp_path / "calls", world_size=1)
    waits.begin(0, "array")
    assert reader.refresh() == []
