"""A run's files folded into one state."""

import itertools
import os
import shutil
import socket
import subprocess
import sys
import time

import msgspec
import pytest
from runs.synthetic import GIB, attempt_event, empty_run, large_run, start_event, steps_event, write

from refusals import refuses
from shardwise.monitor.server import increment
from shardwise.runs.events import machine_id
from shardwise.runs.recorder import Mark
from shardwise.runs.state import RunState, check_run


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    return large_run(tmp_path_factory.mktemp("large") / "run")


def seen(run):
    state = RunState(run)
    state.refresh_all()
    return state


def losses(state):
    return [(row[0], row[3]) for row in state.training.curves["loss"].rows()]


def trained(run, at=None):
    """Write a run of two ranks that has done six of ten steps."""
    at = at or time.time()
    write(
        run.events(0), start_event(at, 2, 10), steps_event(at, 0, [6.0, 5.0, 4.0]), steps_event(at, 3, [3.0, 2.0, 1.0])
    )
    return run


def test_steps_of_rank_zero_are_the_curve_and_the_place(tmp_path):
    state = seen(trained(empty_run(tmp_path / "run")))
    status = state.status()
    assert losses(state) == [(1, 6.0), (2, 5.0), (3, 4.0), (4, 3.0), (5, 2.0), (6, 1.0)]
    assert (status.step, status.num_steps, status.loss, status.state) == (6, 10, 1.0, "running")
    assert (status.plan, status.samples_per_s) == ("shard2 (zero 3)", 192.0)
    assert status.eta_s == pytest.approx(4 / 3)
    assert [(rank.rank, rank.host, rank.device) for rank in status.ranks] == [
        (0, "node0", "cuda:0"),
        (1, "node0", "cuda:1"),
    ]


def test_a_listener_gets_every_event_with_its_writer_once(tmp_path):
    run, heard = trained(empty_run(tmp_path / "run")), []
    state = RunState(run, listener=lambda writer, event: heard.append((writer, event["kind"])), all_ranks=True)
    state.refresh_events()
    assert heard == [("rank0", "start"), ("rank0", "steps"), ("rank0", "steps")]
    write(run.launcher_events(), attempt_event(1.0, 2))
    write(run.events(1), steps_event(1.0, 0, [1.0]))
    state.refresh_all()
    assert sorted(heard[3:]) == [("launcher", "attempt"), ("rank1", "steps")]


def test_restart_replaces_the_steps_that_are_done_again_and_is_marked(tmp_path):
    run = trained(empty_run(tmp_path / "run"))
    write(run.events(0), start_event(time.time(), 2, 10), steps_event(time.time(), 4, [2.5, 1.5, 0.5]))
    state = seen(run)
    assert losses(state) == [(1, 6.0), (2, 5.0), (3, 4.0), (4, 3.0), (5, 2.5), (6, 1.5), (7, 0.5)]
    assert [mark.step for mark in state.status().restart_marks] == [4]


def test_view_is_the_same_however_the_file_came_in_pieces(tmp_path):
    whole = trained(empty_run(tmp_path / "whole"), at=5.0)
    content = whole.events(0).read_bytes()
    run = empty_run(tmp_path / "run")
    state = RunState(run)
    for start in range(0, len(content), 37):
        with run.events(0).open("ab") as file:
            file.write(content[start : start + 37])
        state.refresh()
    assert losses(state) == losses(seen(whole))
    assert state.status().step == 6


def test_run_that_is_started_anew_in_its_place_is_followed_from_its_start(tmp_path):
    run = trained(empty_run(tmp_path / "run"))
    state = seen(run)
    before = state.identity
    run.events(0).unlink()
    write(run.events(0), start_event(time.time(), 1, 3), steps_event(time.time(), 0, [9.0]))
    state.refresh_all()
    assert losses(state) == [(1, 9.0)]
    assert state.identity != before


