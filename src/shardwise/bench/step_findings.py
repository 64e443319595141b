"""Findings of a measured step beside what the planner predicts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.bench.report.findings import Bars, Findings, Section, Table
from shardwise.bench.step import PHASES, WARM_UP, compare
from shardwise.hardware.calibration import calibration_for
from shardwise.hardware.cluster import this_machine
from shardwise.planner.cost.memory import predict_memory
from shardwise.planner.cost.time import WAITING, predict_time
from shardwise.planner.search.subject import optimizer_shape

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from shardwise.bench.profile import StepProfile
    from shardwise.bench.step import StepMeasurement
    from shardwise.job import Job
    from shardwise.planner.model.forms import Model
    from shardwise.plans import Plan
    from shardwise.plans.plan import DType


_UNITS = (
    ("_bytes", 2**20, "MiB"),
    ("_flops", 1e9, "GFLOP/s"),
    ("_per_s", 1.0, "/s"),
    ("_s", 1e-3, "ms"),
    ("utilisation", 0.01, "%"),
)
_LABELS = {
    "peak": "peak memory",
    "first_peak": "peak at start",
    "matmul_flops": "matmul rate",
}
_SHARES = ("compute", "communication exposed", "idle")


def slowest(found: Sequence[StepMeasurement]) -> StepMeasurement:
    """Return the rank whose steps took longest, for which all others wait."""
    return max(found, key=lambda measured: measured.step.median_s)


def label(name: str) -> str:
    """Return the words for a figure."""
    stem = name.removesuffix("_bytes").removesuffix("_s").removesuffix("_per")
    return _LABELS.get(stem, stem)


def shown(name: str, value: float) -> str:
    """Return a figure in the unit that its name ends with."""
    unit, size = next((unit, size) for ending, size, unit in _UNITS if name.endswith(ending))
    return f"{value / size:,.2f} {unit}"


def step_findings(
    found: Sequence[StepMeasurement],
    *,
    predicted: Mapping[str, float] | None,
    used: float | None,
    facts: tuple[tuple[str, str], ...],
) -> Findings:
    """Return what to show of all ranks' measurements; `used` is the share of the matmul rate, if it is known."""
    worst = slowest(found)
    sections = [_time(found, worst), _figures(worst, predicted, used), *_memory(worst)]
    if worst.profile is not None:
        sections.append(_profile([measured.profile for measured in found if measured.profile], worst.profile))
    return Findings(
        title=f"A step of plan {worst.plan} on {worst.world_size} {'rank' if worst.world_size == 1 else 'ranks'}",
        verdict=_verdict(worst, used),
        facts=(*facts, ("device", worst.device), ("backend", worst.backend)),
        method=_method(worst),
        sections=tuple(sections),
    )


def _verdict(worst: StepMeasurement, used: float | None) -> str:
    longest = max(PHASES, key=lambda phase: worst.phases[phase])
    share = worst.phases[longest] / max(sum(worst.phases.values()), 1e-12)
    words = f"A step takes {shown('_s', worst.step.median_s)}, {worst.samples_per_s:,.0f} samples/s"
    if used is not None:
        words += f", {used:.0%} of the rate of matrix products measured beside it"
    return f"{words}; most of it is {longest} ({share:.0%})."


def _time(found: Sequence[StepMeasurement], worst: StepMeasurement) -> Section:
    rows = tuple((f"rank {m.rank}", tuple(m.phases[phase] * 1e3 for phase in PHASES)) for m in found)
    return Section(
        title="Time by phase",
        text=f"Medians over {worst.step.repeats} steps; spread {worst.step.spread:.1%} of rank {worst.rank}'s.",
        parts=(Bars(title="A step of each rank", unit="ms", parts=PHASES, rows=rows),),
    )


