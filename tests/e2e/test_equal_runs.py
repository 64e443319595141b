"""--check-replicas and --deterministic as options: drift is reported and stops the job, runs repeat bit for bit."""

import json

import pytest
import torch

from e2e.processes import shardwise
from shardwise.runs.drift import Cause

SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(), torch.nn.Linear(8, 2)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1, 200 if "drift" in sys.argv else 6):
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if "drift" in sys.argv:
        torch.distributed.barrier()
        __import__("time").sleep(0.05)
        if step == 2 and dist.get_rank() == 1:
            model.module[2].bias.data += 1
if dist.get_rank() == 0:
    print("weights", [float(value.double().sum()) for value in model.parameters()])
dist.destroy_process_group()
"""
JOB = """
import torch
import shardwise as sw

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(64, 10)

    def forward(self, x):
        counts = torch.zeros(10)
        OPERATION
        return self.head(torch.nn.functional.dropout(x.flatten(1))) + counts

job = sw.Job(
    model=Net,
    data=sw.datasets.digits,
    loss=sw.losses.cross_entropy,
    optimizer=sw.adamw(lr=1e-2),
    batch_size=64,
    steps=3,
)
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    return tmp_path


def test_drift_of_a_script_is_reported_and_stops_it(folder):
    how = ("--check-replicas", "1", "--on-drift", "stop", "--run-dir", "run")
    done = shardwise(folder, "launch", "--nproc", "2", *how, "script.py", "drift")
    found = "replicas differ after step 3 (equal after step 2): 2.bias of rank 1 differs from that of rank 0"
    verdict = f"{found}; {Cause.OUTSIDE.value}"
    assert verdict in done.stderr
    assert done.returncode == 1
    events = [json.loads(line) for line in (folder / "run/events/launcher.jsonl").read_text().splitlines()]
    assert any(verdict in event["text"] for event in events if event["kind"] == "verdict")
    assert "weights" not in done.stdout


@pytest.mark.prove
def test_a_script_without_seeds_repeats_to_the_bit(folder):
    first, again = (shardwise(folder, "launch", "--nproc", "2", "--deterministic", "script.py") for _ in range(2))
    assert "weights" in first.stdout, first.stderr
    assert first.stdout == again.stdout


@pytest.mark.prove
def test_training_refuses_an_operation_without_deterministic_form_by_name(folder):
    (folder / "job.py").write_text(JOB.replace("OPERATION", "counts.put_(torch.tensor([1]), torch.ones(1))"))
    done = shardwise(folder, "train", "job.py", "--nproc", "2", "--device", "cpu", "--deterministic")
    assert done.returncode == 1
    assert "put_ does not have a deterministic implementation" in done.stderr


@pytest.mark.prove
def test_training_repeats_to_the_bit(folder):
    (folder / "job.py").write_text(JOB.replace("OPERATION", "counts += 1"))
    weights = []
    for name in ("one", "two"):
        how = ("--device", "cpu", "--deterministic", "--run-dir", name)
        done = shardwise(folder, "train", "job.py", "--nproc", "2", *how)
        assert done.returncode == 0, done.stderr
        weights.append(torch.load(folder / name / "weights.pt"))
    assert all(torch.equal(value, weights[1][key]) for key, value in weights[0].items())


def test_programs_that_are_not_python_are_refused(folder):
    done = shardwise(folder, "launch", "--no-python", "--deterministic", "true")
    assert done.returncode == 2
    assert "[cli.option-not-applicable]" in done.stderr