@pytest.mark.parametrize("name", ["events", "logs", "errors", "recorder", "checkpoints"])
def test_folder_that_goes_away_meanwhile_ends_nothing(tmp_path, name):
    state = seen(trained(empty_run(tmp_path / "run")))
    shutil.rmtree(tmp_path / "run" / name, ignore_errors=True)
    state.refresh()
    assert state.status().step == 6


def test_events_of_another_version_are_passed_over(tmp_path):
    run = trained(empty_run(tmp_path / "run"))
    write(
        run.events(0),
        {"kind": "steps"},
        {"kind": "start", "at": "x"},
        {"kind": "save", "at": None},
        {"kind": "huh"},
        {"kind": "note"},
    )
    write(run.launcher_events(), {"kind": "attempt", "ranks": [3]}, {"kind": "exit"}, {"kind": "finish"})
    status = seen(run).status()
    assert (status.step, status.loss) == (6, 1.0)


def test_loss_that_is_nan_is_a_gap_and_is_reported(tmp_path):
    run = trained(empty_run(tmp_path / "run"))
    note = {"at": 1.0, "kind": "note", "text": "the loss of step 6 is nan"}
    write(run.events(0), steps_event(time.time(), 6, [None]), note)
    write(run.events(1), note)
    state = seen(run)
    assert losses(state)[-1] == (7, None)
    assert state.status().loss is None
    assert [entry.text for entry in state.history.since(0) if entry.kind == "note"] == [note["text"]]


def test_launcher_that_has_started_no_rank_yet_has_not_restarted_any(tmp_path):
    run = empty_run(tmp_path / "run")
    write(run.launcher_events(), {"at": time.time(), "kind": "note", "text": "waits for nodes"})
    assert seen(run).status().restarts == 0


def test_launcher_records_how_ranks_ended_and_why_the_run_failed(tmp_path):
    run = empty_run(tmp_path / "run")
    write(
        run.launcher_events(),
        attempt_event(1.0, 2),
        {"at": 2.0, "kind": "exit", "rank": 1, "code": -9, "stopped": False, "words": "SIGKILL"},
        {"at": 2.0, "kind": "exit", "rank": 0, "code": 1, "stopped": True, "words": "exit code 1"},
        {"at": 2.0, "kind": "restart", "number": 1, "most": 1, "cause": "rank 1 failed first: SIGKILL"},
        attempt_event(3.0, 2, number=1),
    )
    state = seen(run)
    assert state.status().restarts == 1
    assert {rank.state for rank in state.status().ranks} == {"running"}
    write(
        run.launcher_events(),
        {"at": 4.0, "kind": "exit", "rank": 0, "code": 1, "stopped": False, "words": "ValueError: no"},
        {"at": 4.0, "kind": "exit", "rank": 1, "code": 0, "stopped": False, "words": "exit code 0"},
        {"at": 4.0, "kind": "verdict", "text": "rank 0 failed first: ValueError: no"},
        {"at": 4.0, "kind": "finish", "state": "failed", "restarts": 1},
    )
    state.refresh_all()
    status = state.status()
    assert (status.state, status.verdict, status.job) == ("failed", "rank 0 failed first: ValueError: no", "train.py")
    assert [(rank.state, rank.message) for rank in status.ranks] == [("failed", "ValueError: no"), ("done", "")]
    assert state.is_over


def test_launchers_of_two_nodes_are_one_run(tmp_path):
    run = empty_run(tmp_path / "run")
    write(run.launcher_events(1), attempt_event(1.0, 2, world_size=4, ranks={"2": 7, "3": 8}, host="b", node=1))
    write(run.launcher_events(0), attempt_event(1.0, 2, world_size=4, host="a"))
    for node in (0, 1):
        write(run.launcher_events(node), {"at": 2.0 + node, "kind": "finish", "state": "finished", "restarts": 0})
    state = seen(run)
    ranks = state.status().ranks
    assert [(rank.rank, rank.host) for rank in ranks] == [(0, "a"), (1, "a"), (2, "b"), (3, "b")]
    assert [entry.kind for entry in state.history.since(0)].count("finish") == 1


