"""Checkpoints from DeepSpeed are ours: resumed by any engine on any ranks, with the losses of a run nobody stopped."""

import dataclasses
import itertools
from pathlib import Path

import pytest
import torch
from engines.deepspeed.deepspeed_jobs import HalfFrozen, digits_job, needs_deepspeed

import shardwise as sw
from jobs import sentences_job
from shardwise.engines.engine import engine_named
from shardwise.parity.verify import verify
from shardwise.planner.settle import LocalDevice, settle
from shardwise.runs import EventLog
from shardwise.runs.recorder import Timeline
from shardwise.testing import run_ranks
from shardwise.training.loop import run_loop
from shardwise.training.spec import SaveSpec

pytestmark = needs_deepspeed

JOBS = Path(__file__).parent / "deepspeed_jobs.py"
STEPS, SAVED = 5, 2
KINDS = {
    "one": (1, "ddp", "torch"),
    "fsdp4": (4, "fsdp", "torch"),
    "stage0": (2, "ddp", "deepspeed"),
    "stage1": (2, "zero1", "deepspeed"),
    "stage2": (2, "zero2", "deepspeed"),
    "stage2off": (2, "zero2+offload.optimizer=cpu", "deepspeed"),
    "stage3": (2, "zero3", "deepspeed"),
    "stage3off": (2, "zero3+offload.parameters=cpu+offload.optimizer=cpu", "deepspeed"),
}
PAIRS = [pair for pair in itertools.product(KINDS, KINDS) if any(kind.startswith("stage") for kind in pair)]
QUICK = [("stage3", "fsdp4"), ("fsdp4", "stage2"), ("stage2", "stage3")]


@pytest.fixture(scope="module", autouse=True)
def _imported_once():
    engine_named("deepspeed").preload()


def trained(world, kind, job, folder, resume):
    """Train from `resume` to the end with a checkpoint after every step; return losses by step and the last state."""
    _, name, engine = KINDS[kind]
    spec, *settings = name.split("+")
    overrides = {"engine": engine, **dict(setting.split("=") for setting in settings)}
    plan = settle(spec, batch_size=job.batch_size, world_size=world.size, device=LocalDevice(), overrides=overrides)
    losses = {}

    def listen(event):
        losses.update(enumerate(event.get("losses", []), event.get("first", 0)))

    save = SaveSpec(every=1, keep=str(STEPS + 1), resume=resume)
    _, step = run_loop(job, plan, world, EventLog(None, listen), Timeline(), checkpoints=folder, save=save)
    return losses, sw.full_state_dict(step.model)


def on_ranks(kind, job, folder, resume="never"):
    return run_ranks(trained, KINDS[kind][0], kind, job, Path(folder), str(resume), timeout_s=120)[0]


def check_continues(saved, resumed, job, folder):
    losses, state = on_ranks(saved, job, folder / "whole")
    more, again = on_ranks(resumed, job, folder / "resumed", folder / "whole" / f"step-{SAVED:08d}")
    assert sorted(more) == list(range(SAVED, STEPS))
    for step, loss in more.items():
        assert loss == pytest.approx(losses[step], rel=2e-6), step
    for key, value in state.items():
        if not key.endswith("qkv.bias"):  # the gradient of a key's bias is rounding, which Adam makes steps of
            torch.testing.assert_close(again[key], value, rtol=1e-3, atol=1e-5, msg=key)


@pytest.mark.representative("stage3-fsdp4")
@pytest.mark.slow
@pytest.mark.parametrize(("saved", "resumed"), QUICK)
def test_training_resumes_under_another_engine(saved, resumed, tmp_path):
    check_continues(saved, resumed, sentences_job(steps=STEPS), tmp_path)


@pytest.mark.prove
@pytest.mark.parametrize(("saved", "resumed"), PAIRS)
def test_training_resumes_from_any_layout_on_any_other(saved, resumed, tmp_path):
    check_continues(saved, resumed, sentences_job(steps=STEPS), tmp_path)


@pytest.mark.prove
@pytest.mark.parametrize("kind", ["stage1", "stage3"])
def test_frozen_and_tiny_parameters_come_back(kind, tmp_path):
    job = digits_job(HalfFrozen, steps=STEPS)
    check_continues(kind, "one", job, tmp_path / "out")
    check_continues("one", kind, job, tmp_path / "in")


@pytest.mark.prove
@pytest.mark.parametrize("stage", ["ddp", "zero1", "zero2", "zero3"])
def test_bf16_resumes_exactly(stage, tmp_path, monkeypatch):
    monkeypatch.setitem(KINDS, "bf16", (2, f"{stage}+precision=bf16", "deepspeed"))
    job = sentences_job(steps=STEPS)
    losses, state = on_ranks("bf16", job, tmp_path / "whole")
    more, again = on_ranks("bf16", job, tmp_path / "resumed", tmp_path / "whole" / f"step-{SAVED:08d}")
    assert more == {step: losses[step] for step in range(SAVED, STEPS)}
    assert all(torch.equal(again[key], value) for key, value in state.items())


@pytest.mark.prove
def test_killed_training_resumes_on_another_number_of_ranks():
    plans = ["zero1+engine=deepspeed", "zero3+engine=deepspeed"]
    report = verify(f"{JOBS}:decoder", plans, nproc=2, steps=5, resume=True)
    assert [(verdict.status, verdict.findings) for verdict in report.verdicts] == [("passed", ())] * 2


def test_checkpoint_holds_what_a_native_one_holds(tmp_path):
    from shardwise.checkpoint import read_manifest

    job = dataclasses.replace(sentences_job(), steps=1)
    on_ranks("stage3", job, tmp_path / "deepspeed")
    on_ranks("one", job, tmp_path / "torch")
    theirs, ours = (read_manifest(tmp_path / kind / "step-00000001") for kind in ("deepspeed", "torch"))
    assert {name: (entry.dtype, entry.shape) for name, entry in theirs.tensors.items()} == {
        name: (entry.dtype, entry.shape) for name, entry in ours.tensors.items()
    }
    assert theirs.facts["optimizer"]["class"] == ours.facts["optimizer"]["class"]
    assert [group["params"] for group in theirs.facts["optimizer"]["groups"]] == [
        group["params"] for group in ours.facts["optimizer"]["groups"]
    ]
