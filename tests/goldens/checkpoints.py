"""Checkpoints of version 1 of the tiny job after three of six steps, in fp64, and how the training continues."""

import dataclasses
import shutil

import torch

import shardwise as sw
from goldens.entry import global_loss, in_double, run_directory, run_ranks
from goldens.gallery import checksums
from goldens.store import DATA
from goldens.tiny import job

FOLDER = DATA / "checkpoints"
SAVED_AT = 3
LAYOUTS = {"one": ("ddp", 1), "ddp2": ("ddp", 2), "zero3-2": ("zero3", 2), "tp2": ("tp", 2), "pp2": ("pp", 2)}
"""Name of a checkpoint: the plan it was written under, and on how many ranks."""


def _train(world, preset, path, **options):
    """Train the tiny job; return its report, losses and final weights (communicates, on every rank)."""
    reports = []
    plan = in_double(sw.Plan.preset(preset, world.size, batch_size=job.batch_size))
    observed = dataclasses.replace(job, on_step=reports.append)
    report = sw.train(observed, plan, world, run=run_directory(path), show_progress=False, **options)
    losses = [global_loss(each, world) for each in reports]
    weights = torch.load(path / "weights.pt", weights_only=True) if world.is_main else {}
    return {"first step": report.result.first_step, "losses": losses, "weights": checksums(weights)}


def write_all(folder):
    """Train under every layout, keep the checkpoint of step three, and return the whole training on one process."""
    whole = None
    for name, (preset, num_ranks) in LAYOUTS.items():
        path = folder / name
        results = run_ranks(_train, num_ranks, preset, path, save_every=SAVED_AT, keep="9", resume="never")
        whole = whole or results[0]
        [saved] = [each for each in (path / "checkpoints").iterdir() if each.name.endswith(str(SAVED_AT))]
        shutil.rmtree(FOLDER / name, ignore_errors=True)
        shutil.copytree(saved, FOLDER / name)
    return whole


def resume_all(folder, names, preset, num_ranks):
    """Resume from each of these checkpoints under one plan; return what rank 0 reports, by checkpoint."""

    def body(world):
        found = {}
        for name in names:
            found[name] = _train(world, preset, folder / f"{name}-{preset}", resume=str(FOLDER / name))
        return found

    return run_ranks(body, num_ranks)[0]