def test_note_that_comes_again_later_is_reported_again(tmp_path):
    run = empty_run(tmp_path / "run")
    for rank, at in ((0, 1.0), (1, 1.5), (0, 900.0)):
        write(run.events(rank), {"at": at, "kind": "note", "text": "not saved: the disk is full"})
    assert [entry.at for entry in seen(run).history.since(0)] == [1.0, 900.0]


def test_run_whose_launcher_is_gone_is_lost(tmp_path):
    run = empty_run(tmp_path / "run")
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    write(run.launcher_events(), attempt_event(1.0, 1, host=socket.gethostname(), launcher=os.getpid()))
    assert seen(run).status().state == "running"
    write(run.launcher_events(), attempt_event(2.0, 1, host=socket.gethostname(), launcher=ended.pid))
    assert seen(run).status().state == "lost"
    elsewhere = {**attempt_event(2.5, 1, host=socket.gethostname(), launcher=ended.pid), "boot": "another"}
    write(run.launcher_events(), elsewhere)
    assert seen(run).status().state == "running"
    if machine_id():
        write(run.launcher_events(), {**elsewhere, "at": 2.7, "machine": machine_id()})
        assert seen(run).status().state == "lost"  # the same machine after a reboot
    killed = subprocess.Popen(["sleep", "60"])
    killed.kill()
    os.waitid(os.P_PID, killed.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
    write(run.launcher_events(), attempt_event(3.0, 1, host=socket.gethostname(), launcher=killed.pid))
    assert seen(run).status().state == "lost"
    killed.wait()


def test_failure_without_a_launcher_is_read_from_what_the_rank_left(tmp_path):
    run = trained(empty_run(tmp_path / "run"))
    failure = {"rank": 1, "host": "a", "at": 2.0, "kind": "ValueError", "message": "no\nmore", "traceback": "t"}
    run.error(1).write_bytes(msgspec.json.encode({**failure, "exit_code": 1, "peer_lost": False}))
    run.error(0).write_text("{torn")
    status = seen(run).status()
    assert (status.state, status.verdict, status.ranks[1].state) == ("failed", "ValueError: no", "failed")


def test_run_that_ended_and_one_that_is_silent_are_shown_as_such(tmp_path):
    run = trained(empty_run(tmp_path / "run"), at=1.0)
    assert seen(run).status().state == "silent"
    write(run.events(0), {"at": 2.0, "kind": "end", "steps": 10, "loss": 1.0})
    assert seen(run).status().state == "finished"


def test_checkpoints_show_which_are_on_disk(tmp_path):
    run = trained(empty_run(tmp_path / "run"))
    write(run.events(0), *({"at": 1.0, "kind": "save", "step": step, "stall_s": 0.1, "bytes": 1} for step in (2, 4)))
    (run.checkpoints / "step-00000004").mkdir(parents=True)
    (run.checkpoints / "step-00000004" / "manifest.json").write_text("{}")
    assert [(saved.step, saved.num_bytes) for saved in seen(run).status().checkpoints] == [(4, 2), (2, None)]


def test_memory_is_that_of_the_rank_that_needs_most(tmp_path):
    run = trained(empty_run(tmp_path / "run"))
    for rank, memory in ((0, 3 * GIB), (1, 5 * GIB)):
        write(run.events(rank), steps_event(time.time(), 6, [1.0], memory_bytes=memory))
    status = seen(run).status()
    assert (status.memory_rank, status.memory_bytes) == (1, 5 * GIB)
    assert [rank.memory_bytes for rank in status.ranks] == [3 * GIB, 5 * GIB]


def test_first_answer_of_64_ranks_and_100_000_steps_is_small_and_the_next_smaller(large):
    state = seen(large)
    first = increment(state, "")
    assert len(msgspec.json.encode(first)) < 400_000
    assert first.status.step == 100_000
    assert max(row[2] for row in first.curves["loss"].rows if row[0] > 1000) == 9.5  # one step among all
    assert [mark.step for mark in first.status.restart_marks] == [55_000]
    state.refresh()
    second = increment(state, first.cursor)
    assert not second.whole
    assert all(len(curve.rows) <= 1 for curve in second.curves.values())
    assert second.entries == []


def test_every_byte_of_a_large_run_is_read_once_and_only_the_end_of_most_files(large, monkeypatch):
    count, pread = itertools.count(), os.pread
    sizes = []

    def counted(*arguments):
        next(count)
        content = pread(*arguments)
        sizes.append(len(content))
        return content

    monkeypatch.setattr(os, "pread", counted)
    state = seen(large)
    whole = large.events(0).stat().st_size
    assert sum(sizes) < whole + 64 * (1 << 17)
    sizes.clear()
    state.refresh()
    assert sum(sizes) < 64 * 1024  # only the last mark of each rank


def test_increments_put_together_are_the_whole(tmp_path):
    run = empty_run(tmp_path / "run")
    write(run.events(0), start_event(1.0, 1, 6000))
    state, cursor, rows = RunState(run), "", []
    for first in range(0, 6000, 300):
        resumes = first == 3000
        start = first - 150 if resumes else first
        if resumes:
            write(run.events(0), start_event(1.0, 1, 6000))
        write(run.events(0), steps_event(1.0, start, [float(step % 77) for step in range(start, first + 300)]))
        state.refresh_all()
        found = increment(state, cursor)
        cursor = found.cursor
        rows[found.curves["loss"].start :] = found.curves["loss"].rows
    assert rows == state.training.curves["loss"].rows()
    assert len(rows) > 1000


@pytest.mark.parametrize(
    "cursor", ["x", "{}", "[]", '{"identity":1}', "null", '{"identity":"a","curves":{},"entries":0}']
)
def test_cursor_of_another_view_gets_everything(tmp_path, cursor):
    found = increment(seen(trained(empty_run(tmp_path / "run"))), cursor)
    assert found.whole
    assert len(found.curves["loss"].rows) == 6


def test_path_that_is_not_a_run_directory_is_refused_in_one_sentence(tmp_path):
    empty_run(tmp_path / "runs" / "a")
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    for name, refusal in (
        ("none", ("run.not-found",)),
        ("file", ("run.not-a-run", "is a file")),
        ("empty", ("run.not-a-run",)),
        ("runs", ("run.not-a-run", "runs/a")),
    ):
        with refuses(*refusal):
            check_run(tmp_path / name)
    check_run(tmp_path / "runs" / "a")


def test_metrics_learning_rate_and_logged_values_are_curves_that_a_restart_repeats(tmp_path):
    run = empty_run(tmp_path / "run")
    evaluation = {"at": 3.0, "kind": "evaluation", "epoch": 0, "values": {"loss": 2.0, "accuracy": 0.5}}
    write(
        run.events(0),
        start_event(1.0, 1, 4),
        {**evaluation, "step": 0},
        *({"at": 2.0, "kind": "log", "step": step, "values": {"rows": 8.0 * step}} for step in (1, 2, 3)),
        steps_event(2.0, 0, [3.0, 2.0, 1.0], lr=0.5),
        {**evaluation, "step": 3},
        start_event(4.0, 1, 4),  # resumed after step 2: step 3 is logged again, before its loss is published
        {"at": 5.0, "kind": "log", "step": 3, "values": {"rows": 7.0, "late": None}},
        steps_event(6.0, 2, [1.5], lr=0.25),
    )
    curves = {name: [(row[0], row[3]) for row in curve.rows()] for name, curve in seen(run).training.curves.items()}
    assert curves["log/rows"] == [(1, 8.0), (2, 16.0), (3, 7.0)]
    assert curves["evaluation"] == [(0, 2.0)]
    assert curves["evaluation/accuracy"] == [(0, 0.5)]
    assert curves["learning_rate"] == [(3, 0.25)]
    assert curves["loss"] == [(1, 3.0), (2, 2.0), (3, 1.5)]


def test_phase_inside_a_step_is_shown_with_the_step_it_leads_to():
    assert [Mark(0.0, phase, 4).shown_step for phase in ("forward", "data", "save", "end")] == [5, 5, 4, 4]
