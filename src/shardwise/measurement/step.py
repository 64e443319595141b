"""Measuring a step of a job under a plan: time by phase, throughput, utilization and memory; ranks may be fake."""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from shardwise.dist import fake_world, world
from shardwise.environment import identify
from shardwise.errors import InputError, PlanError
from shardwise.job import load_job
from shardwise.measurement.memory import LiveBytes
from shardwise.measurement.profile import StepProfile, profile_steps, profiler_ranges, trace_path
from shardwise.measurement.ranks import rank_zero
from shardwise.measurement.timing import Timing, time_calls, wait_for
from shardwise.parallel.sharded import DTYPES
from shardwise.training.build import build_step
from shardwise.training.step.step import tell

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from shardwise.data.feed import StepBatch
    from shardwise.dist import World
    from shardwise.job import Job, JobReference
    from shardwise.measurement.profile import ProfileSpec
    from shardwise.planner.model.shape import ModelShape, Part
    from shardwise.plans import Plan
    from shardwise.plans.plan import DType
    from shardwise.training.step.step import Step


WARM_UP = 3
"""Steps before the first that counts: the first holds gradients back to look at them, the second finds the allocator's
blocks, a compiled one may compile twice."""
_MEMORY_STEPS = 2
"""On a CPU, steps whose tensors are counted: the first finds them, the second has the peak."""
_TOP = 8


@dataclass(frozen=True, kw_only=True)
class StepMeasurement:
    """What one rank measured over a few steps."""

    plan: str
    rank: int
    world_size: int
    backend: str
    """"fake" where the other ranks were not there: communication then costs nothing."""
    device: str
    step: Timing
    """From the first forward pass to the end of the optimizer."""
    phases: dict[str, float]
    """Median seconds of data, forward, backward (with gradient sync) and optimizer."""
    samples_per_s: float
    """Of the whole world, data included."""
    tokens_per_s: float | None
    """None where samples are not rows of whole numbers."""
    peak_bytes: int
    """Allocated at the highest moment of a step."""
    first_peak_bytes: int
    """The same from the start of building to the end of the first step; on a CPU that is not known, and 0."""
    reserved_bytes: int
    """That the allocator took from a GPU; 0 elsewhere."""
    matmul_flops: float = 0.0
    """Multiplications and additions per second of a large product in the plan's dtype, timed before the steps."""
    at_peak: tuple[tuple[str, int], ...] = field(default=())
    """On a CPU, the largest of what lived at the peak: words, bytes."""
    profile: StepProfile | None = None
    """Of a few more steps, where it was asked for."""

    def figures(self) -> dict[str, float]:
        """Return what can be predicted, by name; units are in the names."""
        found = {
            "step_s": self.step.median_s,
            **{f"{phase}_s": seconds for phase, seconds in self.phases.items()},
            "samples_per_s": self.samples_per_s,
            "tokens_per_s": self.tokens_per_s,
            "peak_bytes": self.peak_bytes,
            "first_peak_bytes": self.first_peak_bytes,
            "reserved_bytes": self.reserved_bytes,
            "matmul_flops": self.matmul_flops,
        }
        return {name: float(value) for name, value in found.items() if value}


def rehearse(
    job: Job, plan: Plan, *, rank: int = 0, steps: int = 5, device: str = "cpu", profile: ProfileSpec | None = None
) -> StepMeasurement:
    """Run `rank` of the plan's world for a few steps on the device at hand; the other ranks are fake."""
    size = plan.layout.world_size
    if not 0 <= rank < size:
        raise InputError(
            f"--rank {rank} is not in a world of {size}", code="bench.rank-out-of-range", fix=f"use 0 to {size - 1}"
        )
    if plan.layout.pp > 1:
        raise PlanError(
            f"plan {plan.layout} has stages, which send each other shapes, and a fake world has nobody to answer",
            code="bench.fake-world-pipeline",
            fix=f"use a plan without pp, or real ranks: --nproc {size}",
        )
    with fake_world(size, rank, device) as here:
        return measure_step(job, plan, here, steps=steps, profile=profile)


def measure_ranks(
    reference: JobReference,
    plan: Plan,
    *,
    steps: int = 5,
    device: str | None = None,
    backend: str | None = None,
    profile: ProfileSpec | None = None,
) -> list[StepMeasurement]:
    """Run a few steps on the plan's ranks, and return what each measured.

    They are started on this machine; in a world that torchrun, srun or `shardwise launch` has started this process is
    one of them, and ranks other than 0 return nothing.
    """
    nproc = plan.layout.world_size if identify().world_size == 1 else None
    return rank_zero(_measure_world, nproc, reference, plan, (device, backend), steps, profile, backend=backend) or []


