"""`shardwise train` from end to end, as a user sees it: success, failure, interruption, other launchers."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest
import torch

from e2e.processes import alive, shardwise, wait_for

JOB = """
import os, signal, time, torch
import shardwise as sw

def misbehave(context):
    if context.step == 3 and os.environ.get("RANK", "0") == "1":
        {how}

job = sw.Job(
    model=lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)),
    data=sw.datasets.digits, loss=sw.losses.cross_entropy, optimizer=sw.adamw(lr=1e-2),
    metrics={{"accuracy": sw.metrics.accuracy}}, batch_size=128, epochs={epochs}, on_step=misbehave,
)
print("hello from the job file")
"""

TRAIN = [sys.executable, "-m", "shardwise", "train", "job.py"]


def write_job(folder, how="pass", epochs=2):
    (folder / "job.py").write_text(JOB.format(how=how, epochs=epochs))


def run(folder, command):
    return subprocess.run(
        command,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def train(folder, *arguments):
    return shardwise(folder, "train", "job.py", *arguments, OMP_NUM_THREADS="1")


def started_ranks(folder):
    """The pids that rank 0 announced in its start event, once it has trained a little."""
    for path in folder.glob("runs/*/events/rank0.jsonl"):
        events = [json.loads(line) for line in path.read_text().splitlines()[:2]]
        if len(events) == 2:
            return [rank["pid"] for rank in events[0]["ranks"]]
    return None


def test_two_processes_train_evaluate_and_report(tmp_path):
    write_job(tmp_path, epochs=20)
    done = train(tmp_path, "--nproc", "2", "--run-dir", "out")
    assert done.returncode == 0, done.stderr
    assert float(re.search(r"test accuracy\s+([0-9.]+)%", done.stdout)[1]) > 85
    assert "run directory   out" in done.stdout
    assert "hello from the job file" in done.stderr
    assert "128 = micro-batch 64 x accumulation 1 x dp 2" in done.stderr
    assert re.search(r"step 240/240 .* loss", done.stderr)
    out = tmp_path / "out"
    assert {path.name for path in out.iterdir()} == {
        "job.json", "plan.toml", "start.json", "timeline.json", "events", "recorder", "logs", "errors",
        "report.json", "report.md", "weights.pt", "environment.json",
    }  # fmt: skip
    assert [phase["name"] for phase in json.loads((out / "timeline.json").read_text())] == [
        "process", "import", "job", "world", "model and data", "first step",
    ]  # fmt: skip
    weights = torch.load(out / "weights.pt", weights_only=True)
    assert weights["1.weight"].shape == (10, 64)
    again = train(tmp_path, "--nproc", "2", "--plan", "out/plan.toml", "--set", "epochs=1")
    assert again.returncode == 0, again.stderr


def test_traceback_of_the_failing_rank_is_shown_last(tmp_path):
    write_job(tmp_path, how='raise ValueError("rank one is tired")')
    done = train(tmp_path, "--nproc", "2")
    assert done.returncode == 1
    *_, cause, where = done.stderr.strip().splitlines()
    assert cause.startswith("rank 1 failed first: ValueError: rank one is tired")
    assert "job.py" in done.stderr
    assert where.startswith("shardwise: the run is in runs/")
    (error,) = tmp_path.glob("runs/*/errors/rank1.json")
    assert "rank one is tired" in json.loads(error.read_text())["traceback"]


def test_bad_input_after_the_first_step_keeps_the_run(tmp_path):
    write_job(tmp_path, how='raise sw.ShardwiseError.__subclasses__()[0]("too late")', epochs=200)
    (tmp_path / "mine").mkdir()
    done = train(tmp_path, "--nproc", "2", "--run-dir", "mine/run")
    assert "too late" in done.stderr
    assert (tmp_path / "mine" / "run" / "plan.toml").exists()


@pytest.mark.prove
def test_killed_rank_is_named_and_not_the_one_that_noticed(tmp_path):
    write_job(tmp_path, how="os.kill(os.getpid(), signal.SIGKILL)")
    done = train(tmp_path, "--nproc", "2")
    assert done.returncode == 1
    assert "rank 1 failed first: SIGKILL" in done.stderr.strip().splitlines()[-2]


@pytest.mark.representative("9--9")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75), (signal.SIGKILL, -9)])
def test_no_rank_outlives_its_launcher(tmp_path, number, code):
    write_job(tmp_path, epochs=100_000)
    launcher = subprocess.Popen([*TRAIN, "--nproc", "2"], cwd=tmp_path, stderr=subprocess.DEVNULL)
    try:
        pids = wait_for(lambda: started_ranks(tmp_path), seconds=120)
        launcher.send_signal(number)
        assert launcher.wait(60) == code
        wait_for(lambda: not any(map(alive, pids)), seconds=60)
    finally:
        launcher.kill()


@pytest.mark.parametrize("launcher", ["launch", pytest.param("torchrun", marks=pytest.mark.prove)])
def test_train_joins_a_world_that_another_launcher_started(tmp_path, launcher):
    write_job(tmp_path)
    joining = ["--nproc_per_node=2", "-m", "shardwise", "train", "job.py"]
    if launcher == "launch":  # with the variables of torchrun: test_launch compares them
        done = shardwise(tmp_path, "launch", *joining, OMP_NUM_THREADS="1")
    else:
        done = run(tmp_path, [sys.executable, "-m", "torch.distributed.run", "--standalone", *joining])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("test accuracy") == 1
    (report,) = tmp_path.glob("runs/*/report.json")
    assert json.loads(report.read_text())["result"]["steps"] == 24
