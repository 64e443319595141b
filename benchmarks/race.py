"""Race: the plan that `--plan auto` measures and chooses on one GPU, against every option measured on the whole model.

For each job, auto chooses as `shardwise train` does: predictions select at most five plans, a child process measures
them on truncated models, and the fastest is chosen. Then every combination of compile, capture and fused_loss, and the
neighbouring micro-batches and recompute levels of the fastest of them, trains a few steps of the whole model. The
figure is the step of the chosen plan in multiples of the best one.

mlp          eight small layers, bound by launches
gpt2         GPT-2 124M, 64 x 1024 tokens
llama        eight blocks of a 1.2-billion-parameter Llama shape, 8 x 2048 tokens
vocabulary   eight blocks of Llama 3.2's 1B shape with its 128,256 tokens, 8 x 2048 tokens
resnet       ResNet-18 on 256 images of 224 x 224
recompute    a 3-billion-parameter Llama shape on one sequence of 32,768 tokens, whose activations do not fit

The choice takes 70 to 100 s, and plans 10 to 60 s each, mostly compilation: `--jobs gpt2 --limit-s 440` fits into ten
minutes, and prints how many plans it left out. Without a GPU, `--quick` tries the script on tiny shapes; its figures
mean nothing there.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
import time
from pathlib import Path

import torch

import shardwise as sw
from figures import figure
from shapes import GPT2, LLAMA_1B, LLAMA_3B
from shardwise.hardware import probe_gpus
from shardwise.job import load_job, refer
from shardwise.measurement.race_worker import Race
from shardwise.planner.search.question import FixedFields
from shardwise.planner.search.race import describe_options, plan_variants, tune_plan
from shardwise.planner.search.search import refused_by_rule
from shardwise.planner.search.subject import job_question, search_plan
from shardwise.planner.settle import Tuning
from step import TINY, mlp_job, text_job

STEPS = 10_000_000
SHORT_LLAMA = dataclasses.replace(LLAMA_1B, num_layers=8)
"""Eight blocks compile in 20 s; auto measures two and four of them."""
WIDE_VOCABULARY = dataclasses.replace(SHORT_LLAMA, num_kv_heads=8, mlp_width=8192, vocab_size=128_256)
LONG = dataclasses.replace(LLAMA_3B, context=32_768)


class Images(torch.utils.data.Dataset):
    """Random images of a thousand kinds."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(3, self.size, self.size, generator=generator), torch.tensor(index % 1000)


def image_job(size: int, rows: int) -> sw.Job:
    return sw.Job(
        model=lambda: sw.models.resnet18(num_classes=1000),
        data=lambda split: Images(size) if split == "train" else None,
        loss=sw.losses.cross_entropy,
        optimizer=sw.adamw(lr=1e-3),
        batch_size=rows,
        steps=STEPS,
    )


# The jobs, which the measuring process loads from this file by their names.


ON_GPU = bool(probe_gpus())  # without CUDA, which the measuring process initializes


def mlp() -> sw.Job:
    return mlp_job(STEPS)


def gpt2() -> sw.Job:
    return text_job(GPT2, 64, STEPS) if ON_GPU else text_job(TINY, 4, STEPS)


def llama() -> sw.Job:
    return text_job(SHORT_LLAMA, 8, STEPS) if ON_GPU else text_job(dataclasses.replace(TINY, num_layers=8), 4, STEPS)


def vocabulary() -> sw.Job:
    config = WIDE_VOCABULARY if ON_GPU else dataclasses.replace(TINY, vocab_size=1000)
    return text_job(config, 8, STEPS)


def resnet() -> sw.Job:
    return image_job(224, 256) if ON_GPU else image_job(32, 4)


def recompute() -> sw.Job:
    return text_job(LONG, 1, STEPS) if ON_GPU else text_job(TINY, 1, STEPS)


JOBS = ("mlp", "gpt2", "llama", "vocabulary", "resnet", "recompute")


