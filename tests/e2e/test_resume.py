"""Stop, crash and resume from the command line."""

import json
import re
import shlex
import signal
import time

import torch

from e2e.processes import Command

JOB = """
import os, signal, time
from pathlib import Path
import shardwise as sw

def on_step(context):
    time.sleep(0.25 if Path("slow").exists() else 0.01)
    if context.step == 13 and os.environ.get("RANK") == "1" and not Path("died").exists():
        Path("died").touch()
        if Path("deadly").exists():
            os.kill(os.getpid(), signal.SIGKILL)

def data(split):  # the test split takes longer than all of the training
    return sw.datasets.text(length=16)(split) if split == "train" else None

job = sw.Job(
    model=lambda: sw.models.decoder("gpt2-tiny", context=32), data=data,
    loss=sw.losses.token_cross_entropy, optimizer=sw.adamw(lr=1e-3), batch_size=8, steps=1, on_step=on_step,
)
"""


def start(folder, *arguments):
    return Command(folder, "train", "job.py", *arguments)


def finish(process):
    done = process.finish()
    return done.returncode, done.stdout + done.stderr


def losses(run):
    """Losses by step, the last time each was trained."""
    found = {}
    for line in (run / "events" / "rank0.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["kind"] == "steps":
            found.update(enumerate(event["losses"], event["first"]))
    return found


def test_a_stop_request_saves_and_the_next_run_resumes(tmp_path):
    (tmp_path / "job.py").write_text(JOB)
    length = ("--set", "steps=24")
    whole, output = finish(start(tmp_path, "--nproc", "2", "--run-dir", "whole", *length))
    assert whole == 0, output
    (tmp_path / "slow").touch()  # it must not end before it is asked to
    process = start(tmp_path, "--nproc", "2", "--run-dir", "first", *length)
    while not (tmp_path / "first" / "events" / "rank0.jsonl").exists() or not losses(tmp_path / "first"):
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    code, output = finish(process)
    assert code == 75, output
    command = shlex.split(re.search(r"stopped and saved; continue with: (.*)", output)[1])
    assert command[:3] == ["shardwise", "train", "job.py"]
    assert command[-2:] == ["--run-dir=first", "--resume=auto"]
    (tmp_path / "slow").unlink()
    # As it was printed, but on another number of ranks.
    code, output = finish(start(tmp_path, *command[3:], "--nproc", "1", "--plan", "ddp"))
    assert code == 0, output
    at = int(re.search(r"resumed from .* at step (\d+)", output)[1])
    assert re.search(rf"training time .* s for {24 - at} steps, resumed at step {at}\n", output)
    assert "step 1/24" not in output  # steps of the first part are not shown again
    both, one = losses(tmp_path / "first"), losses(tmp_path / "whole")
    assert sorted(both) == sorted(one)
    torch.testing.assert_close(torch.tensor(list(both.values())), torch.tensor(list(one.values())), rtol=1e-3, atol=0)


def test_a_killed_rank_is_restarted_from_the_last_checkpoint(tmp_path):
    (tmp_path / "job.py").write_text(JOB)
    (tmp_path / "deadly").touch()
    arguments = ("--nproc", "2", "--run-dir", "run", "--save-every", "5", "--max-restarts", "1", "--set", "steps=20")
    code, output = finish(start(tmp_path, *arguments))
    assert code == 0, output
    assert "rank 1 failed: SIGKILL; restart 1 of 1" in output
    assert re.search(r"resumed from .*step-000000(05|10) at step (5|10)\b", output)
    assert sorted(losses(tmp_path / "run")) == list(range(20))


def test_nothing_to_resume_from_is_refused_at_once(tmp_path):
    (tmp_path / "job.py").write_text(JOB)
    code, output = finish(start(tmp_path, "--resume", "nowhere"))
    assert code == 2
    assert "checkpoint.resume-not-found" in output
    assert not (tmp_path / "runs").exists()
    assert {path.name for path in tmp_path.iterdir()} <= {"job.py", "__pycache__"}
