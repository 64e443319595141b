"""`bench step`: measures training steps, and reports them with the predictions of the planner."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from shardwise.environment import identify
from shardwise.errors import InputError, JobError
from shardwise.hardware.calibration import calibration_for
from shardwise.hardware.cluster import this_machine
from shardwise.measurement.profile import ProfileSpec, StepProfile, check_trace_path
from shardwise.measurement.report import BenchReport, machine_facts
from shardwise.measurement.specs import load_torch_job
from shardwise.measurement.step import (
    PHASES,
    WARM_UP,
    StepMeasurement,
    compare,
    measure_ranks,
    rehearse,
    training_flops,
    utilisation,
)
from shardwise.planner.cost.memory import predict_memory
from shardwise.planner.cost.time import WAITING, predict_time
from shardwise.planner.search.subject import describe_job, optimizer_shape
from shardwise.planner.settle import local_device, settle, split_settings
from shardwise.plots.figures import Bars, Table
from shardwise.plots.page import Findings, Section
from shardwise.runs.console import counted, echo_error
from shardwise.runs.data_wait import NOTED_SHARE, faster_data

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from shardwise.environment import Identity
    from shardwise.job import Job
    from shardwise.measurement.specs import StepSpec
    from shardwise.planner.model.forms import Model
    from shardwise.plans import Plan
    from shardwise.plans.sections import DType


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
    """Return the measurements of the slowest rank, for which all others wait."""
    return max(found, key=lambda measured: measured.step.median_s)


def label(name: str) -> str:
    """Return the label of a measurement in reports."""
    stem = name.removesuffix("_bytes").removesuffix("_s").removesuffix("_per")
    return _LABELS.get(stem, stem)


def shown(name: str, value: float) -> str:
    """Format a value in the unit that its name ends with."""
    unit, size = next((unit, size) for ending, size, unit in _UNITS if name.endswith(ending))
    return f"{value / size:,.2f} {unit}"


def step_findings(
    found: Sequence[StepMeasurement],
    *,
    predicted: Mapping[str, float] | None,
    used: float | None,
    facts: tuple[tuple[str, str], ...],
) -> Findings:
    """Return the content of the report; `used` is the utilization, or None if it is unknown."""
    worst = slowest(found)
    sections = [_time(found, worst), _figures(worst, predicted, used), *_memory(worst)]
    if worst.profile is not None:
        sections.append(_profile([measured.profile for measured in found if measured.profile], worst.profile))
    return Findings(
        title=f"A step of plan {worst.plan} on {counted(worst.world_size, 'rank')}",
        verdict=_verdict(worst, used),
        facts=(*facts, ("device", worst.device), ("backend", worst.backend)),
        method=_method(worst),
        sections=tuple(sections),
    )


def _verdict(worst: StepMeasurement, used: float | None) -> str:
    longest = max(PHASES, key=lambda phase: worst.phases[phase])
    share = worst.phases[longest] / max(sum(worst.phases.values()), 1e-12)
    speed = f"A step takes {shown('_s', worst.step.median_s)}, {worst.samples_per_s:,.0f} samples/s"
    if used is not None:
        speed += f", {used:.0%} of the measured matmul rate"
    return f"{speed}; most of the time is {longest} ({share:.0%}).{_waits_for_data(worst)}"


def _waits_for_data(worst: StepMeasurement) -> str:
    """Return a sentence with its fix if the measured steps wait for data, else an empty text."""
    waited = worst.phases["data"] / max(sum(worst.phases.values()), 1e-12)
    if waited <= NOTED_SHARE:
        return ""
    return f" Steps wait for data {waited:.0%} of the time: {faster_data(None)}."


def _time(found: Sequence[StepMeasurement], worst: StepMeasurement) -> Section:
    rows = tuple((f"rank {m.rank}", tuple(m.phases[phase] * 1e3 for phase in PHASES)) for m in found)
    return Section(
        title="Time by phase",
        text=f"Medians over {worst.step.repeats} steps; the spread of rank {worst.rank} is {worst.step.spread:.1%}.",
        parts=(Bars(title="A step of each rank", unit="ms", parts=PHASES, rows=rows),),
    )


def _figures(worst: StepMeasurement, predicted: Mapping[str, float] | None, used: float | None) -> Section:
    rows = []
    for name, value, expected in compare(worst, predicted):
        prediction = "" if expected is None else shown(name, expected)
        rows.append((label(name), shown(name, value), prediction))
    if used is not None:
        rows.append(("utilisation", shown("utilisation", used), ""))
    return Section(
        title=f"Measurements of rank {worst.rank}",
        text="This is the slowest rank; the other ranks wait for it.",
        parts=(Table(header=("name", "measured", "predicted"), rows=tuple(rows)),),
    )


def _memory(worst: StepMeasurement) -> list[Section]:
    if not worst.at_peak:
        return []
    rows = tuple((shown("_bytes", num_bytes), description) for description, num_bytes in worst.at_peak)
    return [Section(title="Live tensors at the peak", parts=(Table(header=("bytes", "allocated by"), rows=rows),))]


def _profile(profiles: Sequence[StepProfile], worst: StepProfile) -> Section:
    rows = tuple(
        (f"rank {rank}", (each.compute_s * 1e3, each.exposed_s * 1e3, each.idle_s * 1e3))
        for rank, each in enumerate(profiles)
    )
    communication = "The step does not communicate."
    if worst.communication_s:
        hidden = 1 - worst.exposed_s / worst.communication_s
        share = worst.communication_s / worst.seconds
        communication = f"Communication takes {share:.0%} of a step, of which compute hides {hidden:.0%}."
    kernels = Table(
        header=(worst.kind[:-1], "calls", "ms per step", "share of the step"),
        rows=tuple(
            (kernel.name, f"{kernel.calls:g}", f"{kernel.seconds * 1e3:.3f}", f"{kernel.seconds / worst.seconds:.1%}")
            for kernel in worst.top
        ),
    )
    return Section(
        title=f"By {worst.kind}",
        text=f"{worst.steps} more steps under torch's profiler, which adds overhead. {communication}",
        parts=(Bars(title="A profiled step of each rank", unit="ms", parts=_SHARES, rows=rows), kernels),
    )


def _method(worst: StepMeasurement) -> tuple[str, ...]:
    on_cpu = worst.device == "CPU"
    clock = "by CUDA events"
    memory = "Memory is the peak of torch's allocator over the measured steps."
    if on_cpu:
        clock = "by the host's clock"
        memory = "Memory is the bytes of live tensors, counted at every operator in two more steps."
    fake = ("The other ranks were fake, so communication took no time.",) if worst.backend == "fake" else ()
    return (
        f"After {WARM_UP} warm-up steps, {worst.step.repeats} steps are timed {clock}, without synchronization.",
        "Backward includes gradient synchronization; the time of a step excludes data, throughput includes it.",
        "The matmul rate is that of a large square product in the plan's compute dtype, timed on all ranks before.",
        "Utilisation is the FLOPs of forward and backward, without recomputation, relative to that rate.",
        memory,
        *fake,
    )


# The planner's predictions of a step, under the names of the measurements.


def predict_step(job: Job, plan: Plan, describe: Callable[[Job, DType], Model], *, processes: int) -> dict[str, float]:
    """Predict the seconds of a step and the peak memory of one rank on this machine, which runs `processes` ranks.

    In a fake world, `processes` is 1, and the prediction excludes the time of communication.
    """
    cluster = this_machine(processes)
    shape = describe(job, plan.precision.activations).for_plan(plan)
    optimizer = optimizer_shape(job)
    calibration = calibration_for(cluster.node)
    memory = predict_memory(shape, plan, optimizer=optimizer, context=calibration.context_bytes.value)
    time = predict_time(shape, plan, cluster, calibration, optimizer=optimizer)
    alone = processes < plan.layout.world_size
    seconds = time.seconds - (sum(time.parts.get(name, 0.0) for name in WAITING) if alone else 0.0)
    return {"step_s": seconds, "peak_bytes": memory.peak}


class StepBenchReport(BenchReport, frozen=True, kw_only=True):
    """The measurements of each rank, the planner's predictions, and the utilization."""

    measured: tuple[StepMeasurement, ...]
    predicted: dict[str, float] | None
    """None without a prediction."""
    utilisation: float | None

    def to_json(self) -> str:
        """Return the measurements of all ranks and the predictions."""
        document = {"measured": self.measured, "predicted": self.predicted, "utilisation": self.utilisation}
        return msgspec.json.encode(document).decode()

    def findings(self) -> Findings:
        """Return the content of the HTML or Markdown report."""
        return step_findings(self.measured, predicted=self.predicted, used=self.utilisation, facts=machine_facts(None))

    def to_text(self) -> str:
        """Return the measurements of the slowest rank with their predictions."""
        worst = slowest(self.measured)
        ranks = "fake world" if worst.backend == "fake" else f"slowest of {len(self.measured)}"
        lines = [f"plan {worst.plan} · rank {worst.rank} of {worst.world_size} ({ranks}) · {worst.device}"]
        for name, value, expected in compare(worst, self.predicted):
            beside = "" if expected is None else f"   predicted {shown(name, expected)} ({expected / value - 1:+.1%})"
            lines.append(f"{label(name):14} {shown(name, value):>14}{beside}")
        if self.utilisation is not None:
            share = f"{self.utilisation:>13.1%}"
            lines.append(f"{'utilisation':14} {share}   of the matmul rate, from the FLOPs of forward and backward")
        lines.append(f"{'spread':14} {worst.step.spread:>13.1%}   over {worst.step.repeats} steps")
        if waits := _waits_for_data(worst):
            lines.append(waits.strip())
        lines += [f"  {num_bytes / 2**20:10.2f} MiB  {text}" for text, num_bytes in worst.at_peak]
        if worst.profile is not None:
            lines += _profile_lines(worst.profile)
        return "\n".join(lines)