def choose(name: str, device: str) -> tuple[sw.Plan, sw.Plan, float]:
    """Return the predicted plan, the plan that auto chooses, and the seconds of the choice, with an empty cache."""
    reference = refer(f"{__file__}:{name}", {})
    job = load_job(reference)
    predicted, why = search_plan(job, FixedFields(), 1)
    if predicted is None:
        raise SystemExit(f"{name}: a plan {why}")
    with tempfile.TemporaryDirectory() as folder:
        tuning = Tuning(reference=reference, note=print, device=device, folder=Path(folder))
        began = time.perf_counter()
        chosen = tune_plan(job, predicted, tuning, fixed=())
        seconds = time.perf_counter() - began
    for field in ("compile", "capture", "fused_loss", "recompute", "micro_batch"):
        print(f"  auto: {field} = {getattr(chosen, field)} ({chosen.source(field)})")
    return predicted, chosen, seconds


class Exhaustive:
    """Measures plans of one job on the whole model until a deadline."""

    def __init__(self, job: sw.Job, world: sw.World, deadline: float) -> None:
        self._race = Race(job, world, budget_s=1e9, truncates=False)
        self._deadline = deadline
        self.seconds: dict[sw.Plan, float] = {}
        self.num_left_out = 0

    def measure(self, plans: list[sw.Plan], *, always: bool = False) -> None:
        """Measure plans that were not measured before, and print each; `always` ignores the deadline."""
        for plan in plans:
            if plan in self.seconds:
                continue
            if time.monotonic() > self._deadline and not always:
                self.num_left_out += 1
                continue
            began = time.monotonic()
            timed = self._race.measure(0, plan, share_s=3.0)
            result = timed.error or f"{timed.step_s * 1e3:10.3f} ms, {timed.compile_s:5.1f} s of compilation"
            print(f"  {describe_options(plan):110} {result} ({time.monotonic() - began:.0f} s)", flush=True)
            self.seconds[plan] = float("inf") if timed.error else timed.step_s

    @property
    def best(self) -> sw.Plan:
        """The fastest plan."""
        return min(self.seconds, key=lambda plan: self.seconds[plan])


def race_job(name: str, device: str, limit_s: float) -> None:
    """Print the figures of one job; after the choice, no plan is begun later than `limit_s`."""
    print(name)
    predicted, chosen, seconds = choose(name, device)
    deadline = time.monotonic() + limit_s
    job = load_job(refer(f"{__file__}:{name}", {}))
    question = job_question(job, 1)[1]
    plans = [plan for plan in plan_variants(job, predicted, question, ()) if not refused_by_rule(question, plan)]
    fields = ("micro_batch", "recompute")

    def alike(plan: sw.Plan, other: sw.Plan, names: tuple[str, ...]) -> bool:
        return all(getattr(plan, each) == getattr(other, each) for each in names)

    with sw.world(device=device) as world:
        found = Exhaustive(job, world, deadline)
        found.measure([chosen, predicted], always=True)
        found.measure([plan for plan in plans if alike(plan, predicted, fields)])
        best = found.best
        found.measure([plan for plan in plans if alike(plan, best, ("compile", "capture", "fused_loss"))])
    ratio = found.seconds[chosen] / found.seconds[found.best]
    print(f"  best: {describe_options(found.best)}; {len(found.seconds)} plans measured, {found.num_left_out} left out")
    goal = {"at_most": 1.03} if not found.num_left_out else {}  # the best plan may be among those left out
    figure(f"race.{name}.chosen", ratio, "x-best", **goal)
    figure(f"race.{name}.predicted", found.seconds[predicted] / found.seconds[found.best], "x-best")
    figure(f"race.{name}.duration", seconds, "s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="tiny shapes, without a GPU")
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--limit-s", type=float, default=3600.0, help="seconds of each job after its choice")
    options = parser.parse_args()
    if not ON_GPU and not options.quick:
        print("no CUDA device: the race is measured on a GPU only (--quick tries the script on the CPU)")
        return
    torch.set_float32_matmul_precision("high")
    for name in options.jobs:
        race_job(name, "cuda:0" if ON_GPU else "cpu", options.limit_s)


if __name__ == "__main__":
    main()
