"""Torch's flight recorder, as we read it: gloo's for real, NCCL's as torch writes it."""

import pickle
import subprocess
import sys
import threading

import pytest
import torch
from torch._C import _distributed_c10d as c10d

from e2e.processes import wait_for
from shardwise.recorder import flight
from shardwise.recorder.flight import FlightThread
from shardwise.runs.call_reader import CallReader
from shardwise.runs.calls import CallRing, GroupKey
from shardwise.testing import run_ranks

WORLD = GroupKey("0", 0, (0, 1))
NUMBER = 98_765
"""Of a collective, as no group of another test has made so many."""


@pytest.fixture(autouse=True)
def _without_groups_of_earlier_tests(monkeypatch):
    """Hide what this process recorded before: a ring has slots for 16 groups, the first that it finds."""
    before, dump = set(flight._status()), flight._dump
    monkeypatch.setattr(
        flight, "_dump", lambda *, stacks: [entry for entry in dump(stacks=stacks) if entry["pg_id"] not in before]
    )


def test_a_collective_of_c_that_hangs_is_copied_with_its_line(tmp_path):
    seen = tmp_path / "seen"

    def body(world):
        path = tmp_path / f"{world.rank}.calls"
        ring, reader = CallRing(path), CallReader(path)
        thread = FlightThread(ring, lambda _name: ring.intern(WORLD))

        def look():
            thread._read_counters()
            reader.refresh()
            return list(reader.flights())

        # Groups of tests before this one are in the record of a forked rank, too: nothing happens in them any more.
        before = [flight.enqueued for flight in look()]
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
        loss = model(torch.ones(2, 4)).sum()

        def used():
            now = look()
            known = [*before, *[None] * (len(now) - len(before))]
            return [flight for flight, then in zip(now, known, strict=True) if flight.enqueued != then]

        if world.rank == 1:
            wait_for(seen.exists)
            [found] = used()
            loss.backward()
            return found
        backward = threading.Thread(target=loss.backward)
        backward.start()
        # Those before it are over, yet gloo's threads may not have reported to the recorder so far.
        [found] = wait_for(lambda: [f for f in used() if f.pending is not None and f.pending.sequence == f.enqueued])
        seen.touch()
        backward.join()
        return found

    zero, one = run_ranks(body, 2)
    assert zero.pending.what.name == "all_reduce"
    # Of two that ended on two threads the recorder counts the last one reported, which may be the earlier.
    assert zero.completed < zero.enqueued == one.enqueued + 1
    assert one.pending is None


def test_looking_at_what_is_stuck_imports_no_compiler(tmp_path):
    script = f"""
import sys, torch, torch.distributed as dist
from shardwise.recorder.flight import FlightThread
from shardwise.runs.calls import CallRing
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.zeros(1))
thread = FlightThread(CallRing(__import__("pathlib").Path({str(tmp_path / "a.calls")!r})), lambda _name: 0)
thread._copy_stuck({{}})
print("torch._inductor" in sys.modules)
dist.destroy_process_group()  # gloo's threads may abort a process that ends while they run
"""
    assert (
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "False\n"
    )


@pytest.fixture
def nccl(monkeypatch):
    """A recorder of NCCL with one collective that is not done."""
    entry = {"pg_id": 0, "process_group": ("0", "default_pg"), "collective_seq_id": NUMBER, "retired": False}
    entry |= {
        "profiling_name": "nccl:all_reduce",
        "time_created_ns": 1,
        "input_sizes": [[4]],
        "input_dtypes": ["Float"],
    }
    status = {
        "0": {
            "last_enqueued_collective": NUMBER,
            "last_started_collective": NUMBER,
            "last_completed_collective": NUMBER - 1,
        }
    }

    def dump(entries, _stacks, _active):
        found = {"version": "2.10", "pg_status": status}
        return pickle.dumps({**found, "entries": [{**entry, "is_p2p": False, "frames": []}]} if entries else found)

    monkeypatch.setattr(c10d, "_dump_nccl_trace", dump, raising=False)


def test_groups_of_nccl_are_followed_beside_the_others(tmp_path, nccl):
    ring = CallRing(tmp_path / "a.calls")
    thread = FlightThread(ring, lambda _name: ring.intern(WORLD))
    thread._read_counters()
    thread._read_counters()
    reader = CallReader(tmp_path / "a.calls")
    reader.refresh()
    [found] = [flight for flight in reader.flights() if flight.enqueued == NUMBER]
    assert (found.completed, found.pending.sequence, found.pending.what.text) == (NUMBER - 1, NUMBER, "float32[4]")


def test_a_rank_that_ends_leaves_no_collective_behind_in_which_it_seems_to_wait(tmp_path, nccl):
    ring = CallRing(tmp_path / "a.calls")
    thread = FlightThread(ring, lambda _name: ring.intern(WORLD))
    thread._read_counters()
    thread._read_counters()
    thread._end()
    reader = CallReader(tmp_path / "a.calls")
    reader.refresh()
    assert [flight.pending for flight in reader.flights() if flight.enqueued == NUMBER] == [None]


def test_a_group_of_nobody_is_not_looked_for_at_every_look(tmp_path, nccl, monkeypatch):
    looks = []
    real = flight._dump
    monkeypatch.setattr(flight, "_dump", lambda **how: looks.append(how) or real(**how))
    thread = FlightThread(CallRing(tmp_path / "a.calls"), lambda _name: 0)
    for _ in range(20):
        thread._read_counters()
    assert len(looks) == 1


def test_collectives_that_ended_out_of_order_are_looked_through_once(tmp_path, nccl, monkeypatch):
    looks = []
    real = flight._dump
    monkeypatch.setattr(
        flight,
        "_dump",
        lambda *, stacks: looks.append(stacks) or [{**one, "retired": True} for one in real(stacks=stacks)],
    )
    ring = CallRing(tmp_path / "a.calls")
    thread = FlightThread(ring, lambda _name: ring.intern(WORLD))
    for _ in range(20):
        thread._read_counters()
    assert len(looks) == 2  # one to learn of the group, one to look for what is not done


def test_groups_that_were_destroyed_leave_their_slots_to_newer_ones_of_the_same_name(tmp_path):
    def entry(number, name):
        return {"pg_id": number, "process_group": [name, ""]}

    ring = CallRing(tmp_path / "a.calls")
    places = {name: ring.intern(WORLD) + index for index, name in enumerate(["0", "1"])}
    thread = FlightThread(ring, lambda name: places.get(name, 0))
    thread._learn([*(entry(number, "0") for number in range(20)), entry(20, "1"), entry(21, "of nobody")])
    assert thread._slots == {"19": (0, places["0"]), "20": (1, places["1"])}
    thread._learn([entry(22, "0")])
    assert thread._slots == {"22": (0, places["0"]), "20": (1, places["1"])}


def test_another_version_ends_the_thread_and_nothing_else(tmp_path, monkeypatch):
    dump = pickle.dumps({"version": "3.0", "pg_status": {}})
    monkeypatch.setattr(c10d, "_dump_fr_trace", lambda *_: dump)
    monkeypatch.setattr(flight, "_INTERVAL_S", 0.01)
    thread = FlightThread(CallRing(tmp_path / "a.calls"), lambda _name: 0)
    thread.start()
    thread._thread.join(10)
    assert not thread._thread.is_alive()