def _measure_world(
    reference: JobReference,
    plan: Plan,
    where: tuple[str | None, str | None],
    steps: int,
    profile: ProfileSpec | None,
) -> list[StepMeasurement]:
    """Measure as one rank of those that are there; `where` is device and backend. Communicates over all of them."""
    device, backend = where
    with world(device=device, backend=backend) as here:
        found: list[StepMeasurement] = here.gather(
            measure_step(load_job(reference), plan, here, steps=steps, profile=profile)
        )
        return found


def measure_step(
    job: Job, plan: Plan, here: World, *, steps: int = 5, profile: ProfileSpec | None = None
) -> StepMeasurement:
    """Train a few steps of `job` and measure them; called on every rank of the world, over which it communicates."""
    on_gpu = here.device.type == "cuda"
    here.barrier()  # so that ranks that share cores or a GPU are at the same work
    rate = matmul_rate(here.device, plan.precision.compute)
    here.barrier()
    if on_gpu:
        gc.collect()  # a step holds itself in circles, and what an earlier measurement left is not this one's
        torch.cuda.empty_cache()
        _peak(here.device)
    needed = WARM_UP + steps + (profile.steps + 1 if profile else 0) + (0 if on_gpu else _MEMORY_STEPS)
    job = dataclasses.replace(job, steps=needed, epochs=None, tokens=None)
    clock = PhaseClock(here.device)
    step = _build(job, plan, here, clock)
    batches = iter(step.feed)
    first = next(batches)
    step(first)
    first_peak = _peak(here.device)
    for _ in range(WARM_UP - 1):
        step(next(batches))
    _peak(here.device)
    clock.finish()
    step.mark("data", step.number)
    for _ in range(steps):
        step(next(batches))
    times = clock.finish()
    peak = _peak(here.device)
    profiled = _profile(step, batches, here, profile) if profile is not None else None
    at_peak: tuple[tuple[str, int], ...] = ()
    if not on_gpu:
        peak, at_peak = _live_peak(step, batches)
    tokens, period = _tokens_per_sample(first), statistics.median(sum(phases.values()) for phases in times)
    return StepMeasurement(
        plan=str(plan.layout),
        rank=here.rank,
        world_size=here.size,
        backend=here.backend,
        device=torch.cuda.get_device_name(here.device) if on_gpu else "CPU",
        step=Timing.of([sum(phases.values()) - phases["data"] for phases in times]),
        phases={name: statistics.median(phases[name] for phases in times) for name in PHASES},
        samples_per_s=job.batch_size / period,
        tokens_per_s=tokens * job.batch_size / period if tokens else None,
        peak_bytes=peak,
        first_peak_bytes=first_peak,
        reserved_bytes=torch.cuda.max_memory_reserved(here.device) if on_gpu else 0,
        matmul_flops=rate,
        at_peak=at_peak,
        profile=profiled,
    )


def _build(job: Job, plan: Plan, here: World, clock: PhaseClock) -> Step:
    """Make the step, with the clock as its listener; called on every rank."""
    made: list[Step] = []

    def settle() -> None:
        clock.mark("settle", made[0].number)  # no phase of a step
        settle_gradients(made[0])

    before_update = settle if here.backend == "fake" else None
    made.append(build_step(job, plan, here, before_update=before_update, mark=clock.mark))
    return made[0]


def _profile(step: Step, batches: Iterator[StepBatch], here: World, spec: ProfileSpec) -> StepProfile:
    """Profile a few steps, whose phases are ranges in the trace; called on every rank."""
    num_files = 1 if here.backend == "fake" else here.size
    trace = None if spec.trace is None else trace_path(spec.trace, here.rank, num_files)
    unwatched, ranges = step.mark, profiler_ranges()
    step.mark = tell(unwatched, ranges)
    try:
        return profile_steps(lambda: step(next(batches)), here.device, steps=spec.steps, trace=trace)
    finally:
        ranges.close()
        step.mark = unwatched


def _peak(device: torch.device) -> int:
    """Return the most bytes that tensors took on a GPU since the last call, 0 elsewhere; waits for the device."""
    if device.type != "cuda":
        return 0
    wait_for(device)
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return peak


