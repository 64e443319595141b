"""Measures training steps of a plan on real or fake ranks: time by phase, throughput, utilization and memory."""

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
from shardwise.measurement.specs import rank_zero
from shardwise.measurement.timing import Timing, time_calls, wait_for
from shardwise.parallel.sharded import DTYPES
from shardwise.training.build import build_step
from shardwise.training.step.step import combine_marks

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from shardwise.data.feed import StepBatch
    from shardwise.dist import World
    from shardwise.job import Job, JobReference
    from shardwise.measurement.memory import LiveMemory
    from shardwise.measurement.profile import ProfileSpec
    from shardwise.planner.model.shape import ModelShape, Part
    from shardwise.plans import Plan
    from shardwise.plans.sections import DType
    from shardwise.training.step.step import Step


WARM_UP = 3
"""Warm-up steps: the first also checks gradients, the second fills the cache of the allocator, and a compiled step may
compile twice."""
_MEMORY_STEPS = 2
"""Steps in which live tensors are counted on a CPU: the first finds the storages, the second measures the peak."""
_TOP = 8


@dataclass(frozen=True, kw_only=True)
class StepMeasurement:
    """The measurements of a few training steps on one rank."""

    plan: str
    rank: int
    world_size: int
    backend: str
    """"fake" if the other ranks were fake, so that communication took no time."""
    device: str
    step: Timing
    """Time from the first forward pass to the end of the optimizer step."""
    phases: dict[str, float]
    """Median seconds of data, forward, backward (with gradient sync) and optimizer."""
    samples_per_s: float
    """Throughput of all ranks, including the time to load data."""
    tokens_per_s: float | None
    """None if samples are not sequences of integers."""
    peak_bytes: int
    """Peak of allocated memory in a step."""
    first_peak_bytes: int
    """Peak from the start of building to the end of the first step; 0 on a CPU, where it is unknown."""
    reserved_bytes: int
    """Memory that the allocator reserved on a GPU; 0 on a CPU."""
    matmul_flops: float = 0.0
    """FLOP/s of a large matrix product in the plan's dtype, timed before the steps."""
    at_peak: tuple[tuple[str, int], ...] = field(default=())
    """On a CPU, the largest tensors at the peak: description, bytes."""
    profile: StepProfile | None = None
    """Profile of a few more steps, if it was requested."""

    def figures(self) -> dict[str, float]:
        """Return all nonzero measurements by name; the names end with the units."""
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
    """Measure a few steps of one rank in a fake world, whose other ranks do not run."""
    size = plan.layout.world_size
    if not 0 <= rank < size:
        raise InputError(
            f"--rank must be below the world size of {size}, got {rank}",
            code="bench.rank-out-of-range",
            fix=f"use --rank 0 to {size - 1}",
        )
    if plan.layout.pp > 1:
        raise PlanError(
            f"plan {plan.layout} has {plan.layout.pp} pipeline stages, but fake ranks do not send activations",
            code="bench.fake-world-pipeline",
            fix=f"use a plan without pp, or replace --fake-world with --nproc {size}",
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
    """Run a few steps of a job on all ranks of the plan, and return the measurements of each rank.

    The ranks are started on this machine. In a world that torchrun, srun or `shardwise launch` started, this process
    is one of the ranks, and ranks other than 0 return an empty list.
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
    """Measure steps on `where`, a device and a backend. Communicates over the world; call on every rank."""
    device, backend = where
    with world(device=device, backend=backend) as here:
        found: list[StepMeasurement] = here.gather(
            measure_step(load_job(reference), plan, here, steps=steps, profile=profile)
        )
        return found


def measure_step(
    job: Job, plan: Plan, here: World, *, steps: int = 5, profile: ProfileSpec | None = None
) -> StepMeasurement:
    """Train a few steps of `job` and measure them. Communicates over the world; call on every rank."""
    on_gpu = here.device.type == "cuda"
    here.barrier()  # so that ranks that share cores or a GPU measure at the same time
    rate = matmul_rate(here.device, plan.precision.activations)
    here.barrier()
    if on_gpu:
        gc.collect()  # frees the reference cycles of a step of an earlier measurement
        torch.cuda.empty_cache()
        _peak(here.device)
    needed = WARM_UP + steps
    if profile is not None:
        needed += profile.steps + 1
    if not on_gpu:
        needed += _MEMORY_STEPS
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
    """Build the training step and record its phases with `clock`; call on every rank."""
    made: list[Step] = []

    def settle() -> None:
        clock.mark("settle", made[0].number)  # ends the backward phase and is not counted
        settle_gradients(made[0])

    before_update = settle if here.backend == "fake" else None
    made.append(build_step(job, plan, here, before_update=before_update, mark=clock.mark))
    return made[0]


def _profile(step: Step, batches: Iterator[StepBatch], here: World, spec: ProfileSpec) -> StepProfile:
    """Profile a few steps and record their phases as ranges in the trace; call on every rank."""
    num_files = 1 if here.backend == "fake" else here.size
    trace = None if spec.trace is None else trace_path(spec.trace, here.rank, num_files)
    own_mark, ranges = step.mark, profiler_ranges()
    step.mark = combine_marks(own_mark, ranges)
    try:
        return profile_steps(lambda: step(next(batches)), here.device, steps=spec.steps, trace=trace)
    finally:
        ranges.close()
        step.mark = own_mark


def _peak(device: torch.device) -> int:
    """Return the peak bytes of tensors on a GPU since the last call, 0 on a CPU; synchronizes with the device."""
    if device.type != "cuda":
        return 0
    wait_for(device)
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return peak


def _live_peak(step: Step, batches: Iterator[StepBatch]) -> tuple[int, tuple[tuple[str, int], ...]]:
    """Count live tensors over two steps; return the peak of the second step and its largest tensors.

    Compiled regions run eagerly, since torch.compile does not run under a mode that sees every operator.
    """
    with torch.compiler.set_stance("force_eager"), LiveBytes("cpu") as live:
        live.watch("parameters", (parameter for _, parameter in step.named_parameters()))
        states = (value for state in step.optimizer.state.values() for value in state.values())
        live.watch("optimizer states", (value for value in states if isinstance(value, torch.Tensor)))
        step(next(batches))
        live.reset_peak()
        step(next(batches))
    top = live.at_peak()[:_TOP]
    return live.peak_bytes, tuple((_describe(memory), memory.num_bytes) for memory in top)


def _describe(memory: LiveMemory) -> str:
    """Return operator, module, phase, shape and count of live tensors as text."""
    text = memory.operator.removeprefix("aten.")
    if memory.module:
        text += f" of {memory.module}"
    if memory.phase:
        text += f" in {memory.phase}"
    text += f" {list(memory.shape)}"
    if memory.count > 1:
        text += f" x {memory.count}"
    return text


def settle_gradients(step: Step) -> None:
    """Fill gradients with a constant; without communication they may be NaN, which would skip the optimizer step."""
    for _, parameter in step.named_parameters():
        if parameter.grad is not None:
            grad = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
            grad.fill_(1e-3)


def _tokens_per_sample(batch: StepBatch) -> int | None:
    """Return the sequence length of the first 2D integer tensor of a batch, or None."""
    found = batch.micro_batches[0].batch
    values = found.values() if isinstance(found, dict) else found
    rows = (value for value in values if isinstance(value, torch.Tensor) and value.ndim == 2)
    return next((value.shape[1] for value in rows if not value.is_floating_point()), None)


def compare(measured: StepMeasurement, predicted: Mapping[str, float] | None) -> list[tuple[str, float, float | None]]:
    """Return (name, measured, predicted) of every measured value."""
    return [(name, value, (predicted or {}).get(name)) for name, value in measured.figures().items()]


# The time of a step by phase: data, forward, backward and optimizer, without device synchronization.


PHASES = ("data", "forward", "backward", "optimizer")


class PhaseClock:
    """Records the time of a Step's marks: by CUDA events on a GPU, by the host's clock on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[str, int, Any]] = []

    def mark(self, phase: str, step: int) -> None:
        """Record the end of the previous phase and the start of `phase`; only phases in PHASES are counted."""
        if self._device.type != "cuda":
            self._marks.append((phase, step, time.perf_counter()))
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append((phase, step, event))

    def finish(self) -> list[dict[str, float]]:
        """Synchronize with the device; return seconds by phase of each step since the last call, in order.

        The last mark only ends the previous phase.
        """
        wait_for(self._device)
        marks, self._marks = self._marks, []
        steps: dict[int, dict[str, float]] = {}
        for (phase, step, began), (_, _, ended) in pairwise(marks):
            if phase in PHASES:
                seconds = began.elapsed_time(ended) / 1e3 if self._device.type == "cuda" else ended - began
                steps.setdefault(step, dict.fromkeys(PHASES, 0.0))[phase] += seconds
        return list(steps.values())


