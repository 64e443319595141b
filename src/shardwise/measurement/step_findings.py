"""`bench step`: from the Spec to measured steps, and their report beside what the planner predicts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from shardwise.environment import identify
from shardwise.errors import InputError, JobError
from shardwise.hardware.calibration import calibration_for
from shardwise.hardware.cluster import this_machine
from shardwise.measurement.profile import ProfileSpec, StepProfile, check_trace_path
from shardwise.measurement.ranks import load_torch_job
from shardwise.measurement.report.findings import Findings, Section, machine_facts
from shardwise.measurement.report.write import BenchReport
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
from shardwise.runs.console import echo_error

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from shardwise.environment import Identity
    from shardwise.job import Job
    from shardwise.measurement.specs import StepSpec
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


# What planning predicts of a step that is about to be measured, under the names of what is measured.


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


# The report.


class StepBenchReport(BenchReport, frozen=True, kw_only=True):
    """What each rank measured, what planning predicts, and the share of the matmul rate that the step reached."""

    measured: tuple[StepMeasurement, ...]
    predicted: dict[str, float] | None
    """None where nothing can be predicted."""
    utilisation: float | None

    def to_json(self) -> str:
        """Return all ranks, and what was predicted."""
        document = {"measured": self.measured, "predicted": self.predicted, "utilisation": self.utilisation}
        return msgspec.json.encode(document).decode()

    def findings(self) -> Findings:
        """Return what a page or a Markdown file shows."""
        return step_findings(self.measured, predicted=self.predicted, used=self.utilisation, facts=machine_facts(None))

    def to_text(self) -> str:
        """Return the figures of the slowest rank, with predictions beside them where there are some."""
        worst = slowest(self.measured)
        ranks = "fake world" if worst.backend == "fake" else f"slowest of {len(self.measured)}"
        lines = [f"plan {worst.plan} · rank {worst.rank} of {worst.world_size} ({ranks}) · {worst.device}"]
        for name, value, expected in compare(worst, self.predicted):
            beside = "" if expected is None else f"   predicted {shown(name, expected)} ({expected / value - 1:+.1%})"
            lines.append(f"{label(name):14} {shown(name, value):>14}{beside}")
        if self.utilisation is not None:
            share = f"{self.utilisation:>13.1%}"
            lines.append(f"{'utilisation':14} {share}   of the matmul rate, by what forward and backward need")
        lines.append(f"{'spread':14} {worst.step.spread:>13.1%}   over {worst.step.repeats} steps")
        lines += [f"  {num_bytes / 2**20:10.2f} MiB  {text}" for text, num_bytes in worst.at_peak]
        if worst.profile is not None:
            lines += _profile_lines(worst.profile)
        return "\n".join(lines)


def _profile_lines(profile: StepProfile) -> list[str]:
    """Return where the time of the profiled steps went."""
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
    """Run a few steps of a job under a plan; None on ranks other than 0 of a world that somebody else started."""
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
        asked = f"--nproc {spec.nproc}" if spec.nproc else f"--fake-world {spec.fake_world}"
        raise InputError(
            f"{asked} inside a world of {me.world_size} ranks that {me.source} started",
            code="cli.option-inside-world",
            fix="leave it out, or run it by itself",
        )
    if spec.fake_world and spec.nproc:
        raise InputError(
            f"--fake-world {spec.fake_world} runs in one process, and --nproc {spec.nproc} starts more",
            code="cli.options-conflict",
            fix="leave one out",
        )
    if spec.rank and not spec.fake_world:
        raise InputError(
            f"--rank {spec.rank} is for a fake world", code="cli.option-not-applicable", fix="add --fake-world N"
        )


def _expected(
    job: Job, plan: Plan, found: list[StepMeasurement], *, processes: int
) -> tuple[dict[str, float] | None, float | None]:
    """Return what planning predicts of the step and the share of the matmul rate it reached; None where unknown.

    Nothing is predicted for several nodes, of whose links this machine knows nothing.
    """
    try:
        model = describe_job(job, plan.precision.compute)
    except JobError as error:
        echo_error(f"shardwise: nothing predicted: {error}")
        return None, None
    used = utilisation(found, training_flops(model.for_plan(plan)))
    if found[0].backend != "fake" and processes < found[0].world_size:
        return None, used
    return predict_step(job, plan, lambda *_: model, processes=processes), used