def _live_peak(step: Step, batches: Iterator[StepBatch]) -> tuple[int, tuple[tuple[str, int], ...]]:
    """Count live tensors over two steps; return the peak of the second, and what was the most of it."""
    with LiveBytes("cpu") as live:
        live.watch("parameters", (parameter for _, parameter in step.named_parameters()))
        states = (value for state in step.optimizer.state.values() for value in state.values())
        live.watch("optimizer states", (value for value in states if isinstance(value, torch.Tensor)))
        step(next(batches))
        live.reset_peak()
        step(next(batches))
    top = live.at_peak()[:_TOP]
    words = (
        f"{holding.operator.removeprefix('aten.')}"
        + (f" of {holding.module}" if holding.module else "")
        + (f" in {holding.phase}" if holding.phase else "")
        + f" {list(holding.shape)}"
        + (f" x {holding.count}" if holding.count > 1 else "")
        for holding in top
    )
    return live.peak_bytes, tuple(zip(words, (holding.num_bytes for holding in top), strict=True))


def settle_gradients(step: Step) -> None:
    """Make gradients finite: where communication is left out they may be anything, and NaN skips the optimizer."""
    for _, parameter in step.named_parameters():
        if parameter.grad is not None:
            grad = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
            grad.fill_(1e-3)


def _tokens_per_sample(batch: StepBatch) -> int | None:
    """Return the length of rows of whole numbers, None where the batch has none."""
    found = batch.micro_batches[0].batch
    values = found.values() if isinstance(found, dict) else found
    rows = (value for value in values if isinstance(value, torch.Tensor) and value.ndim == 2)
    return next((value.shape[1] for value in rows if not value.is_floating_point()), None)


def compare(measured: StepMeasurement, predicted: Mapping[str, float] | None) -> list[tuple[str, float, float | None]]:
    """Return (name, measured, predicted) of every figure that was measured."""
    return [(name, value, (predicted or {}).get(name)) for name, value in measured.figures().items()]


# Where the time of a step goes: data, forward, backward and optimizer, without waiting for the device.


PHASES = ("data", "forward", "backward", "optimizer")


class PhaseClock:
    """Listens to a Step's marks and notes when each was made: in the queue of a GPU, by the host's clock elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[str, int, Any]] = []

    def mark(self, phase: str, step: int) -> None:
        """End the phase before and begin this one; one that is not in PHASES is not counted."""
        if self._device.type != "cuda":
            self._marks.append((phase, step, time.perf_counter()))
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append((phase, step, event))

    def finish(self) -> list[dict[str, float]]:
        """Wait for the device; return seconds by phase of each step marked since the last call, in order.

        The last mark ends the phase before it and begins none.
        """
        wait_for(self._device)
        marks, self._marks = self._marks, []
        steps: dict[int, dict[str, float]] = {}
        for (phase, step, began), (_, _, ended) in pairwise(marks):
            if phase in PHASES:
                seconds = began.elapsed_time(ended) / 1e3 if self._device.type == "cuda" else ended - began
                steps.setdefault(step, dict.fromkeys(PHASES, 0.0))[phase] += seconds
        return list(steps.values())


# How much of what a device can multiply a step makes use of.


_WIDTHS = {"cuda": 8192, "cpu": 512}
"""Of the square product: wide enough that a device reaches its rate, small enough for a fraction of a second."""


def matmul_rate(device: torch.device, compute: DType) -> float:
    """Time a large square product; returns multiplications and additions per second.

    In fp32 as torch is set now, in full or in tf32. Called on every rank at once, ranks that share a device share it.
    """
    width = _WIDTHS[device.type] // (2 if compute == "fp64" else 1)  # many GPUs have few units for fp64
    x, y = (torch.randn(width, width, device=device).to(DTYPES[compute]) for _ in range(2))
    return 2.0 * width**3 / time_calls(lambda: x @ y, device, budget_s=0.1).median_s


def training_flops(shape: ModelShape) -> float:
    """Return the multiplications and additions that one sample needs, forward and backward, without recomputation."""
    return sum(part.count * _part_flops(part) for part in shape.parts)


def _part_flops(part: Part) -> float:
    """Each product asks for one more in backward for its input, and one for its weight unless that is frozen."""
    trained = sum(weight.numel for weight in part.weights if weight.trained) / max(1, part.numel)
    products = sum(item.flops for item in part.work.matmuls)
    return (2 + trained) * products + 3 * sum(item.flops for item in part.work.attentions)


def utilisation(found: Sequence[StepMeasurement], flops_per_sample: float) -> float:
    """Return the share of the matmul rate, measured beside the steps, that the whole world's work came to.

    `found` is of all ranks, or of the one rank of a fake world.
    """
    rate = statistics.mean(measured.matmul_flops for measured in found) * found[0].world_size
    return min(measured.samples_per_s for measured in found) * flops_per_sample / rate
