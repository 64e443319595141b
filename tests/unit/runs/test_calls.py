"""The record of calls: what was written is read, by another process, at any time."""

import os
import signal

from shardwise.runs import calls
from shardwise.runs.call_reader import UNKNOWN, CallReader
from shardwise.runs.calls import CallRing, GroupKey, Operation, pack

WORLD = GroupKey("0", 0, (0, 1))
SUM = Operation("all_reduce", "", "sum float32*4", "sum, float32[4]")


def issue(ring, sequence=1, what=SUM, site="train.py:8"):
    return ring.issue(sequence, pack(ring.intern(WORLD), ring.intern(what), ring.intern(site)))


def test_a_call_is_read_as_it_was_written(tmp_path):
    ring = CallRing(tmp_path / "a.calls")
    ring.leave(issue(ring))
    [call] = CallReader(tmp_path / "a.calls").refresh()
    assert (call.group, call.sequence, call.what, call.site) == (WORLD, 1, SUM, "train.py:8")
    assert 0 < call.entered <= call.left


def test_a_call_is_waited_for_from_its_issue_until_it_is_released_and_again_from_its_wait(tmp_path):
    ring = CallRing(tmp_path / "a.calls")
    reader = CallReader(tmp_path / "a.calls")
    number = issue(ring)

    def waits():
        reader.refresh()
        return len(reader.waits)

    states = [waits()]
    for step in (ring.release, ring.wait, ring.leave):
        step(number)
        states.append(waits())
    assert states == [1, 0, 1, 0]


def test_a_reader_returns_each_call_once(tmp_path):
    ring = CallRing(tmp_path / "a.calls")
    reader = CallReader(tmp_path / "a.calls")
    issue(ring, 1)
    assert [call.sequence for call in reader.refresh()] == [1]
    issue(ring, 2)
    assert [call.sequence for call in reader.refresh()] == [2]
    assert reader.last[WORLD, ""].sequence == 2


def test_a_ring_that_was_lapped_keeps_the_newest_calls(tmp_path):
    ring = CallRing(tmp_path / "a.calls")
    for sequence in range(1, calls.CAPACITY + 100):
        ring.leave(issue(ring, sequence))
    found = [call.sequence for call in CallReader(tmp_path / "a.calls").refresh()]
    assert found[-1] == calls.CAPACITY + 99
    assert found == list(range(found[0], found[-1] + 1))
    assert len(found) > calls.CAPACITY - 100


def test_a_call_that_was_overwritten_cannot_be_left(tmp_path):
    ring = CallRing(tmp_path / "a.calls")
    old = issue(ring, 1)
    for sequence in range(2, calls.CAPACITY + 2):
        issue(ring, sequence)
    ring.leave(old)
    assert all(not call.left for call in CallReader(tmp_path / "a.calls").refresh())


def test_a_cancelled_call_is_not_read(tmp_path):
    ring = CallRing(tmp_path / "a.calls")
    ring.cancel(issue(ring))
    assert CallReader(tmp_path / "a.calls").refresh() == []


def test_what_exceeds_the_table_is_unknown_and_the_rest_is_kept(tmp_path):
    ring = CallRing(tmp_path / "a.calls")
    issue(ring, 1)
    large = Operation("x" * calls.TABLE_BYTES, "", "", "")
    ring.issue(2, pack(ring.intern(WORLD), ring.intern(large), 0))
    first, second = CallReader(tmp_path / "a.calls").refresh()
    assert first.what == SUM
    assert second.what == UNKNOWN


def test_the_record_of_a_process_that_was_killed_is_whole(tmp_path):
    path = tmp_path / "a.calls"
    pid = os.fork()
    if pid == 0:
        ring = CallRing(path)
        issue(ring, 7)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    reader = CallReader(path)
    [call] = reader.refresh()
    assert call.sequence == 7
    assert reader.header(calls.PID) == pid


def test_a_fork_of_the_rank_writes_nothing_into_its_record(tmp_path):
    path = tmp_path / "a.calls"
    ring = CallRing(path)
    pid = os.fork()
    if pid == 0:
        ring.detach()
        ring.leave(issue(ring))
        ring.begin_data()
        os._exit(0)
    os.waitpid(pid, 0)
    assert CallReader(path).refresh() == []
    assert CallReader(path).header(calls.DATA_SINCE) == 0


def test_a_restarted_rank_is_read_from_its_new_ring(tmp_path):
    path = tmp_path / "a.calls"
    reader = CallReader(path)
    assert reader.refresh() == []
    issue(CallRing(path), 5)
    assert [call.sequence for call in reader.refresh()] == [5]
    issue(CallRing(path), 1)
    assert [call.sequence for call in reader.refresh()] == [1]
    assert reader.last[WORLD, ""].sequence == 1


def test_a_file_that_is_not_a_record_is_empty(tmp_path):
    path = tmp_path / "a.calls"
    path.write_bytes(b"not a record")
    assert CallReader(path).refresh() == []
    path.write_bytes(bytes(calls.WORDS * 8))
    assert CallReader(path).refresh() == []


def test_flights_and_arrivals_are_read_by_group(tmp_path):
    ring = CallRing(tmp_path / "a.calls")
    group = ring.intern(WORLD)
    ring.fly(3, group, 9, 8, (ring.intern(SUM), ring.intern("train.py:9"), 9, 1_000_000_000))
    ring.arrive(0, 9, pack(group, ring.intern(SUM), 0), 2_000_000_000)
    reader = CallReader(tmp_path / "a.calls")
    reader.refresh()
    [flight] = reader.flights()
    assert (flight.enqueued, flight.completed) == (9, 8)
    assert (flight.pending.sequence, flight.pending.site, flight.pending.waited) == (9, "train.py:9", 1.0)
    [arrival] = reader.arrivals()
    assert (arrival.group, arrival.sequence, arrival.entered) == (WORLD, 9, 2.0)
