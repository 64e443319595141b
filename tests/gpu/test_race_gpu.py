"""The race of `--plan auto` on a CUDA device: real compiled and captured steps, measured in a child process."""

import dataclasses

import pytest
import torch

from jobs import token_job_text
from shardwise.job import load_job, refer
from shardwise.planner.search import race
from shardwise.planner.search.race_process import run_race
from shardwise.planner.settle import Tuning, local_device, settle_job_plan
from shardwise.plans import Plan
from shardwise.plans.toml import plan_to_toml

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DECODER_JOB = """
import torch
import shardwise as sw

rows = torch.arange(1280).reshape(40, 32) % 50
job = sw.Job(
    model=lambda: sw.models.decoder("gpt2-tiny", vocab_size=50, context=32, num_layers=8),
    data=lambda split: torch.utils.data.TensorDataset(rows, rows) if split == "train" else None,
    loss=sw.losses.token_cross_entropy,
    optimizer=sw.adamw(lr=1e-3),
    batch_size=8,
    steps=10_000_000,
)
"""


def test_auto_measures_a_decoder_and_uses_the_cache_the_second_time(tmp_path, monkeypatch):
    monkeypatch.setattr(race, "LEAST_JOB_S", 0.0)
    path, notes = tmp_path / "job.py", []
    path.write_text(DECODER_JOB)
    reference = refer(str(path), {})
    job, device = load_job(reference), local_device(None, 1)
    tuning = Tuning(reference=reference, note=notes.append, folder=tmp_path / "cache", budget_s=30)

    def settled():
        return settle_job_plan(job, "auto", world_size=1, device=device, overrides={}, tuning=tuning)

    first = settled()
    assert "measured" in " ".join(first.sources.values())
    assert first.compile != "none" or first.capture != "none"
    num_notes = len(notes)
    assert settled() == first
    assert len(notes) == num_notes


def test_candidate_without_memory_is_removed_and_the_next_is_measured(tmp_path):
    path = tmp_path / "job.py"
    text = token_job_text(1).replace("batch_size=8", "batch_size=16")
    grown = "torch.relu(self.linear(x)) + torch.zeros(1 if len(x) < 16 else 2**40, device=x.device)[0]"
    path.write_text(text.replace("torch.relu(self.linear(x))", grown))
    large = Plan.preset("ddp", 1, batch_size=16)
    small = dataclasses.replace(large, micro_batch=8, accumulation=2)
    record = run_race(
        refer(str(path), {}), [plan_to_toml(plan) for plan in (large, small)], device="cuda:0", budget_s=60
    )
    assert "OutOfMemoryError" in record.timed[0].error
    assert record.timed[1].error == ""
