"""What launchers write down."""

import json

import pytest
from runs.synthetic import empty_run

from shardwise.runs.events import launch_log
from shardwise.runs.failure import describe_failure


def events(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_node_has_a_file_of_its_own(tmp_path):
    run = empty_run(tmp_path / "run")
    for node in (0, 3):
        with launch_log(run, node) as log:
            log.attempt(0, {2: 70, 3: 71}, target="train.py", world_size=4, nodes=2)
    assert sorted(path.name for path in (run.path / "events").iterdir()) == ["launcher-3.jsonl", "launcher.jsonl"]
    [event] = events(run.launcher_events(3))
    assert (event["kind"], event["node"], event["ranks"], event["nproc"]) == ("attempt", 3, {"2": 70, "3": 71}, 2)


def test_end_of_a_rank_is_reported_by_its_message_or_by_its_exit_code(tmp_path):
    run = empty_run(tmp_path / "run")
    with launch_log(run) as log:
        log.exit(0, 1, stopped=False, failure=describe_failure(ValueError("no\nmore"), 0))
        log.exit(1, -9, stopped=False, failure=None)
        log.exit(2, 0, stopped=True, failure=None)
    messages = [event["words"] for event in events(run.launcher_events())]
    assert messages[0] == "ValueError: no"
    assert messages[1].startswith("SIGKILL")
    assert messages[2] == "exit code 0"


@pytest.mark.skipif("not __import__('os').path.exists('/dev/full')", reason="no /dev/full here")
def test_full_disk_does_not_end_a_launch(tmp_path):
    run = empty_run(tmp_path / "run")
    run.launcher_events().symlink_to("/dev/full")
    with launch_log(run) as log:
        log.verdict("rank 1 failed first")