# Utilization: the FLOP/s of a step as a fraction of the matmul rate of the device.


_WIDTHS = {"cuda": 8192, "cpu": 512}
"""Width of the square product: large enough to reach the rate of a device, small enough for a fraction of a second."""


def matmul_rate(device: torch.device, compute: DType) -> float:
    """Return the FLOP/s of a large square matrix product in a dtype.

    fp32 uses TF32 if torch allows it. Call this on every rank at the same time, since ranks may share a device.
    """
    width = _WIDTHS[device.type] // (2 if compute == "fp64" else 1)  # many GPUs have few units for fp64
    x, y = (torch.randn(width, width, device=device).to(DTYPES[compute]) for _ in range(2))
    return 2.0 * width**3 / time_calls(lambda: x @ y, device, budget_s=0.1).median_s


def training_flops(shape: ModelShape) -> float:
    """Return the FLOPs of one sample in forward and backward, without recomputation."""
    return sum(part.count * _part_flops(part) for part in shape.parts)


def _part_flops(part: Part) -> float:
    """Return the FLOPs of a part; backward has a product for each input gradient and each trained weight's gradient."""
    trained = sum(weight.numel for weight in part.weights if weight.trained) / max(1, part.numel)
    products = sum(item.flops for item in part.work.matmuls)
    return (2 + trained) * products + 3 * sum(item.flops for item in part.work.attentions)


def utilisation(found: Sequence[StepMeasurement], flops_per_sample: float) -> float:
    """Return the model FLOPs utilization: the FLOP/s of a step as a fraction of the measured matmul rate.

    `found` has the measurements of all ranks, or of the one rank of a fake world.
    """
    rate = statistics.mean(measured.matmul_flops for measured in found) * found[0].world_size
    return min(measured.samples_per_s for measured in found) * flops_per_sample / rate
