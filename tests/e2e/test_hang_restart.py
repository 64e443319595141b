"""A hang that is stopped counts as a failure: with restarts left, all ranks start again, and a training resumes."""

import json

import pytest

from e2e.processes import shardwise

STOP = ["--hang-after", "2", "--on-hang", "stop", "--run-dir", "run"]
SCRIPT = """
import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 1 and int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < {hangs}: time.sleep(1000)
dist.all_reduce(torch.ones(1))
print("done", os.environ["TORCHELASTIC_RESTART_COUNT"])
"""
JOB = """
import os, time, torch
import shardwise as sw

def hang_once(context):
    if context.step == 6 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        time.sleep(1000)

job = sw.Job(
    model=lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)),
    data=sw.datasets.digits, loss=sw.losses.cross_entropy, optimizer=sw.adamw(lr=1e-2),
    batch_size=128, steps=12, on_step=hang_once,
)
"""


def run(folder, *argv):
    """Run a command of shardwise; return its exit code, what it printed, and what it recorded."""
    done = shardwise(folder, *argv, OMP_NUM_THREADS="1")
    lines = (folder / "run" / "events" / "launcher.jsonl").read_text().splitlines()
    return done.returncode, done.stdout + done.stderr, [json.loads(line) for line in lines]


def test_ranks_that_hang_once_are_started_again_and_finish(tmp_path):
    (tmp_path / "once.py").write_text(SCRIPT.format(hangs=1))
    code, shown, events = run(tmp_path, "launch", "--nproc", "2", "--max-restarts", "1", *STOP, "once.py")
    assert code == 0, shown
    assert shown.count("done 1") == 2
    assert "the guard stopped the ranks; restart 1 of 1" in shown
    [restart] = [event for event in events if event["kind"] == "restart"]
    assert "rank 0 waits in all_reduce #1" in restart["cause"]


@pytest.mark.prove
def test_ranks_that_hang_each_time_fail_with_the_verdict_when_restarts_are_used_up(tmp_path):
    (tmp_path / "always.py").write_text(SCRIPT.format(hangs=9))
    code, shown, events = run(tmp_path, "launch", "--nproc", "2", "--max-restarts", "1", *STOP, "always.py")
    assert code == 1, shown
    assert shown.count("done") == 0
    assert len([event for event in events if event["kind"] == "verdict" and "rank 1 is at" in event["text"]]) >= 2
    assert shown.splitlines()[-1].startswith("shardwise: the run is in")
    assert "so all ranks were stopped" in shown.splitlines()[-2]


@pytest.mark.prove
def test_a_training_that_hung_resumes_from_its_checkpoint(tmp_path):
    (tmp_path / "job.py").write_text(JOB)
    how = ["--nproc", "2", "--device", "cpu", "--plan", "ddp", "--max-restarts", "1", "--save-every", "2", *STOP]
    code, shown, _ = run(tmp_path, "train", "job.py", *how)
    assert code == 0, shown
    assert "the guard stopped the ranks; restart 1 of 1" in shown
    events = [json.loads(line) for line in (tmp_path / "run" / "events" / "rank0.jsonl").read_text().splitlines()]
    begun = [event for event in events if event["kind"] == "start"]
    firsts = [event["first"] for event in events if event["kind"] == "steps"]
    assert len(begun) == 2
    assert 4 in firsts or 2 in firsts, firsts
    assert events[-1]["steps"] == 12
