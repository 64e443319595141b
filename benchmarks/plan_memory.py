"""Predicted beside measured memory: rank 0 of fake worlds on one device, configurations drawn by a seeded sampler.

Three architectures (GPT-2, Llama with grouped keys, ResNet) x micro-batch x length x recompute x optimizer x precision
x strategy over worlds of 2 to 64 ranks. All predictions are written down and their hash printed before the first
measurement. On a GPU the measured figure is torch's peak of allocated bytes over the second and third step, when
optimizer states exist; on a CPU it is the bytes of live tensors, in fp32 only, since its kernels keep other things
under autocast. `--peers` prints Accelerate's estimate (four times the parameters) and, where it is installed,
DeepSpeed's (the states of its ZeRO stages).

Ten more configurations (`--new` alone measures them) have what the sampler does not draw: offload, adapters on bf16
weights, float8, compiled blocks, and bf16 or 8-bit optimizer states; on a CPU, only adapters, in fp32. They come first.

Each configuration runs in a process of its own; one that fails is printed as FAILED with its reason. `--only` measures
those whose line contains all of the given texts (`--only resnet bf16`), and `--seconds` limits the whole run.

Last, on a GPU: a configuration predicted to fill 95 % of the device must run, and one of 108 % must not.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import json
import statistics
from pathlib import Path

import torch

import shardwise as sw
from figures import figure
from isolated import Budget, Failed, run_alone, run_each
from peak_operators import PeakOperators
from plan_memory_configurations import Configuration, build, draw, new_configurations, summary
from shardwise.measurement.memory import LiveBytes
from shardwise.measurement.step import settle_gradients
from shardwise.planner.cost.memory import ADAMW, CONTEXT, SGD, predict_memory
from shardwise.planner.trace.trace import describe
from shardwise.testing import fake_world

GIB = 1 << 30


def predict(drawn: Configuration) -> dict:
    """Return predicted bytes and where they go; no tensor is made."""
    job, plan = build(drawn)
    optimizer = ADAMW if drawn.optimizer == "adamw" else dataclasses.replace(SGD, states=1.0)
    shape = describe(job, plan.precision.activations).for_plan(plan)
    memory = predict_memory(shape, plan, optimizer=optimizer, context=CONTEXT if torch.cuda.is_available() else 0.0)
    return {"peak": memory.peak, "total": memory.total, "phase": memory.phase, "parts": dict(memory.at_peak)}


def measure(drawn: Configuration, device: str) -> dict:
    """Train three steps as rank 0; return peak bytes and parameters, or that memory ran out."""
    job, plan = build(drawn)
    torch.set_num_threads(1)
    with fake_world(drawn.ranks, device=device) as world:
        try:
            made: list = []
            # Without communication, gradients may be NaN, and a skipped update would create no states.
            made.append(sw.build_step(job, plan, world, before_update=lambda: settle_gradients(made[0])))
            return measure_step(made[0], device)
        except torch.OutOfMemoryError:
            return {"peak": float("inf")}


def measure_step(step, device: str) -> dict:
    numel = sum(parameter.numel() for _, parameter in step.named_parameters())
    if device == "cpu":
        with LiveBytes("cpu") as live:
            live.watch("parameters", [parameter for _, parameter in step.named_parameters()])
            for batch in step.feed:
                if step(batch).number == 0:
                    live.reset_peak()
        return {"peak": live.peak_bytes, "numel": numel}
    batches = iter(step.feed)
    step(next(batches))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    for batch in batches:
        step(batch)
    torch.cuda.synchronize()
    return {
        "peak": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "outside": torch.cuda.mem_get_info()[1] - torch.cuda.mem_get_info()[0] - torch.cuda.memory_reserved(),
        "numel": numel,
    }


def explain(drawn: Configuration) -> list[str]:
    """Train two steps as rank 0 on a GPU; return the operators of the second with the highest allocated bytes."""
    job, plan = build(drawn)
    with fake_world(drawn.ranks, device="cuda") as world:
        step = sw.build_step(job, plan, world)
        batches = iter(step.feed)
        step(next(batches))
        with PeakOperators() as operators:
            step(next(batches))
        return [str(one) for one in operators.highest(8)]


def peers(drawn: Configuration, numel: int) -> str:
    """Return the estimates of Accelerate and DeepSpeed, in GiB."""
    estimates = [f"accelerate {4 * 4 * numel / GIB:.2f}"]  # its rule for Adam: four times the parameters in fp32
    try:
        from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
        from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs
    except ImportError:
        return estimates[0]
    if drawn.strategy == "zero2":
        estimates.append(
            f"deepspeed {estimate_zero2_model_states_mem_needs(numel, drawn.ranks, 1, False)[1] / GIB:.2f}"
        )
    if drawn.strategy == "zero3":
        estimates.append(
            f"deepspeed {estimate_zero3_model_states_mem_needs(numel, 0, drawn.ranks, 1, False)[1] / GIB:.2f}"
        )
    return ", ".join(estimates)


def check_fill(share: float, budget: Budget) -> bool | None:
    """Return whether a job that is predicted to take this share of the device runs; None if that is unknown."""
    total = torch.cuda.mem_get_info()[1]
    base = Configuration("llama", 2048, 24, 2048, 1, "zero3", 8, "none", "bf16", "adamw", 1)
    sizes = [(dataclasses.replace(base, micro_batch=number)) for number in range(1, 400)]
    nearest = min(sizes, key=lambda drawn: abs(predict_again(drawn) / total - share))
    found = run_alone(measure, nearest, "cuda", limit_s=min(budget.left, 120.0))
    if isinstance(found, Failed):
        print(f"{summary(nearest)} FAILED {found.reason}", flush=True)
        return None
    return found["peak"] != float("inf")


@functools.cache
def shape_of(drawn: Configuration):
    return describe(build(drawn)[0], drawn.precision)


def predict_again(drawn: Configuration) -> float:
    """Return what a configuration takes in all, tracing its model once for all micro-batches."""
    plan = build(drawn)[1]
    return predict_memory(shape_of(dataclasses.replace(drawn, micro_batch=1)).for_plan(plan), plan).total


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="nine configurations")
    parser.add_argument("--new", action="store_true", help="only those with offload, LoRA, float8, compile and states")
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="only those whose line has all texts")
    parser.add_argument("--number", type=int, default=42)
    parser.add_argument("--jobs", type=int, default=1, help="configurations at once")
    parser.add_argument("--seconds", type=float, help="limit of the whole run")
    parser.add_argument("--parts", action="store_true", help="print the predicted parts of each peak")
    parser.add_argument("--explain", action="store_true", help="on a GPU, the operators with the highest peaks")
    parser.add_argument("--peers", action="store_true", help="print the estimates of Accelerate and DeepSpeed, too")
    parser.add_argument("--save", type=Path, help="write every row as JSON")
    return parser.parse_args()


def chosen(options: argparse.Namespace, *, on_gpu: bool) -> list[Configuration]:
    """Return the configurations to measure, those that the sampler does not draw first."""
    found = [] if options.quick and not options.new else new_configurations(on_gpu=on_gpu)
    if not options.new:
        found += draw(9 if options.quick else options.number, on_gpu=on_gpu)
    return [one for one in found if all(text in summary(one) for text in options.only)]


def main() -> None:
    options = parse()
    budget = Budget.of(options.seconds)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    where = torch.cuda.get_device_name() if device == "cuda" else "CPU, live tensors, fp32"
    print(f"{where}, torch {torch.__version__}, rank 0 of fake worlds; GiB", flush=True)
    drawn = chosen(options, on_gpu=device == "cuda")
    predicted = list(run_each(predict, drawn, jobs=options.jobs, budget=budget))
    written = [
        dataclasses.asdict(one) | {"predicted": _plain(result)} for one, result in zip(drawn, predicted, strict=True)
    ]
    digest = hashlib.sha256(json.dumps(written).encode()).hexdigest()
    print(f"predictions of {len(drawn)} configurations, sha256 {digest}", flush=True)
    errors = []
    measured = run_each(functools.partial(measure, device=device), drawn, jobs=options.jobs, budget=budget)
    for row, one, forecast, found in zip(written, drawn, predicted, measured, strict=True):
        row["measured"] = _plain(found)
        error = report(one, forecast, found)
        if error is not None:
            errors.append(error)
        if options.parts and error is not None:
            print(
                "    " + ", ".join(f"{name} {amount / GIB:.3f}" for name, amount in forecast["parts"].items()),
                flush=True,
            )
        if options.explain and error is not None and device == "cuda":
            print_lines(run_alone(explain, one, limit_s=min(budget.left, 120.0)))
    if options.save:
        options.save.write_text(json.dumps(written, indent=1))
    conclude(errors, len(drawn))
    if options.peers:  # last, since to import DeepSpeed changes sys.path
        for one, row in zip(drawn, written, strict=True):
            print(f"{summary(one)} {peers(one, row['measured'].get('numel', 0))}", flush=True)
    if device == "cuda" and not (options.quick or options.new or options.only):
        fits, exceeds = check_fill(0.95, budget), check_fill(1.08, budget)
        if fits is not None:
            figure("plan_memory.fits_at_95", float(fits), "runs", at_least=1)
        if exceeds is not None:
            figure("plan_memory.fails_at_108", float(not exceeds), "fails", at_least=1)


def print_lines(found: list[str] | Failed) -> None:
    for line in [f"FAILED {found.reason}"] if isinstance(found, Failed) else found:
        print(f"    {line}", flush=True)


def _plain(result: dict | Failed) -> dict:
    return {"failed": result.reason} if isinstance(result, Failed) else result


def report(one: Configuration, forecast: dict | Failed, found: dict | Failed) -> float | None:
    """Print a configuration in a line; returns its error in percent, None if it failed."""
    for result in (forecast, found):
        if isinstance(result, Failed):
            print(f"{summary(one)} FAILED {result.reason}", flush=True)
            return None
    if found["peak"] == float("inf"):
        print(f"{summary(one)} FAILED out of memory, predicted {forecast['peak'] / GIB:.3f}", flush=True)
        return None
    error = (forecast["peak"] / found["peak"] - 1) * 100
    print(
        f"{summary(one)} measured {found['peak'] / GIB:7.3f} predicted {forecast['peak'] / GIB:7.3f} ({error:+5.1f} %)"
        f" {forecast['phase']}",
        flush=True,
    )
    return error


def conclude(errors: list[float], number: int) -> None:
    """Print the figures of all configurations that were measured."""
    figure("plan_memory.measured", float(len(errors)), f"of-{number}-configurations", at_least=number)
    if not errors:
        return
    sizes = sorted(abs(error) for error in errors)
    figure("plan_memory.median", statistics.median(sizes), "percent", at_most=1)
    figure("plan_memory.p95", sizes[min(len(sizes) - 1, int(0.95 * len(sizes)))], "percent", at_most=4)
    figure("plan_memory.under", max(0.0, -min(errors)), "percent", at_most=5)


if __name__ == "__main__":
    main()
