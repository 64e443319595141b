"""Predicted beside measured time of a step, after this machine was calibrated; configurations not used for that.

On a GPU: single-device steps of decoders (mean error), then the ten best plans that are predicted for one job on this
device, each measured: the chosen one against the best of them. On a CPU: DDP and FSDP on two ranks with gloo, whose
error is set against the spread of the measured steps.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
import time
from pathlib import Path

import torch

from figures import figure
from shardwise.hardware.cluster import this_machine
from shardwise.job import load_job, refer
from shardwise.measurement.calibrate import calibrate
from shardwise.measurement.step import measure_ranks, rehearse
from shardwise.planner.cost.time import predict_time
from shardwise.planner.search.search import Question, search
from shardwise.planner.trace.trace import describe
from shardwise.plans import Plan, Precision

JOB = """
import torch
import shardwise as sw


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 4096

    def __getitem__(self, index):
        row = torch.randint(0, {vocabulary}, ({length} + 1,), generator=torch.Generator().manual_seed(index))
        return row[:-1], row[1:]


job = sw.Job(
    model=lambda: sw.models.decoder("{family}", width={width}, num_layers={layers}, num_heads={heads},
                                    vocab_size={vocabulary}, context={length}{more}),
    data=lambda split: Rows() if split == "train" else None,
    loss=sw.losses.token_cross_entropy,
    optimizer=sw.adamw(lr=1e-4),
    batch_size={batch},
    steps=20,
)
"""

ON_CPU = (
    {"family": "gpt2", "width": 256, "layers": 4, "heads": 4, "length": 128, "batch": 16, "vocabulary": 2000},
    {"family": "gpt2", "width": 384, "layers": 3, "heads": 6, "length": 64, "batch": 32, "vocabulary": 1000},
)
ON_GPU = (
    {"family": "gpt2", "width": 768, "layers": 12, "heads": 12, "length": 1024, "batch": 16, "vocabulary": 50_257},
    {"family": "gpt2", "width": 1280, "layers": 24, "heads": 20, "length": 1024, "batch": 8, "vocabulary": 50_257},
    {"family": "gpt2", "width": 1600, "layers": 24, "heads": 25, "length": 512, "batch": 16, "vocabulary": 50_257},
    {"family": "llama3-8b", "width": 2048, "layers": 16, "heads": 16, "length": 2048, "batch": 4, "vocabulary": 32_000},
    {"family": "llama3-8b", "width": 3072, "layers": 10, "heads": 24, "length": 4096, "batch": 2, "vocabulary": 32_000},
)


def write_job(folder: Path, shape: dict) -> str:
    """Write a job's file for one shape; returns its path."""
    more = ""
    if shape["family"].startswith("llama"):
        more = f", num_kv_heads=8, mlp_width={shape['width'] * 7 // 2}"
    path = folder / f"{shape['family'].replace('-', '_')}_{shape['width']}_{shape['length']}.py"
    path.write_text(JOB.format(**shape, more=more))
    return str(path)


def on_cpu(folder: Path, calibration, ranks: int, steps: int) -> None:
    """Compare DDP and FSDP on real ranks."""
    cluster = this_machine(ranks)
    worst = 0.0
    for shape in ON_CPU:
        reference = refer(write_job(folder, shape), {})
        job = load_job(reference)
        model = describe(job, "fp32")
        for name in ("ddp", "fsdp"):
            plan = Plan.preset(name, ranks, batch_size=job.batch_size)
            said = predict_time(model.for_plan(plan), plan, cluster, calibration).seconds
            found = max(measure_ranks(reference, plan, steps=steps), key=lambda one: one.step.median_s).step
            error = abs(said / found.median_s - 1)
            allowed = max(0.15, 2 * found.spread)
            worst = max(worst, error / allowed)
            print(
                f"{Path(reference.path).stem:16} {name:5} measured {found.median_s * 1e3:8.1f} ms predicted"
                f" {said * 1e3:8.1f} ({(said / found.median_s - 1) * 100:+5.1f} %, allowed {allowed * 100:.0f} %)",
                flush=True,
            )
    figure("plan_time.cpu.error_over_allowed", worst, "x", at_most=1)


def on_gpu(folder: Path, calibration, steps: int) -> None:
    """Compare single-device steps, and the chosen plan with the best of the ten best predicted."""
    cluster = this_machine(1)
    precision = Precision(compute="bf16")
    errors = []
    for shape in ON_GPU:
        job = load_job(refer(write_job(folder, shape), {}))
        model = describe(job, "bf16")
        for recompute in ("none", "full"):
            plan = Plan.preset("ddp", 1, batch_size=job.batch_size)
            plan = dataclasses.replace(plan, precision=precision, recompute=recompute)
            errors.append(compare(job, plan, model, (cluster, calibration), steps))
    figure("plan_time.gpu.mean_error", statistics.mean(errors), "percent", at_most=6)
    job = dataclasses.replace(load_job(refer(write_job(folder, ON_GPU[3]), {})), batch_size=32)
    question = Question(
        model=describe(job, "bf16"), cluster=cluster, calibration=calibration, batch_size=32, precision=precision
    )
    answer = search(question, exhaustive=True)
    best = sorted(answer.candidates, key=lambda candidate: candidate.time.seconds)[:10]
    found = {id(one): rehearse(job, one.plan, steps=steps, device="cuda:0").step.median_s for one in best}
    chosen = next((found[id(one)] for one in best if answer.best and one.plan == answer.best.plan), None)
    if chosen is None:
        chosen = rehearse(job, answer.best.plan, steps=steps, device="cuda:0").step.median_s
    figure("plan_time.gpu.chosen_over_best", chosen / min(found.values()), "x-best-of-ten", at_most=1.05)


def compare(job, plan: Plan, model, machine, steps: int) -> float:
    """Print one configuration; returns its error in percent."""
    said = predict_time(model.for_plan(plan), plan, *machine).seconds
    found = rehearse(job, plan, steps=steps, device="cuda:0").step.median_s
    error = (said / found - 1) * 100
    print(
        f"{model.plain.name} {model.plain.numel / 1e6:7.0f}M batch {plan.micro_batch:3} {plan.recompute:9}"
        f" measured {found * 1e3:8.1f} ms predicted {said * 1e3:8.1f} ({error:+5.1f} %)",
        flush=True,
    )
    return abs(error)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    options = parser.parse_args()
    steps = 5 if options.quick else 15
    cuda = torch.cuda.is_available()
    print(f"{torch.cuda.get_device_name() if cuda else 'CPU, two ranks'}, torch {torch.__version__}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        began = time.perf_counter()
        calibration = calibrate(None if cuda else 2, folder=folder)
        figure("plan_time.calibration", time.perf_counter() - began, "s", at_most=60)
        if cuda:
            on_gpu(folder, calibration, steps)
        else:
            on_cpu(folder, calibration, 2, steps)


if __name__ == "__main__":
    main()
