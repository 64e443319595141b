"""Training on a CUDA device: precisions, fp16 scaling, and ranks that share one GPU over gloo."""

import json
import os
import subprocess
import sys

import pytest
import torch

import shardwise as sw
from shardwise.plans import Plan, Precision
from shardwise.runs import EventLog
from shardwise.runs.recorder import Timeline
from shardwise.training.loop import run_loop

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def make_job(**changes):
    fields = {
        "model": lambda: sw.models.resnet18(num_classes=10, in_channels=1, stem="small"),
        "data": sw.datasets.digits,
        "loss": sw.losses.cross_entropy,
        "optimizer": sw.adamw(lr=1e-3),
        "metrics": {"accuracy": sw.metrics.accuracy},
        "batch_size": 128,
        "epochs": 8,
    }
    return sw.Job(**{**fields, **changes})


def losses_of(job, plan, world):
    losses = []
    report, _ = run_loop(
        job, plan, world, EventLog(None, lambda event: losses.extend(event.get("losses", []))), Timeline()
    )
    return report, losses


@pytest.mark.parametrize("compute", ["fp32", "bf16", "fp16"])
def test_every_precision_learns_digits(compute):
    plan = Plan(**{**vars(Plan.preset("ddp", 1, batch_size=128)), "precision": Precision(compute=compute)})
    with sw.world() as world:
        assert world.backend == "nccl"
        report, losses = losses_of(make_job(clip_norm=1.0), plan, world)
    assert losses[-1] < losses[0]
    assert report.evaluation["accuracy"] > 0.95


def test_overflow_in_fp16_skips_the_step_and_keeps_the_weights():
    huge = sw.Loss(sum=lambda output, batch: output.sum() * 1e30)
    plan = Plan(**{**vars(Plan.preset("ddp", 1, batch_size=128)), "precision": Precision(compute="fp16")})
    with sw.world() as world:
        job = make_job(
            loss=huge, epochs=None, steps=3, data=lambda split: sw.datasets.digits(split) if split == "train" else None
        )
        step = sw.build_step(job, plan, world)
        before = [p.detach().clone() for p in step.model.parameters()]
        for batch in step.feed:
            step(batch)
        assert all(torch.equal(a, b) for a, b in zip(before, step.model.parameters(), strict=True))


JOB = """
import shardwise as sw

job = sw.Job(
    model=lambda: sw.models.resnet18(num_classes=10, in_channels=1, stem="small"),
    data=lambda split: sw.datasets.digits(split) if split == "train" else None,
    loss=sw.losses.cross_entropy, optimizer=sw.adamw(lr=1e-3), batch_size=120, epochs=1,
)
"""

RANK = (
    JOB
    + """
import dataclasses, json, sys
from shardwise.plans import Plan, Precision
from shardwise.runs import EventLog
from shardwise.runs.recorder import Timeline
from shardwise.training.loop import run_loop

rank, size, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
fp64 = Precision(parameter="fp64", compute="fp64", reduce="fp64", optimizer="fp64")
plan = dataclasses.replace(Plan.preset("ddp", size, batch_size=120), precision=fp64)
losses = []
with sw.world(backend="gloo", device="cuda:0", init_method=f"file://{store}", rank=rank, world_size=size) as world:
    run_loop(job, plan, world, EventLog(None, lambda e: losses.extend(e.get("losses", []))), Timeline())
print(json.dumps(losses))
"""
)


def gpu_losses(tmp_path, size):
    """Losses of a batch-norm ResNet in fp64 on `size` gloo ranks that share one GPU."""
    store = tmp_path / f"store{size}"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(size), str(store)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank in range(size)
    ]
    outputs = [rank.communicate(timeout=100)[0] for rank in ranks]
    assert all(rank.returncode == 0 for rank in ranks)
    return torch.tensor(json.loads(outputs[0].splitlines()[-1]), dtype=torch.float64)


def test_two_ranks_on_one_gpu_equal_one_process(tmp_path):
    one, two = gpu_losses(tmp_path, 1), gpu_losses(tmp_path, 2)
    assert len(one) == 12
    torch.testing.assert_close(two, one, rtol=1e-9, atol=0)


def test_command_line_trains_on_the_gpu(tmp_path):
    (tmp_path / "job.py").write_text(JOB)
    done = subprocess.run(
        [sys.executable, "-m", "shardwise", "train", "job.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "compute bf16" in done.stderr
    assert "cuda:0" in done.stderr
