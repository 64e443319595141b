"""The memory that planning predicts for a run."""

import msgspec
import pytest
from runs.synthetic import empty_run

from shardwise.job.load import refer
from shardwise.monitor.watch import predict
from shardwise.plans import Plan
from shardwise.plans.toml import plan_to_toml
from shardwise.runs.status import Predicted, read_predicted

JOB = """
import torch
import shardwise as sw

job = sw.Job(
    model=lambda: torch.nn.Linear(64, 10),
    data=sw.datasets.digits,
    loss=sw.losses.cross_entropy,
    forward=lambda model, batch: model(batch[0].flatten(1)),
    optimizer=sw.adamw(lr=0.01),
    batch_size=64,
    steps=3,
)
"""


@pytest.fixture
def run(tmp_path):
    (tmp_path / "job.py").write_text(JOB)
    run = empty_run(tmp_path / "run")
    run.job.write_bytes(msgspec.json.encode(refer(str(tmp_path / "job.py"), {})))
    run.plan.write_text(plan_to_toml(Plan(micro_batch=64)))
    return run


def test_described_job_is_predicted(run, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = predict(run)
    assert found.why_not == ""
    parameters = 4 * (64 * 10 + 10)
    assert found.peak_bytes > 4 * parameters  # weights, gradients and two states of each


def test_job_that_changed_or_breaks_is_one_line(run, tmp_path):
    (tmp_path / "job.py").write_text("raise KeyError")
    found = predict(run)
    assert found.peak_bytes is None
    assert "changed since the run was started" in found.why_not


@pytest.mark.parametrize("content", ["", "{", "[]", '{"peak_bytes":"x"}'])
def test_prediction_that_cannot_be_read_is_none(run, content):
    (run.path / "predicted.json").write_text(content)
    assert read_predicted(run) == Predicted()