def _profile_lines(profile: StepProfile) -> list[str]:
    """Return the times of the profiled steps as lines."""
    summary = (
        f"profiled {profile.steps} steps of {profile.seconds * 1e3:,.2f} ms: compute {profile.compute_s * 1e3:,.2f} ms,"
        f" communication {profile.communication_s * 1e3:,.2f} ms ({profile.exposed_s * 1e3:,.2f} ms of it exposed),"
        f" idle {profile.idle_s * 1e3:,.2f} ms"
    )
    lines = [summary]
    for kernel in profile.top:
        share = kernel.seconds / profile.seconds
        lines.append(f"  {kernel.seconds * 1e3:10.3f} ms {share:6.1%} {kernel.calls:8g} x  {kernel.name[:80]}")
    if profile.trace is not None:
        lines.append(f"trace {profile.trace} (open it at https://ui.perfetto.dev)")
    return lines


def measure(spec: StepSpec) -> StepBenchReport | None:
    """Measure a few steps of a job under a plan; return None on ranks other than 0 of an existing world."""
    me = identify()
    _check(me, spec)
    profile = None
    if spec.profile or spec.trace is not None:
        if spec.trace is not None:
            check_trace_path(spec.trace)
        profile = ProfileSpec(trace=None if spec.trace is None else spec.trace.absolute())
    reference, overrides = split_settings(spec.job, spec.settings)
    job = load_torch_job(reference)
    local, device = spec.nproc or me.local_world_size, spec.place.device
    kind = device.partition(":")[0] if device else None
    where = local_device(kind, 1 if device == "cuda:0" or spec.fake_world else local)
    size = spec.fake_world or spec.nproc or me.world_size
    plan = settle(spec.plan, batch_size=job.batch_size, world_size=size, device=where, overrides=overrides)
    if spec.fake_world:
        index = "cuda:0" if where.kind == "cuda" else "cpu"
        found = [rehearse(job, plan, rank=spec.rank, steps=spec.steps, device=index, profile=profile)]
    else:
        opened = device or where.kind
        found = measure_ranks(
            reference, plan, steps=spec.steps, device=opened, backend=spec.place.backend, profile=profile
        )
    if not found:
        return None
    predicted, used = _expected(job, plan, found, processes=1 if spec.fake_world else local)
    return StepBenchReport(measured=tuple(found), predicted=predicted, utilisation=used)


