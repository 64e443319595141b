"""Every job of the gallery, trained for a few steps in fp64: its losses and a checksum of each parameter."""

import contextlib
import dataclasses
import importlib.util
import os
import re
import sys
from pathlib import Path

import torch

import shardwise as sw
from goldens.entry import corpus, global_loss, in_double, run_ranks, true_double, whole_weights

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
STEPS = 2
SMALLER = {"digits.py": 4, "text.py": 4, "02-fsdp/fsdp_transformer.py": 4, "02-fsdp/measure_strategies.py": 4}
"""Global batch size of jobs that would take long as they are; the others have at most 16 samples a step."""
LARGEST_BATCH = 16
PAIRS = {
    "verify/llama.py": ("ddp", "fsdp", "tp", "pp"),
    "verify/gpt2.py": ("zero1", "zero2"),
    "verify/resnet.py": ("ddp",),
    "05-advanced/lora_finetune.py": ("fsdp",),
}
"""Jobs that also train on two ranks, and under which plans."""
FAMILIES = "verify/families.py"
QUICK_FAMILIES = ("gpt2", "llama_untied", "mixtral_packed", "vit")
"""Families that `make test` trains; `make prove` trains all."""
QUICK_PLANS = ("fsdp", "tp", "pp")
FP32_FAMILIES = ("deepseek_v3", "gpt_oss", "mixtral")
"""Families whose experts torch.nn.functional.grouped_mm multiplies, which does not take fp64."""


WITHOUT_DATA = ("07-language-models/pretrain.py",)
"""Jobs whose corpus a command prepares; tests/e2e/test_gallery_language.py compares them with plain PyTorch."""


def job_files():
    """Return the files of the gallery that define a Job for torch, by their path below examples/."""
    names = []
    for path in sorted(EXAMPLES.rglob("*.py")):
        name = str(path.relative_to(EXAMPLES))
        if (
            name not in WITHOUT_DATA
            and "mlx" not in name
            and re.search(r"^\S.*= (sw\.)?Job\(|return sw\.Job\(", path.read_text(), re.MULTILINE)
        ):
            names.append(name)
    return names


def jobs_of(name, folder):
    """Import a file of the gallery in `folder`, where it may write, and return its jobs by attribute."""
    path = EXAMPLES / name
    spec = importlib.util.spec_from_file_location(f"golden_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    with contextlib.chdir(folder):
        sys.path.insert(0, str(path.parent))
        try:
            spec.loader.exec_module(module)
        finally:
            sys.path.remove(str(path.parent))
    return {attribute: value for attribute, value in vars(module).items() if isinstance(value, sw.Job)}


def shortened(name, job):
    """Return a job of few steps on small batches."""
    batch = SMALLER.get(name, min(job.batch_size, LARGEST_BATCH))
    return dataclasses.replace(job, batch_size=batch, steps=STEPS, epochs=None, tokens=None)


def checksums(weights):
    """Return shape, sum and 2-norm of every tensor, by name."""
    found = {}
    for name, tensor in sorted(weights.items()):
        values = tensor.detach().to(torch.float64)
        found[name] = [list(tensor.shape), float(values.sum()), float(values.norm())]
    return found


def precision_of(key):
    """Return the precision that a job is trained in."""
    name, attribute, _ = key
    return "fp32" if name == FAMILIES and attribute.startswith(FP32_FAMILIES) else "fp64"


def trained(job, preset, world, precision):
    """Train a job under a preset; return losses and, on rank 0, weights (communicates, on every rank)."""
    plan = sw.Plan.preset(preset, world.size, batch_size=job.batch_size)
    with true_double():
        step = sw.build_step(job, in_double(plan) if precision == "fp64" else plan, world)
        losses = [global_loss(step(batch), world) for batch in step.feed]
    return {"precision": precision, "losses": losses, "weights": checksums(whole_weights(step))}


def load_gallery(folder):
    """Import every file of the gallery in `folder` and return its jobs, shortened, by file and attribute."""
    with corpus(folder):
        return {
            (name, attribute): shortened(name, job)
            for name in job_files()
            for attribute, job in jobs_of(name, folder).items()
        }


def train_gallery(jobs, keys, num_ranks, folder):
    """Train (file, attribute, preset), one after another, on forked ranks; return the results of rank 0 by name."""

    def train_all(world):
        os.chdir(folder)
        with corpus(folder):
            return {":".join(key): trained(jobs[key[:2]], key[2], world, precision_of(key)) for key in keys}

    return run_ranks(train_all, num_ranks, timeout_s=280)[0]


def single_keys(jobs):
    """Return (file, attribute, preset) of every job for one process."""
    return [(*key, "ddp") for key in jobs]


def pair_keys():
    """Return (file, attribute, preset) of the jobs that also train on two ranks."""
    return [(name, "job", preset) for name, presets in PAIRS.items() for preset in presets]


def is_quick(key):
    """Whether `make test` trains this job, too, and not only `make prove`."""
    name, attribute, preset = key
    if preset != "ddp":
        return preset in QUICK_PLANS
    return name != FAMILIES or attribute in QUICK_FAMILIES
