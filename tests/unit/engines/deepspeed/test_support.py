"""What engine deepspeed cannot train is refused in one sentence that names the way out."""

import dataclasses
import importlib.metadata
from pathlib import Path

import pytest
from engines.deepspeed.deepspeed_jobs import needs_deepspeed

from jobs import FP64
from refusals import assert_refused, refuses
from shardwise.cli.main import main
from shardwise.engines.deepspeed import engine
from shardwise.engines.engine import require_supported
from shardwise.plans import Communication, Offload, Plan, Precision

NVME = Offload(optimizer="nvme", folder="/mnt")

REFUSED = {
    "tensor axis": ("tp", {}, ("support.deepspeed-axis", "axis tp")),
    "stages": ("pp", {}, ("support.deepspeed-axis", "axis pp")),
    "shards within replicas": ("hsdp", {}, ("support.deepspeed-partial-sharding",)),
    "fp64": ("zero2", {"precision": FP64}, ("support.deepspeed-precision", "fp32")),
    "fp16 in stage 0": ("ddp", {"precision": Precision(compute="fp16")}, ("support.deepspeed-fp16-unsharded",)),
    "compiled": ("zero2", {"compile": "blocks"}, ("support.deepspeed-option", "compile = 'blocks'")),
    "captured": ("zero2", {"capture": "step"}, ("support.deepspeed-option", "capture = 'step'")),
    "compressed": (
        "ddp",
        {"communication": Communication(compression="powersgd")},
        ("support.deepspeed-option", "compression = 'powersgd'"),
    ),
    "parameters off a stage that keeps them": (
        "zero2",
        {"offload": Offload(parameters="cpu")},
        ("support.offload-whole-parameters", "zero = 2"),
    ),
    "optimizer off stage 0": (
        "ddp",
        {"offload": Offload(optimizer="cpu")},
        ("support.deepspeed-offload-unsharded", "zero = 0"),
    ),
    "nvme below stage 3": ("zero2", {"offload": NVME}, ("support.deepspeed-nvme-stage",)),
    "nvme without a folder": ("zero3", {"offload": Offload(optimizer="nvme")}, ("plan.nvme-folder-missing",)),
    "fp32 parameters on nvme": (
        "zero3",
        {"offload": Offload(parameters="nvme", folder="/mnt")},
        ("support.deepspeed-nvme-dtype", "bf16"),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_plan_is_refused(case):
    name, changes, refusal = REFUSED[case]
    plan = dataclasses.replace(Plan.preset(name, 4, batch_size=8), engine="deepspeed", **changes)
    with refuses(*refusal) as caught:
        require_supported(plan)
    assert caught.value.fix


def test_nvme_needs_another_engine_than_torch():
    with refuses("support.nvme-offload", "engine=deepspeed"):
        require_supported(dataclasses.replace(Plan.preset("zero3", 2), offload=NVME))


def missing(_):
    raise importlib.metadata.PackageNotFoundError


@pytest.mark.parametrize(
    ("version", "refusal"),
    [(missing, ("extra.deepspeed-missing",)), (lambda _: "0.15.4", ("engine.deepspeed-too-old", "0.15.4"))],
)
def test_missing_or_old_deepspeed_is_one_sentence_with_the_pip_line(monkeypatch, version, refusal):
    monkeypatch.setattr(engine, "version", version)
    with refuses(*refusal) as caught:
        engine.require_deepspeed()
    assert caught.value.fix == "pip install 'shardwise[deepspeed]'"


JOB = """
import torch
import shardwise as sw

job = sw.Job(
    model=lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)), data=sw.datasets.digits,
    loss=sw.losses.cross_entropy, optimizer=lambda named: torch.optim.Adafactor([each for _, each in named]),
    batch_size=64, steps=1,
)
"""


def check_train_refused(tmp_path, monkeypatch, capsys, plan, *refusal):
    """Have a training refused as bad input, which may leave no run behind."""
    monkeypatch.chdir(tmp_path)
    Path("job.py").write_text(JOB)
    assert main(["train", "job.py", "--nproc", "2", "--set", "engine=deepspeed", "--plan", plan]) == 2
    assert not Path("runs").exists() or not list(Path("runs").iterdir())
    assert_refused(capsys.readouterr().err, *refusal)


def test_training_without_deepspeed_is_refused_before_anything_starts(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(engine, "version", missing)
    refusal = ("extra.deepspeed-missing", "pip install 'shardwise[deepspeed]'")
    check_train_refused(tmp_path, monkeypatch, capsys, "zero2", *refusal)


def test_training_with_another_axis_is_refused_before_anything_starts(tmp_path, monkeypatch, capsys):
    check_train_refused(tmp_path, monkeypatch, capsys, "tp", "support.deepspeed-axis", "--set engine=torch")


@needs_deepspeed
@pytest.mark.prove
def test_stage_3_with_an_optimizer_that_it_cannot_shard_is_bad_input(tmp_path, monkeypatch, capfd):
    refusal = ("support.deepspeed-optimizer-elementwise", "Adafactor", "stage 3")
    check_train_refused(tmp_path, monkeypatch, capfd, "zero3", *refusal)
