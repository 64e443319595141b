"""The recorder ring: what was marked is read back, by another process, after a kill, and while it is written."""

import os
import subprocess
import sys
import time

import pytest

from shardwise.runs import RunDirectory, create_run
from shardwise.runs.recorder import CAPACITY, PHASES, Mark, Recorder, last_mark, read_recorder


@pytest.fixture
def path(tmp_path):
    return RunDirectory(tmp_path).recorder(3)


def named(marks):
    return [(mark.phase, mark.step) for mark in marks]


def test_marks_come_back_oldest_first_with_whose_they_are(path):
    recorder = Recorder(path)
    for step, phase in enumerate(PHASES):
        recorder.mark(phase, step)
    found = read_recorder(path)
    assert found.pid == os.getpid()
    assert found.host
    assert named(found.marks) == list(zip(PHASES, range(len(PHASES)), strict=True))
    assert [mark.at for mark in found.marks] == sorted(mark.at for mark in found.marks)
    assert last_mark(path) == found.marks[-1]


def test_a_full_ring_keeps_the_newest(path):
    recorder = Recorder(path)
    size = None
    for step in range(CAPACITY + 5):
        recorder.mark("forward", step)
        size = size or path.stat().st_size
    marks = read_recorder(path).marks
    assert [mark.step for mark in marks] == list(range(6, CAPACITY + 5))  # the oldest may be half overwritten
    assert last_mark(path).step == CAPACITY + 4
    assert path.stat().st_size == size


WRITER = """
import sys, time
from pathlib import Path
from shardwise.runs.recorder import CAPACITY, PHASES, Recorder
recorder, step = Recorder(Path(sys.argv[1])), 0
while True:
    recorder.mark(PHASES[step % len(PHASES)], step)
    step += 1
    if step > CAPACITY:
        time.sleep(0.0001)  # a lap must not be faster than a reader that has to wait for its core
"""


def test_marks_are_read_while_they_are_written_and_after_a_kill(path):
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)]) as writer:
        try:
            wait_until(lambda: (newest := last_mark(path)) is not None and newest.step > CAPACITY)
            for _ in range(30):
                marks = read_recorder(path).marks
                assert all(mark.phase == PHASES[mark.step % len(PHASES)] for mark in marks)
                assert [mark.step for mark in marks] == list(range(marks[0].step, marks[-1].step + 1))
                assert last_mark(path).step >= marks[-1].step
        finally:
            writer.kill()
    found = read_recorder(path)
    assert found.pid == writer.pid
    assert len(found.marks) == CAPACITY - 1


def wait_until(is_there):
    while not is_there():
        time.sleep(0.01)


@pytest.mark.parametrize("count", [2, CAPACITY - 1, CAPACITY, CAPACITY + 7])
def test_a_mark_that_is_half_there_is_left_out(path, count):
    recorder = Recorder(path)
    for step in range(count):
        recorder.mark("forward", step)
    before = read_recorder(path).marks
    recorder._words[recorder._next] = time.time_ns() + 10**9  # when it is marked, not yet what
    assert read_recorder(path).marks == before
    assert last_mark(path).step == count - 1


def test_a_new_recorder_begins_anew_and_leaves_the_old_one_to_its_readers(path):
    first = Recorder(path)
    first.mark("forward", 1)
    with path.open("rb") as reader:
        second = Recorder(path)
        second.mark("start", 0)
        first.mark("backward", 1)
        assert named(read_recorder(path).marks) == [("start", 0)]
        assert reader.read(8) == path.read_bytes()[:8]
    first.close()
    second.close()


@pytest.mark.parametrize(
    "content", [None, b"", b"SWRING01", b"x" * 4096], ids=["absent", "empty", "truncated", "foreign"]
)
def test_a_file_that_is_not_a_ring_is_empty(path, content):
    if content is not None:
        path.parent.mkdir(parents=True)
        path.write_bytes(content)
    assert read_recorder(path) is None
    assert last_mark(path) is None


def test_a_ring_without_marks_has_a_writer_and_no_last_mark(path):
    Recorder(path).close()
    assert read_recorder(path).marks == ()
    assert last_mark(path) is None


def test_a_mark_is_a_plain_tuple(path):
    recorder = Recorder(path)
    recorder.mark("save", 12)
    at, phase, step = read_recorder(path).marks[0]
    assert Mark(at, phase, step) == (at, "save", 12)


def test_a_refused_run_leaves_no_recorder(tmp_path):
    run = create_run(tmp_path / "run", "refused")
    Recorder(run.recorder(0)).close()
    run.remove()
    assert not run.path.exists()
