import math
import pickle

import msgspec
import pytest

from refusals import refuses
from shardwise.errors import JobError, nearest
from shardwise.runs import EventLog, Tail, create_run
from shardwise.runs.console import describe_exit
from shardwise.runs.failure import describe_failure, read_failure, write_failure


def test_events_are_readable_during_the_run(tmp_path):
    log, tail = EventLog(tmp_path / "events.jsonl"), Tail(tmp_path / "events.jsonl")
    log.write("steps", losses=[1.0, math.nan])
    (event,) = tail.events()
    assert event["losses"] == [1.0, None]
    log.write("end")
    log.close()
    assert [event["kind"] for event in tail.events()] == ["end"]


def test_tail_waits_for_a_file_and_for_whole_lines(tmp_path):
    path = tmp_path / "log"
    tail = Tail(path)
    assert list(tail.lines()) == []
    path.write_text("one\ntw")
    assert list(tail.lines()) == [b"one"]
    with path.open("a") as file:
        file.write("o\n")
    assert list(tail.lines()) == [b"two"]


def test_two_runs_in_one_second_get_two_directories(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert create_run(None, "job").path != create_run(None, "job").path


def test_run_directory_in_use_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with refuses("run.directory-not-empty"):
        create_run(tmp_path, "job")


def test_run_directory_of_a_submitted_job_is_continued(tmp_path):
    run = create_run(tmp_path / "run", "job")
    run.batch_script.write_text("#!/bin/bash")
    assert create_run(run.path, "job").path == run.path


def test_requeued_job_continues_in_the_run_directory_that_it_names(tmp_path, monkeypatch):
    path = create_run(tmp_path / "run", "job").path
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert create_run(path, "job").path == path


def test_failure_round_trips_with_its_exit_code_and_its_code(tmp_path):
    failure = describe_failure(JobError("bad", code="job.not-a-job", fix="mend"), 3)
    write_failure(tmp_path / "e.json", failure)
    assert read_failure(tmp_path / "e.json") == failure
    assert (failure.exit_code, failure.message, failure.code) == (2, "bad: mend", "job.not-a-job")
    assert read_failure(tmp_path / "none.json") is None


def test_failure_of_an_earlier_version_has_no_code(tmp_path):
    written = msgspec.to_builtins(describe_failure(ValueError("bad"), 3))
    del written["code"]
    (tmp_path / "e.json").write_bytes(msgspec.json.encode(written))
    assert read_failure(tmp_path / "e.json").code == ""


def test_errors_survive_pickling():
    error = pickle.loads(pickle.dumps(JobError("fact", code="job.not-a-job", fix="fix")))
    assert (type(error), str(error), error.code) == (JobError, "fact: fix", "job.not-a-job")


@pytest.mark.parametrize(
    ("code", "expected"), [(0, "exit code 0"), (-9, "host memory"), (-7, "/dev/shm"), (-11, "SIGSEGV"), (-200, "200")]
)
def test_exit_codes_have_descriptions(code, expected):
    assert expected in describe_exit(code)


def test_nearest_names_one_choice_or_all():
    assert nearest("epoch", ["epochs", "steps"]) == "did you mean 'epochs'?"
    assert nearest("zzz", ["epochs", "steps"]) == "choose one of epochs, steps"


def test_event_file_is_plain_json_lines(tmp_path):
    log = EventLog(tmp_path / "e.jsonl")
    log.write("note", text="hello")
    log.close()
    assert msgspec.json.decode((tmp_path / "e.jsonl").read_bytes().splitlines()[0])["text"] == "hello"
