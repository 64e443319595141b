"""`shardwise doctor drill` on real jobs and scripts: it passes what works, and fails what goes unnoticed or is lost."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from e2e.processes import working_in

JOB = """
from torch import nn
import shardwise as sw

job = sw.Job(
    model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)),
    data=sw.datasets.digits, loss=sw.losses.cross_entropy, optimizer=sw.adamw(lr=1e-2), batch_size=64, epochs=1,
)
"""
FORGETFUL = """
import dataclasses, torch
from job import job as whole
import shardwise as sw

class Drifting(torch.nn.Module):
    # What it counts is in no checkpoint.
    def __init__(self):
        super().__init__()
        self.inner, self.seen = whole.model(), 0

    def forward(self, x):
        self.seen += 1
        return self.inner(x) * (1 + 0.01 * self.seen)

job = dataclasses.replace(whole, model=Drifting)
"""
SCRIPT = """
import sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(int(sys.argv[1])):
    loss = model(torch.ones(4, 8)).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    dist.all_reduce(loss.detach())
dist.destroy_process_group()
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "job.py").write_text(JOB)
    (tmp_path / "forgetful.py").write_text(FORGETFUL)
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "tmp").mkdir()
    return tmp_path


def drill(folder, *argv):
    done = subprocess.run(
        [sys.executable, "-m", "shardwise", "doctor", "drill", *argv],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder / "tmp")},
    )
    assert working_in(folder) == []
    return done


def results(done):
    return {each["drill"]: each for each in json.loads(done.stdout)["drills"]}


@pytest.mark.prove
def test_a_killed_rank_passes_and_a_frozen_one_that_nobody_looks_for_fails(folder):
    done = drill(
        folder, "--drill", "kill", "--drill", "freeze", "--hang-after", "0", "--steps", "10", "--json", "job.py"
    )
    assert done.returncode == 3, done.stdout + done.stderr
    found = results(done)
    assert found["kill"]["problems"] == []
    assert (found["kill"]["who"], found["kill"]["recovery"]) == ("rank 1", "restarted, resumed at step 4")
    assert found["freeze"]["problems"] == ["the fault was not reported: rank 1 was frozen after step 5"]
    assert Path(found["freeze"]["run"]).is_dir()  # kept, to be looked at


@pytest.mark.prove
def test_every_drill_passes_on_a_sound_job_and_leaves_nothing_behind(folder):
    kinds = ["kill", "freeze", "mismatch", "link", "checkpoint", "disk"]
    done = drill(folder, *(option for kind in kinds for option in ("--drill", kind)), "--json", "job.py")
    assert done.returncode == 0, done.stdout + done.stderr
    found = results(done)
    assert list(found) == kinds
    assert [name for name, each in found.items() if each["detected_s"] is None or each["recovered_s"] is None] == []
    assert {path.name for path in folder.iterdir()} <= {"job.py", "forgetful.py", "script.py", "tmp", "__pycache__"}
    assert list((folder / "tmp").glob("shardwise-*")) == []


@pytest.mark.prove
def test_a_slow_rank_of_a_job_is_named(folder):
    done = drill(folder, "--drill", "slow", "--json", "job.py")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.prove
def test_every_drill_of_a_script_passes_on_a_sound_one(folder):
    done = drill(folder, "--script", "--json", "script.py", "120")
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(results(done)) == ["kill", "freeze", "slow", "mismatch", "link"]
    assert "script.py:12" in results(done)["mismatch"]["said"]


@pytest.mark.prove
def test_a_job_that_does_not_come_back_as_it_was_fails(folder):
    done = drill(folder, "--drill", "kill", "--steps", "10", "--json", "forgetful.py")
    assert done.returncode == 3, done.stdout + done.stderr
    [problem] = results(done)["kill"]["problems"]
    assert "the loss of step" in problem


@pytest.mark.prove
def test_a_sharded_job_of_four_ranks_passes(folder):
    done = drill(
        folder, "--nproc", "4", "--plan", "fsdp", "--drill", "kill", "--drill", "checkpoint", "--json", "job.py"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert results(done)["kill"]["who"] == "rank 3"


@pytest.mark.prove
def test_a_script_with_too_few_steps_reports_that_the_fault_did_not_happen(folder):
    done = drill(folder, "--script", "--drill", "kill", "script.py", "2")
    assert done.returncode == 3
    assert "the fault was never injected" in done.stdout


@pytest.mark.prove
def test_a_job_that_fails_by_itself_is_not_drilled(folder):
    (folder / "broken.py").write_text("raise ValueError('tired')\n")
    done = drill(folder, "--script", "--drill", "kill", "broken.py")
    assert done.returncode == 1
    assert "ValueError: tired" in done.stderr
    assert "doctor.job-fails" in done.stderr
