"""The whole optimizer step as one CUDA graph: the same numbers, in far less time of the host."""

import dataclasses
import json
import statistics
import time

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import shardwise as sw
from shardwise.plans import Plan, Precision
from shardwise.runs import create_run
from shardwise.training.step.captured import CapturedStep, host_syncs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Mlp(nn.Sequential):
    """Many small layers: the host is what takes time."""

    def __init__(self, dropout=0.0, wait=False):
        layers = [nn.Linear(32, 64)]
        for _ in range(12):
            layers += [nn.LayerNorm(64), nn.GELU(), nn.Dropout(dropout), nn.Linear(64, 64)]
        super().__init__(*layers, nn.Linear(64, 10))
        self.wait = wait

    def forward(self, x):
        if self.wait and float(x.sum()) > 1e9:
            return super().forward(x * 0)
        return super().forward(x)


def rows(split):
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(90, 32, generator=generator), torch.arange(90) % 10) if split == "train" else None


def job(**changes):
    fields = {
        "model": Mlp,
        "data": rows,
        "loss": sw.losses.cross_entropy,
        "optimizer": sw.adamw(lr=1e-3),
        "schedule": sw.schedules.Cosine(),
        "batch_size": 16,
        "epochs": 6,
    }
    return sw.Job(**{**fields, **changes})


def train(job, plan):
    notes = []
    with sw.world() as world:
        step = sw.build_step(job, plan, world, note=notes.append)
        reports = [step(batch) for batch in step.feed]
        values = [value.clone() for _, value in step.named_parameters()]
        return [(float(r.loss_share), r.lr, float(r.grad_norm)) for r in reports], values, notes, step


@pytest.mark.parametrize("compute", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("changes", [{}, {"clip_norm": 0.1}, {"optimizer": sw.sgd(lr=0.1, momentum=0.9)}])
def test_losses_rates_norms_and_weights_are_those_of_the_plain_step(compute, changes):
    plain = Plan(micro_batch=8, accumulation=2, precision=Precision(compute=compute))
    exact, values, _, _ = train(job(**changes), plain)
    found, captured, notes, step = train(job(**changes), dataclasses.replace(plain, capture="step"))
    assert notes == ["capture = step: the optimizer step runs as one CUDA graph"]
    assert isinstance(step, CapturedStep)
    assert len(exact) == 36  # with a short step in every epoch, which runs uncaptured
    torch.testing.assert_close(torch.tensor(found), torch.tensor(exact), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(captured, values, rtol=1e-4, atol=1e-5)


def test_a_step_in_fp64_runs_uncaptured_with_the_numbers_of_the_plain_step():
    exact = Precision(parameter="fp64", compute="fp64", reduce="fp64", optimizer="fp64")
    plain = Plan(micro_batch=8, accumulation=2, precision=exact)
    expected, values, _, _ = train(job(), plain)
    found, weights, notes, _ = train(job(), dataclasses.replace(plain, capture="step"))
    assert "learning rate in fp32" in notes[0]
    torch.testing.assert_close(
        torch.tensor(found, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=0
    )
    torch.testing.assert_close(weights, values, rtol=1e-9, atol=1e-12)


def trained(job, plan, folder, **how):
    """Train as `shardwise train` does; returns the loss of every step and the notes."""
    run = create_run(folder, "run")
    with sw.world() as world:
        sw.train(job, plan, world, run=run, show_progress=False, **how)
    events = [json.loads(line) for line in run.events(0).read_text().splitlines()]
    losses = [loss for event in events for loss in event.get("losses", [])]
    return losses, [event["text"] for event in events if event["kind"] == "note"]


def test_train_captures_saves_and_resumes_at_its_position(tmp_path):
    plain = Plan(micro_batch=16)
    captured = dataclasses.replace(plain, capture="step")
    exact, _ = trained(job(), plain, tmp_path / "plain")
    found, notes = trained(job(), captured, tmp_path / "captured", save_every=20, keep=9)
    assert "capture = step: the optimizer step runs as one CUDA graph" in notes
    torch.testing.assert_close(torch.tensor(found), torch.tensor(exact), rtol=1e-5, atol=1e-6)
    saved = min((tmp_path / "captured" / "checkpoints").glob("step-*"))
    again, _ = trained(job(), captured, tmp_path / "again", resume=str(saved))
    torch.testing.assert_close(torch.tensor(again), torch.tensor(exact[20:]), rtol=1e-5, atol=1e-6)


def test_dropout_draws_new_masks_in_every_replay():
    # A mask that was drawn once and replayed would give equal losses on equal batches at learning rate 0.
    same = job(model=lambda: Mlp(dropout=0.5), optimizer=sw.adamw(lr=0.0), data=one_row, batch_size=8, epochs=10)
    found, _, notes, _ = train(same, Plan(micro_batch=8, capture="step"))
    assert notes[-1].endswith("runs as one CUDA graph")
    assert len({loss for loss, _, _ in found[-6:]}) == 6


def one_row(split):
    return TensorDataset(torch.ones(8, 32), torch.zeros(8, dtype=torch.long)) if split == "train" else None


def test_the_line_where_a_model_waits_for_the_device_is_reported_and_training_continues():
    waiting = job(model=lambda: Mlp(dropout=0.1, wait=True))
    exact, _, _, _ = train(waiting, Plan(micro_batch=16))
    found, _, notes, _ = train(waiting, Plan(micro_batch=16, capture="step"))
    assert len(notes) == 1
    assert "not captured because the host synchronizes with the device at" in notes[0]
    assert "test_capture_gpu.py" in notes[0]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(exact), rtol=1e-5, atol=1e-6)


def test_compiled_blocks_are_captured_too():
    tokens = torch.randint(0, 256, (32, 33), generator=torch.Generator().manual_seed(0))
    text = job(
        model=lambda: sw.models.decoder("llama-tiny"),
        data=lambda split: TensorDataset(tokens[:, :-1], tokens[:, 1:]) if split == "train" else None,
        loss=sw.losses.token_cross_entropy,
        batch_size=8,
    )
    plain = Plan(micro_batch=8, precision=Precision(compute="bf16"))
    exact, _, _, _ = train(text, plain)
    found, _, notes, _ = train(text, dataclasses.replace(plain, capture="step", compile="blocks"))
    assert notes[-1].endswith("runs as one CUDA graph")
    torch.testing.assert_close(torch.tensor(found), torch.tensor(exact), rtol=2e-2, atol=2e-2)


def test_a_replay_takes_a_fraction_of_the_plain_step():
    def median_s(plan):
        times = []
        with sw.world() as world:
            step = sw.build_step(job(epochs=40), plan, world)
            batch = next(iter(step.feed))
            for _ in range(60):
                torch.cuda.synchronize()
                began = time.perf_counter()
                step(batch)
                torch.cuda.synchronize()
                times.append(time.perf_counter() - began)
        return statistics.median(times[20:])

    assert median_s(Plan(micro_batch=16, capture="step")) < median_s(Plan(micro_batch=16)) / 3


def test_waits_of_the_host_are_found():
    with host_syncs() as waits:
        float(torch.ones(1, device="cuda"))
    assert len(waits) == 1
    assert "test_capture_gpu.py" in waits[0]