def _check(me: Identity, spec: StepSpec) -> None:
    if me.world_size > 1 and (spec.nproc or spec.fake_world):
        option = f"--nproc {spec.nproc}" if spec.nproc else f"--fake-world {spec.fake_world}"
        raise InputError(
            f"{option} cannot be used inside a world of {me.world_size} ranks that {me.source} started",
            code="cli.option-inside-world",
            fix=f"omit {option}, or run the command outside of the world",
        )
    if spec.fake_world and spec.nproc:
        raise InputError(
            f"--fake-world {spec.fake_world} runs in one process, but --nproc is {spec.nproc}",
            code="cli.options-conflict",
            fix="omit --fake-world or --nproc",
        )
    if spec.rank and not spec.fake_world:
        raise InputError(
            f"--rank {spec.rank} requires --fake-world", code="cli.option-not-applicable", fix="add --fake-world N"
        )


def _expected(
    job: Job, plan: Plan, found: list[StepMeasurement], *, processes: int
) -> tuple[dict[str, float] | None, float | None]:
    """Return the planner's predictions and the utilization; None if unknown.

    There is no prediction for several nodes, since the links between them are unknown.
    """
    try:
        model = describe_job(job, plan.precision.activations)
    except JobError as error:
        echo_error(f"shardwise: no prediction: {error}")
        return None, None
    used = utilisation(found, training_flops(model.for_plan(plan)))
    if found[0].backend != "fake" and processes < found[0].world_size:
        return None, used
    return predict_step(job, plan, lambda *_: model, processes=processes), used
