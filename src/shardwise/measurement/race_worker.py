"""Entry point of the process that measures the candidates of a race (`planner/search/race_process.py`), in their order.

A deep model is measured with 2 and with 4 of its repeated blocks, and the time of all blocks follows from the line
through both: a large model is measured in seconds, and one that does not fit into the memory of one rank at all. If a
plan recomputes some of the blocks, these are recomputed, and a third model has 2 blocks that are not. Other ranks are
fake, so compute is real and communication takes no time. A candidate that fails is reported with its reason and does
not affect the next one.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import torch
from torch import nn

from shardwise.dist import fake_world, world
from shardwise.job import load_job
from shardwise.job.schedules import Constant
from shardwise.launcher.local.processes import die_with_parent
from shardwise.measurement.step import settle_gradients
from shardwise.measurement.timing import time_block, wait_for
from shardwise.parallel.meta_model import structure
from shardwise.parallel.recompute import find_blocks
from shardwise.planner.search.race_process import DEVICE_FAILED, RaceSpec, TimedPlan
from shardwise.plans.toml import plan_from_toml
from shardwise.training.build import build_step
from shardwise.training.step.captured import CapturedStep
from shardwise.training.step.step import Step

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.dist import World
    from shardwise.job import Job
    from shardwise.plans import Plan

BLOCKS = (2, 4)
"""Numbers of blocks of the truncated models."""
WARM_UP, CAPTURED_WARM_UP = 3, 5
"""Steps before the timed ones: they compile, create optimizer states and, with a CUDA graph, capture it."""
LEAST_GROUPS, MOST_GROUPS = 3, 20
"""Timed groups of steps, whose median counts; the device is synchronized between groups. Errors of both truncated
models are multiplied by the number of blocks, so a median of many groups is needed."""
GROUP_S = 0.1
"""Seconds of a group: the steps of a group overlap with their launches, as in training."""
MOST_STEPS = 20
"""Steps of a group at most."""


def main() -> int:
    """Measure the plans of the RaceSpec in argv, append each result to its file, and return the exit code."""
    spec = msgspec.json.decode(sys.argv[1], type=RaceSpec)
    die_with_parent(spec.parent_pid)
    plans = [plan_from_toml(text, "the race") for text in spec.plans]
    if spec.device.startswith("cuda"):
        torch.cuda.set_device(spec.device)
    job, results = load_job(spec.reference), Path(spec.results)
    size = plans[0].layout.world_size
    with world(device=spec.device) if size == 1 else fake_world(size, 0, spec.device) as here:
        race = Race(job, here, budget_s=spec.budget_s)
        results.touch()
        for number in range(spec.first, len(plans)):
            if race.left_s <= 0:
                break
            timed = race.measure(number, plans[number], share_s=race.left_s / (len(plans) - number))
            with results.open("ab") as file:
                file.write(msgspec.json.encode(timed) + b"\n")
            if race.has_failed:
                return DEVICE_FAILED
    return 0


class Steps(NamedTuple):
    """The time and memory of the measured steps of one model."""

    step_s: float
    """Median seconds of a step."""
    compile_s: float
    is_captured: bool
    """Whether the step ran as a CUDA graph."""
    peak_bytes: float | None = None
    """Peak of allocated device memory, None on a CPU."""


class Race:
    """Measures plans of one job on one rank within a time limit, to which compilation does not count."""

    def __init__(self, job: Job, here: World, *, budget_s: float, truncates: bool = True) -> None:
        """Prepare the job; without `truncates`, models are measured whole."""
        # A constant rate and a random start: the values of the weights do not change the time of a step.
        self._job = dataclasses.replace(job, schedule=Constant(), weights=None, steps=1, epochs=None, tokens=None)
        self._here = here
        self.left_s = budget_s
        self.has_failed = False
        """Whether the device fails, so that this process can measure nothing more."""
        self._compiling_s = 0.0  # of the plan that is measured
        model = structure(self._job.model, job.seed).module
        self._num_blocks = count_blocks(model) if truncates else None
        self._num_lists = len(block_lists(model))
        self._truncated = {keep: truncated(self._job, keep) for keep in BLOCKS}

    def measure(self, number: int, plan: Plan, *, share_s: float) -> TimedPlan:
        """Return the time of one plan, or its error; `share_s` limits the timed steps."""
        began, self._compiling_s = time.monotonic(), 0.0
        try:
            timed = self._measure(number, plan, share_s)
        except Exception as error:  # noqa: BLE001 - the job's code and the compiler may raise anything
            timed = TimedPlan(number=number, error=describe_error(error))
        try:
            self._free()
        except Exception as error:  # noqa: BLE001 - torch reports a fault of a kernel in any later call
            self.has_failed = True
            timed = TimedPlan(number=number, error=timed.error or describe_error(error))
        measuring_s = max(0.0, time.monotonic() - began - self._compiling_s)
        self.left_s -= measuring_s
        return msgspec.structs.replace(timed, measuring_s=measuring_s, compiling_s=self._compiling_s)

    def _measure(self, number: int, plan: Plan, share_s: float) -> TimedPlan:
        is_alike = self._num_blocks is not None
        if self._num_blocks is not None and (self._num_lists == 1 or not plan.recompute_blocks):
            try:
                return self._extrapolate(number, plan, self._num_blocks, share_s)
            except torch.OutOfMemoryError:
                raise  # the whole model needs even more
            except Exception:  # noqa: BLE001 - forward may need all blocks; the whole model shows the real error
                is_alike = False
            self._free()  # here, because the exception refers to the tensors of its frames
        found = self._time(self._job, plan, share_s)
        if not is_alike:
            self._num_blocks = None
        return TimedPlan(
            number=number,
            step_s=found.step_s,
            compile_s=found.compile_s,
            is_captured=found.is_captured,
            peak_bytes=found.peak_bytes,
        )

    def _extrapolate(self, number: int, plan: Plan, num_blocks: int, share_s: float) -> TimedPlan:
        samples = truncated_plans(plan, num_blocks)
        found = []
        for keep, variant in samples:
            found.append(self._time(self._truncated[keep], variant, share_s / len(samples)))
            self._free()
        num_kept = num_blocks - plan.recompute_blocks
        peaks = [each.peak_bytes for each in found if each.peak_bytes is not None]
        return TimedPlan(
            number=number,
            step_s=extend([each.step_s for each in found], num_blocks, num_kept),
            compile_s=extend([each.compile_s for each in found], num_blocks, num_kept),
            is_captured=all(each.is_captured for each in found),
            peak_bytes=extend(peaks, num_blocks, num_kept) if len(peaks) == len(found) else None,
            blocks=tuple(keep for keep, _ in samples),
        )

    def _time(self, job: Job, plan: Plan, share_s: float) -> Steps:
        """Measure steps of a job that was truncated, or of the whole one."""
        found = time_steps(job, plan, self._here, share_s)
        self._compiling_s += found.compile_s
        return found

    def _free(self) -> None:
        """Free the memory of the last step: reference cycles, compiled graphs and cached device memory."""
        torch.compiler.reset()
        gc.collect()
        if self._here.device.type == "cuda":
            wait_for(self._here.device)
            torch.cuda.empty_cache()


def time_steps(job: Job, plan: Plan, here: World, share_s: float) -> Steps:
    """Return the time and memory of the steps of a plan; for `share_s`, or LEAST_GROUPS groups if these take longer."""
    steps = list[Step]()
    if here.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(here.device)
    # Without communication gradients may be NaN, which would skip the update.
    settle = (lambda: settle_gradients(steps[0])) if here.backend == "fake" else None
    steps.append(build_step(job, plan, here, before_update=settle, report_loss=False))
    step = steps[0]
    batch = next(iter(step.feed))
    num_warm = WARM_UP if plan.capture == "none" else CAPTURED_WARM_UP
    warm_s = [time_block(lambda: step(batch), 1, here.device) for _ in range(num_warm)]
    group = max(1, min(MOST_STEPS, round(GROUP_S / warm_s[-1])))
    groups, began = list[float](), time.monotonic()
    while len(groups) < LEAST_GROUPS or (len(groups) < MOST_GROUPS and time.monotonic() - began < share_s):
        groups.append(time_block(lambda: step(batch), group, here.device) / group)
    step_s = statistics.median(groups)
    compile_s = 0.0
    if plan.compile != "none":
        compile_s = max(0.0, sum(warm_s) - num_warm * step_s)
    peak_bytes = float(torch.cuda.max_memory_allocated(here.device)) if here.device.type == "cuda" else None
    return Steps(step_s, compile_s, isinstance(step, CapturedStep) and step.is_captured, peak_bytes)


def truncated_plans(plan: Plan, num_blocks: int) -> list[tuple[int, Plan]]:
    """Return the numbers of blocks to measure, each with its plan: for `extend`, which returns all blocks from them."""
    if not 0 < plan.recompute_blocks < num_blocks:
        return [(keep, plan) for keep in BLOCKS]
    recomputed = dataclasses.replace(plan, recompute_blocks=0)
    kept = dataclasses.replace(plan, recompute_blocks=0, recompute="none")
    return [*((keep, recomputed) for keep in BLOCKS), (BLOCKS[0], kept)]


def extend(measured: Sequence[float], num_blocks: int, num_kept: int) -> float:
    """Return the time or memory of all blocks, on a line that does not fall, from those of `truncated_plans`.

    If a third value is measured, `num_kept` of the blocks are not recomputed, as both blocks of that model.
    """
    few, many = BLOCKS
    slope = max(0.0, (measured[1] - measured[0]) / (many - few))
    found = measured[0] + slope * (num_blocks - few)
    if len(measured) > len(BLOCKS):
        found += num_kept * (measured[2] - measured[0]) / few
    return max(0.0, found)


def describe_error(error: Exception) -> str:
    """Return the class and the first line of an error."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


