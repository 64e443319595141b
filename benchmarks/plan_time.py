"""Predicted beside measured time of a step, after this machine was calibrated; configurations not used for that.

On a GPU: single-device steps of decoders, eager and with compiled blocks (mean error), then the ten best plans that are
predicted for one job on this device, each measured: the chosen one against the best of them. On a CPU: DDP and FSDP on
two ranks with gloo, whose error is set against the spread of the measured steps.

Each configuration runs in a process of its own; one that fails is printed as FAILED with its reason. `--only` measures
those whose line contains all of the given texts (`--only llama full`), and `--seconds` limits the whole run.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from figures import figure
from isolated import Budget, Failed, run_each
from shardwise.hardware.cluster import this_machine
from shardwise.job import load_job, refer
from shardwise.measurement.calibrate import calibrate
from shardwise.measurement.step import measure_ranks, rehearse
from shardwise.planner.cost.time import predict_time
from shardwise.planner.search.question import Question
from shardwise.planner.search.search import search
from shardwise.planner.trace.trace import describe
from shardwise.plans import Plan, Precision

if TYPE_CHECKING:
    from shardwise.hardware.calibration import Calibration

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


@dataclasses.dataclass(frozen=True, eq=False)
class Setting:
    """One job under one plan on this machine."""

    path: str
    plan: Plan
    calibration: Calibration
    steps: int

    def __str__(self) -> str:
        plan = self.plan
        techniques = f"{plan.recompute:9} compile={plan.compile:6} batch {plan.micro_batch}x{plan.accumulation}"
        return f"{Path(self.path).stem:21} zero{plan.zero} {techniques} {'fused' if plan.fused_loss else ''}"


def compare(setting: Setting) -> dict[str, float]:
    """Return predicted and measured seconds of a step, and the spread of the measured ones."""
    reference, plan = refer(setting.path, {}), setting.plan
    job = dataclasses.replace(load_job(reference), batch_size=plan.batch_size)
    model = describe(job, plan.precision.activations)
    cluster = this_machine(plan.layout.world_size)
    predicted = predict_time(model.for_plan(plan), plan, cluster, setting.calibration).seconds
    if torch.cuda.is_available():
        found = rehearse(job, plan, steps=setting.steps, device="cuda:0").step
    else:
        ranks = measure_ranks(reference, plan, steps=setting.steps)
        found = max(ranks, key=lambda one: one.step.median_s).step
    return {"predicted": predicted, "measured": found.median_s, "spread": found.spread}


def compare_each(settings: list[Setting], budget: Budget, only: list[str]) -> dict[Setting, dict[str, float]]:
    """Measure the settings one after the other and print each in a line; returns those that did not fail."""
    wanted = [setting for setting in settings if all(text in str(setting) for text in only)]
    found = {}
    for setting, result in zip(wanted, run_each(compare, wanted, jobs=1, budget=budget), strict=True):
        if isinstance(result, Failed):
            print(f"{setting} FAILED {result.reason}", flush=True)
            continue
        error = (result["predicted"] / result["measured"] - 1) * 100
        print(
            f"{setting} measured {result['measured'] * 1e3:8.2f} ms (spread {result['spread'] * 100:.0f} %)"
            f" predicted {result['predicted'] * 1e3:8.2f} ({error:+5.1f} %)",
            flush=True,
        )
        found[setting] = result
    return found


def mean_error(results: list[dict[str, float]]) -> float:
    """Return the mean error of predictions in percent."""
    return statistics.mean(abs(one["predicted"] / one["measured"] - 1) * 100 for one in results)


def on_cpu(folder: Path, calibration: Calibration, steps: int, budget: Budget, only: list[str]) -> None:
    """Compare DDP and FSDP on two real ranks."""
    settings = []
    for shape in ON_CPU:
        for name in ("ddp", "fsdp"):
            plan = Plan.preset(name, 2, batch_size=shape["batch"])
            settings.append(Setting(write_job(folder, shape), plan, calibration, steps))
    worst = 0.0
    found = compare_each(settings, budget, only)
    for one in found.values():
        worst = max(worst, abs(one["predicted"] / one["measured"] - 1) / max(0.15, 2 * one["spread"]))
    figure("plan_time.cpu.measured", float(len(found)), f"of-{len(settings)}-configurations")
    if found:
        figure("plan_time.cpu.error_over_allowed", worst, "x", at_most=1)


def on_gpu(folder: Path, calibration: Calibration, steps: int, budget: Budget, only: list[str]) -> None:
    """Compare single-device steps, and the chosen plan with the best of the ten best predicted."""
    precision = Precision(compute="bf16")
    settings = []
    for shape in ON_GPU:
        path, plan = write_job(folder, shape), Plan.preset("ddp", 1, batch_size=shape["batch"])
        for recompute in ("none", "full"):
            changed = dataclasses.replace(plan, precision=precision, recompute=recompute)
            settings.append(Setting(path, changed, calibration, steps))
    compiled = [dataclasses.replace(one, plan=dataclasses.replace(one.plan, compile="blocks")) for one in settings[::6]]
    found = compare_each([*settings, *compiled], budget, only)
    eager = [one for setting, one in found.items() if setting.plan.compile == "none"]
    blocks = [one for setting, one in found.items() if setting.plan.compile == "blocks"]
    figure("plan_time.gpu.measured", float(len(found)), f"of-{len(settings) + len(compiled)}-configurations")
    if eager:
        figure("plan_time.gpu.mean_error", mean_error(eager), "percent", at_most=4)
    if blocks:
        figure("plan_time.gpu.compiled_error", mean_error(blocks), "percent", at_most=8)
    if not only:
        check_choice(write_job(folder, ON_GPU[3]), calibration, steps, budget)


def check_choice(path: str, calibration: Calibration, steps: int, budget: Budget) -> None:
    """Measure the ten plans that are predicted to be fastest, and compare the chosen one with the best of them."""
    question = Question(
        model=describe(load_job(refer(path, {})), "bf16"),
        cluster=this_machine(1),
        calibration=calibration,
        batch_size=32,
        precision=Precision(compute="bf16"),
    )
    answer = search(question, exhaustive=True)
    if answer.best is None:
        print("FAILED: no plan fits", flush=True)
        return
    fastest = sorted(answer.candidates, key=lambda candidate: candidate.time.seconds)[:10]
    plans = [answer.best.plan, *(one.plan for one in fastest if one.plan != answer.best.plan)]
    settings = [Setting(path, plan, calibration, steps) for plan in plans]
    found = compare_each(settings, budget, [])
    chosen = found.get(settings[0])
    if chosen is not None:
        best = min(one["measured"] for one in found.values())
        figure("plan_time.gpu.chosen_over_best", chosen["measured"] / best, f"x-best-of-{len(found)}", at_most=1.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="only those whose line has all texts")
    parser.add_argument("--seconds", type=float, help="limit of the whole run")
    options = parser.parse_args()
    budget, steps = Budget.of(options.seconds), 5 if options.quick else 15
    cuda = torch.cuda.is_available()
    print(f"{torch.cuda.get_device_name() if cuda else 'CPU, two ranks'}, torch {torch.__version__}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        began = time.perf_counter()
        calibration = calibrate(None if cuda else 2, folder=folder)
        figure("plan_time.calibration", time.perf_counter() - began, "s", at_most=60)
        compare_here = on_gpu if cuda else on_cpu
        compare_here(folder, calibration, steps, budget, options.only)


if __name__ == "__main__":
    main()
