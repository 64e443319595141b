"""What engine deepspeed cannot train is refused in one sentence that names the way out."""

import dataclasses
import importlib.metadata
from pathlib import Path

import pytest

from engines.deepspeed.jobs import needs_deepspeed
from shardwise.cli.main import main
from shardwise.engines.deepspeed import library
from shardwise.errors import InputError, PlanError
from shardwise.parallel.support import require_supported
from shardwise.plan import Communication, Offload, Plan, Precision

FP64 = Precision(parameter="fp64", compute="fp64", reduce="fp64", optimizer="fp64")
NVME = Offload(optimizer="nvme", folder="/mnt")

REFUSED = {
    "tensor axis": ("tp", {}, "uses axis tp"),
    "stages": ("pp", {}, "uses axis pp"),
    "shards within replicas": ("hsdp", {}, "shards within replicas"),
    "fp64": ("zero2", {"precision": FP64}, "fp32 copies"),
    "fp16 in stage 0": ("ddp", {"precision": Precision(compute="fp16")}, "shrinks gradients"),
    "compiled": ("zero2", {"compile": "blocks"}, "compile = 'blocks'"),
    "captured": ("zero2", {"capture": "step"}, "capture = 'step'"),
    "compressed": ("ddp", {"communication": Communication(compression="powersgd")}, "compression = 'powersgd'"),
    "parameters off a stage that keeps them": ("zero2", {"offload": Offload(parameters="cpu")}, "zero = 2"),
    "optimizer off stage 0": ("ddp", {"offload": Offload(optimizer="cpu")}, "zero = 0"),
    "nvme below stage 3": ("zero2", {"offload": NVME}, "would take the CPU"),
    "nvme without a folder": ("zero3", {"offload": Offload(optimizer="nvme")}, "names no folder"),
    "fp32 parameters on nvme": ("zero3", {"offload": Offload(parameters="nvme", folder="/mnt")}, "keeps them in bf16"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_plan_is_refused(case):
    name, changes, words = REFUSED[case]
    plan = dataclasses.replace(Plan.preset(name, 4, batch_size=8), engine="deepspeed", **changes)
    with pytest.raises(PlanError, match=words) as refusal:
        require_supported(plan)
    assert refusal.value.fix


def test_nvme_needs_another_engine_than_torch():
    with pytest.raises(PlanError, match="engine=deepspeed"):
        require_supported(dataclasses.replace(Plan.preset("zero3", 2), offload=NVME))


def missing(_):
    raise importlib.metadata.PackageNotFoundError


@pytest.mark.parametrize(
    ("version", "words"), [(missing, "is not installed"), (lambda _: "0.15.4", "0.15.4 is installed")]
)
def test_missing_or_old_deepspeed_is_one_sentence_with_the_pip_line(monkeypatch, version, words):
    monkeypatch.setattr(library, "version", version)
    with pytest.raises(InputError, match=words) as refusal:
        library.require_deepspeed()
    assert refusal.value.fix == "pip install 'shardwise[deepspeed]'"


JOB = """
import torch
import shardwise as sw

job = sw.Job(
    model=lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)), data=sw.datasets.digits,
    loss=sw.losses.cross_entropy, optimizer=lambda named: torch.optim.Adafactor([each for _, each in named]),
    batch_size=64, steps=1,
)
"""


def refusal_of(tmp_path, monkeypatch, capsys, *words):
    """Return exit code and last line of a training, which may leave no run behind."""
    monkeypatch.chdir(tmp_path)
    Path("job.py").write_text(JOB)
    code = main(["train", "job.py", "--nproc", "2", "--set", "engine=deepspeed", *words])
    assert not Path("runs").exists() or not list(Path("runs").iterdir())
    return code, capsys.readouterr().err.strip().splitlines()[-1]


def test_training_without_deepspeed_is_refused_before_anything_starts(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(library, "version", missing)
    code, line = refusal_of(tmp_path, monkeypatch, capsys, "--plan", "zero2")
    assert (code, "pip install 'shardwise[deepspeed]'" in line) == (2, True)


def test_training_with_another_axis_is_refused_before_anything_starts(tmp_path, monkeypatch, capsys):
    code, line = refusal_of(tmp_path, monkeypatch, capsys, "--plan", "tp")
    assert (code, "--set engine=torch" in line) == (2, True)


@needs_deepspeed
@pytest.mark.prove
def test_stage_3_with_an_optimizer_that_it_cannot_cut_is_bad_input(tmp_path, monkeypatch, capfd):
    code, line = refusal_of(tmp_path, monkeypatch, capfd, "--plan", "zero3")
    assert (code, "Adafactor under DeepSpeed's stage 3" in line) == (2, True)