# Truncated models: the first blocks of each list of repeated blocks.


def count_blocks(model: nn.Module) -> int | None:
    """Return the number of blocks of every list of repeated blocks; None if a truncated model would not be alike.

    All lists must have the same number of blocks, all blocks of a list the same class and parameters, and there must
    be more blocks than both truncated models have together.
    """
    counts = set()
    for names in block_lists(model).values():
        blocks = [model.get_submodule(name) for name in names]
        if len({_signature(block) for block in blocks}) != 1:
            return None
        counts.add(len(blocks))
    if len(counts) != 1 or min(counts) <= sum(BLOCKS):
        return None
    return counts.pop()


def block_lists(model: nn.Module) -> dict[str, list[str]]:
    """Return the names of the repeated blocks by the name of their ModuleList or Sequential."""
    found: dict[str, list[str]] = {}
    for name in find_blocks(model):
        found.setdefault(name.rpartition(".")[0], []).append(name)
    return found


def _signature(block: nn.Module) -> tuple[object, ...]:
    shapes = [(name, tuple(parameter.shape)) for name, parameter in block.named_parameters()]
    return (type(block), *shapes)


def truncated(job: Job, keep: int) -> Job:
    """Return the job with a model that has only the first `keep` blocks of each list.

    The model is built once and copied for every plan, because the random initialization of a large one takes seconds.
    """
    built = list[nn.Module]()

    def make() -> nn.Module:
        if nn.Linear(1, 1).weight.is_meta:  # a meta model, which has no values to copy
            return _truncate(job.model(), keep)
        if not built:
            built.append(_truncate(job.model(), keep))
        try:
            return copy.deepcopy(built[0])
        except (RuntimeError, TypeError):  # it has an attribute that cannot be copied
            return built.pop()

    return dataclasses.replace(job, model=make)


def _truncate(model: nn.Module, keep: int) -> nn.Module:
    for parent, names in block_lists(model).items():
        blocks = model.get_submodule(parent)
        for name in reversed(names[keep:]):
            del blocks[int(name.rpartition(".")[2])]  # type: ignore[operator]
    return model


if __name__ == "__main__":
    sys.exit(main())