def _figures(worst: StepMeasurement, predicted: Mapping[str, float] | None, used: float | None) -> Section:
    rows = [
        (label(name), shown(name, value), "" if expected is None else shown(name, expected))
        for name, value, expected in compare(worst, predicted)
    ]
    if used is not None:
        rows.append(("utilisation", shown("utilisation", used), ""))
    return Section(
        title=f"Figures of rank {worst.rank}",
        text="The slowest rank, for which the others wait.",
        parts=(Table(header=("figure", "measured", "predicted"), rows=tuple(rows)),),
    )


def _memory(worst: StepMeasurement) -> list[Section]:
    if not worst.at_peak:
        return []
    rows = tuple((shown("_bytes", num_bytes), words) for words, num_bytes in worst.at_peak)
    return [Section(title="Alive at the peak", parts=(Table(header=("bytes", "made by"), rows=rows),))]


def _profile(profiles: Sequence[StepProfile], worst: StepProfile) -> Section:
    rows = tuple(
        (f"rank {rank}", (each.compute_s * 1e3, each.exposed_s * 1e3, each.idle_s * 1e3))
        for rank, each in enumerate(profiles)
    )
    hidden = 1 - worst.exposed_s / worst.communication_s if worst.communication_s else 0.0
    communication = (
        f" Communication takes {worst.communication_s / worst.seconds:.0%} of a step, {hidden:.0%} of it behind"
        " compute."
        if worst.communication_s
        else " Nothing is communicated."
    )
    kernels = Table(
        header=(worst.kind[:-1], "calls", "ms a step", "of the step"),
        rows=tuple(
            (kernel.name, f"{kernel.calls:g}", f"{kernel.seconds * 1e3:.3f}", f"{kernel.seconds / worst.seconds:.1%}")
            for kernel in worst.top
        ),
    )
    return Section(
        title=f"By {worst.kind}",
        text=f"{worst.steps} more steps under torch's profiler, which itself takes time.{communication}",
        parts=(Bars(title="A profiled step of each rank", unit="ms", parts=_SHARES, rows=rows), kernels),
    )


def _method(worst: StepMeasurement) -> tuple[str, ...]:
    on_cpu = worst.device == "CPU"
    clock = "by the host's clock" if on_cpu else "by events in the GPU's queue"
    memory = (
        "Memory is the bytes of live tensors, counted operator by operator in two more steps."
        if on_cpu
        else "Memory is the peak of torch's allocator over the measured steps."
    )
    fake = ("Other ranks were fake: communication costs nothing here.",) if worst.backend == "fake" else ()
    return (
        f"{WARM_UP} steps warm up, {worst.step.repeats} are timed {clock}; no step waits for the device.",
        "Backward includes the sum of gradients over ranks; the time of a step leaves data out, throughput has it in.",
        "The matmul rate is of a large square product in the plan's compute dtype, timed on all ranks beforehand.",
        "Utilisation is what forward and backward must multiply and add, over that rate; recomputing does not count.",
        memory,
        *fake,
    )


# What planning says of a step that is about to be measured, under the names of what is measured.


def predict_step(job: Job, plan: Plan, describe: Callable[[Job, DType], Model], *, processes: int) -> dict[str, float]:
    """Return predicted figures of one rank on this machine, where `processes` of them run; in a fake world 1.

    What compute waits for others is left out in a fake world, since nothing is sent there.
    """
    cluster = this_machine(processes)
    shape = describe(job, plan.precision.compute).for_plan(plan)
    optimizer = optimizer_shape(job.optimizer)
    calibration = calibration_for(cluster.node)
    memory = predict_memory(shape, plan, optimizer=optimizer, context=calibration.context_bytes.value)
    time = predict_time(shape, plan, cluster, calibration, optimizer=optimizer)
    alone = processes < plan.layout.world_size
    seconds = time.seconds - (sum(time.parts.get(name, 0.0) for name in WAITING) if alone else 0.0)
    return {"step_s": seconds, "peak_bytes": memory.peak}
