"""`bench scaling`: measures throughput on increasing numbers of ranks, and reports what limits it."""

from __future__ import annotations

import ast
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from shardwise.engines.engine import require_supported
from shardwise.environment import num_threads
from shardwise.errors import InputError
from shardwise.hardware import probe_gpus, usable_cores
from shardwise.launcher.local.target import Script, check_target
from shardwise.launcher.options import read_nproc
from shardwise.measurement.report import BenchReport, machine_facts
from shardwise.measurement.scaling import (
    MODES,
    Mode,
    ScalingCase,
    ScalingCurve,
    ScalingPoint,
    measure_job,
    measure_script,
    plan_for,
    powers_of_two,
    read_pattern,
)
from shardwise.measurement.specs import bench_device, load_torch_job, warn_if_busy
from shardwise.measurement.step_findings import predict_step
from shardwise.planner.search.subject import describe_job
from shardwise.planner.settle import split_settings
from shardwise.plots.figures import Bars, Plot, Series, Table, table_lines
from shardwise.plots.page import Findings, Section
from shardwise.runs.console import counted, echo_error
from shardwise.units import format_rate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardwise.job import Job
    from shardwise.measurement.specs import ScalingSpec
    from shardwise.plans import Plan


_CLOSE = 0.95
"""Efficiency from which no limit is reported."""
_TOO_NOISY = 0.3
"""Spread of efficiency above which the curve is too noisy for a verdict."""
PARTS = {
    "compute": "compute",
    "communication": "exposed communication",
    "data": "reading data",
    "idle": "waiting for the slowest rank",
}
JOB_METHOD = (
    "Ranks are new processes with as many threads as in training; measurements alternate between numbers of ranks.",
    "Strong scaling keeps the global batch size, weak scaling keeps the batch size per rank.",
    "Throughput is that of steps that read their data.",
    "The same steps are timed again on data in memory, and once more with every collective skipped.",
    "compute: the step without collectives, mean of all ranks; idle: additional time of the slowest rank.",
    "communication: additional time of the complete step over the slowest rank's compute; data: time for reading.",
    "efficiency = throughput / (ranks x throughput of one); medians, with half the interquartile range of both.",
    "predicted: the prediction of `shardwise plan` for the same plan on this machine.",
)
SCRIPT_METHOD = (
    "`shardwise launch` starts the script, with torch already imported; numbers of ranks alternate.",
    "efficiency = throughput / (ranks x throughput of one); medians, with half the interquartile range of both.",
)


def scaling_table(curve: ScalingCurve) -> Table:
    """Return a table of throughput and efficiency with one row for each number of ranks."""
    has_parts = any(point.parts is not None for point in curve.points)
    has_batch = any(point.batch_size is not None for point in curve.points)
    has_predicted = any(point.predicted_per_s is not None for point in curve.points)
    header = ["ranks", *(["batch", "plan"] if has_batch else []), curve.unit, "spread", "efficiency"]
    header += ["predicted"] if has_predicted else []
    header += [f"{name} ms" for name in PARTS] if has_parts else []
    rows = []
    for point in curve.points:
        row = [str(point.ranks), *([str(point.batch_size), point.plan] if has_batch else [])]
        row += [format_rate(point.per_s), "" if point.spread is None else f"±{point.spread:.1%}"]
        row += [_efficiency(curve, point)]
        if has_predicted:
            row.append(format_rate(point.predicted_per_s) if point.predicted_per_s else "")
        if has_parts:
            parts = point.parts
            row += ["" if parts is None else f"{1e3 * parts[name]:.2f}" for name in PARTS]
        rows.append(tuple(row))
    return Table(header=tuple(header), rows=tuple(rows))


@dataclass(frozen=True, kw_only=True)
class SharedResources:
    """Cores, threads and GPUs of this machine, which ranks may share."""

    cores: int | None = None
    """Cores of the CPU on which ranks compute; None for ranks on GPUs."""
    threads: int | None = None
    """Threads that each rank is set to use; None if the ranks divide the cores."""
    gpus: int = 0

    def contention(self, ranks: int, first: int) -> str:
        """Return text about cores or GPUs that `ranks` ranks share, or ""; `first` is the number of baseline ranks."""
        if self.cores is None:
            return f"they share {counted(self.gpus, 'GPU')}" if ranks > self.gpus else ""
        if self.threads is None:
            return f"they share the {self.cores} cores that {counted(first, 'rank')} used"
        if ranks * self.threads <= self.cores:
            return ""
        return f"they share {self.cores} cores, with {counted(self.threads, 'thread')} each"


def limits(curve: ScalingCurve, shared: SharedResources) -> list[str]:
    """Return a sentence about what limits the efficiency of each number of ranks after the first."""
    return [f"{point.ranks} ranks: {_limit(curve, point, shared)}" for point in curve.points[1:]]


def _limit(curve: ScalingCurve, point: ScalingPoint, shared: SharedResources) -> str:
    contention = shared.contention(point.ranks, curve.points[0].ranks)
    reasons = [contention] if contention else []
    growth = curve.growth(point) or {}
    worst = max(growth, key=lambda name: growth[name], default=None)
    if (curve.efficiency_spread(point) or 0.0) > _TOO_NOISY:
        reasons.append("times vary too much for an analysis")
    elif curve.efficiency(point) >= _CLOSE:
        reasons.append("close to ideal")
    elif worst is not None and growth[worst] > 0:
        reasons.append(f"the largest loss is {PARTS[worst]} ({1e3 * growth[worst]:+.1f} ms per step)")
    return f"{_efficiency(curve, point)} of ideal" + "".join(f"; {reason}" for reason in reasons)


def _efficiency(curve: ScalingCurve, point: ScalingPoint) -> str:
    spread = curve.efficiency_spread(point)
    return f"{curve.efficiency(point):.0%}" + ("" if spread is None else f" ± {spread:.0%}")


def verdict(curves: Sequence[ScalingCurve]) -> str:
    """Return the speedup of the largest number of ranks in one sentence."""
    return "; ".join(_gain(curve) for curve in curves) + "."


def _gain(curve: ScalingCurve) -> str:
    first, last = curve.points[0], curve.points[-1]
    if (curve.efficiency_spread(last) or 0.0) > _TOO_NOISY:
        return f"{curve.mode}: times vary too much (efficiency {_efficiency(curve, last)} on {last.ranks} ranks)"
    speedup = f"{last.ranks} ranks have {last.per_s / first.per_s:.2f} times the throughput of {first.ranks}"
    return f"{curve.mode}: {speedup} (efficiency {_efficiency(curve, last)})"


def scaling_findings(
    curves: Sequence[ScalingCurve], *, title: str, facts: tuple[tuple[str, str], ...], notes: Sequence[Sequence[str]]
) -> Findings:
    """Return the content of the report; `notes` has the sentences about the limits of each curve."""
    is_job = any(point.batch_size is not None for curve in curves for point in curve.points)
    return Findings(
        title=title,
        verdict=verdict(curves),
        facts=facts,
        method=JOB_METHOD if is_job else SCRIPT_METHOD,
        sections=tuple(_section(curve, sentences) for curve, sentences in zip(curves, notes, strict=True)),
    )


def _section(curve: ScalingCurve, sentences: Sequence[str]) -> Section:
    parts: list[Plot | Bars | Table] = [scaling_table(curve), _throughput(curve)]
    split = [(counted(point.ranks, "rank"), point.parts) for point in curve.points if point.parts is not None]
    if split:
        parts.append(
            Bars(
                title="Time of a step by part",
                unit="ms",
                parts=tuple(PARTS.values()),
                rows=tuple((label, tuple(1e3 * values[name] for name in PARTS)) for label, values in split),
            )
        )
    text = " ".join(f"{sentence[0].upper()}{sentence[1:]}." for sentence in (*sentences, curve.note) if sentence)
    return Section(title=curve.title.capitalize(), text=text, parts=tuple(parts))


def _throughput(curve: ScalingCurve) -> Plot:
    first = curve.points[0]
    series = [
        Series(name="measured", points=tuple((point.ranks, point.per_s) for point in curve.points)),
        Series(
            name="ideal",
            points=tuple((point.ranks, first.per_s * point.ranks / first.ranks) for point in curve.points),
            dashed=True,
        ),
    ]
    predicted = tuple((point.ranks, point.predicted_per_s) for point in curve.points if point.predicted_per_s)
    if predicted:
        series.append(Series(name="predicted", points=predicted, dashed=True))
    return Plot(title="Throughput", x_label="ranks", y_label=curve.unit, series=tuple(series))


class ScalingReport(BenchReport, frozen=True, kw_only=True):
    """Throughput for each number of ranks, and what limits it."""

    title: str
    curves: tuple[ScalingCurve, ...]
    limits: tuple[tuple[str, ...], ...]
    """For each curve, a sentence for each number of ranks after the first."""

    def to_json(self) -> str:
        """Return the curves with their efficiencies."""
        curves = [_plain(curve, sentences) for curve, sentences in zip(self.curves, self.limits, strict=True)]
        return msgspec.json.encode({"title": self.title, "curves": curves}).decode()

    def to_text(self) -> str:
        """Return a table for each curve, sentences about its limits, and the verdict."""
        lines = [self.title]
        for curve, sentences in zip(self.curves, self.limits, strict=True):
            lines += ["", curve.title, *table_lines(scaling_table(curve))]
            lines += [sentence for sentence in (*sentences, curve.note) if sentence]
        return "\n".join([*lines, "", verdict(self.curves)])

    def findings(self) -> Findings:
        """Return the content of the HTML or Markdown report."""
        title = f"Scaling: {self.title}"
        return scaling_findings(self.curves, title=title, facts=machine_facts(None), notes=self.limits)


def _plain(curve: ScalingCurve, sentences: Sequence[str]) -> dict[str, Any]:
    """Return a curve as a JSON-compatible dict, with the efficiency of each point."""
    points = []
    for point in curve.points:
        derived = {"efficiency": curve.efficiency(point), "efficiency_spread": curve.efficiency_spread(point)}
        points.append({**msgspec.to_builtins(point), **derived})
    return {"mode": curve.mode, "unit": curve.unit, "points": points, "note": curve.note, "limits": sentences}


def measure(spec: ScalingSpec) -> ScalingReport:
    """Measure a job or a script on increasing numbers of ranks of this machine."""
    is_job = not spec.arguments and spec.pattern is None and has_job(spec.script)
    curves, on_cpu, title = _measure_job(spec) if is_job else _measure_script(spec)
    shared = SharedResources(cores=usable_cores() if on_cpu else None, threads=num_threads(), gpus=len(probe_gpus()))
    notes = tuple(tuple(limits(curve, shared)) for curve in curves)
    return ScalingReport(title=title, curves=tuple(curves), limits=notes)


def has_job(script: str) -> bool:
    """Return whether a Python file assigns a variable `job`, without running the file."""
    path_text, colon, _ = script.partition(":")
    path = Path(path_text)
    if not path.is_file():
        raise InputError(
            f"{path_text} does not exist", code="cli.file-not-found", fix="pass a Python file with a job, or a script"
        )
    if colon:
        return True
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        raise InputError(
            f"{path_text} is not valid Python", code="cli.not-python", fix="pass a Python file with a job, or a script"
        ) from None
    assignments = [node for node in tree.body if isinstance(node, ast.Assign)]
    assigned = [target for node in assignments for target in node.targets]
    return any(isinstance(target, ast.Name) and target.id == "job" for target in assigned)


def _read_ranks(spec: ScalingSpec) -> tuple[int, ...]:
    """Parse --ranks and --nproc, and return the numbers of ranks in ascending order."""
    text, nproc = spec.ranks, spec.nproc
    if text is None:
        return powers_of_two(nproc or len(probe_gpus()) or usable_cores())
    if nproc is not None:
        raise InputError(
            f"--ranks {text} conflicts with --nproc {nproc}", code="cli.options-conflict", fix="omit --ranks or --nproc"
        )
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise InputError(
            f"--ranks must be a list of positive integers, got {text!r}",
            code="cli.number-list-invalid",
            fix="use comma-separated numbers, such as --ranks 1,2,4",
        )
    return tuple(sorted({int(part) for part in parts}))


def _measure_job(spec: ScalingSpec) -> tuple[list[ScalingCurve], bool, str]:
    """Return the curves of a job, whether it ran on the CPU, and a title."""
    ranks = _read_ranks(spec)
    reference, overrides = split_settings(spec.script, spec.settings)
    where, opened = bench_device(spec.place, max(ranks))
    batch_size, plan_spec = load_torch_job(reference).batch_size, spec.plan or "ddp"
    cases: dict[Mode, list[ScalingCase]] = {mode: [] for mode in MODES if spec.mode in (None, mode)}
    for mode, points in cases.items():
        for number in ranks:
            plan = plan_for(plan_spec, mode, number, batch_size=batch_size, device=where, overrides=overrides)
            points.append(ScalingCase(ranks=number, plan=plan))
    for case in itertools.chain.from_iterable(cases.values()):
        require_supported(case.plan)
    warn_if_busy()
    opening = {"device": opened, "backend": spec.place.backend}
    curves = measure_job(reference, cases, rounds=spec.rounds, opening=opening, predict=_predictor())
    return curves, where.kind == "cpu", f"{Path(reference.path).name}, plan {plan_spec}"


def _predictor() -> Callable[[Job, Plan], float | None]:
    """Return a function that predicts the seconds of a step; it prints each reason for a missing prediction once."""
    reported: set[str] = set()

    def predict(job: Job, plan: Plan) -> float | None:
        try:
            return predict_step(job, plan, describe_job, processes=plan.layout.world_size)["step_s"]
        except InputError as error:
            if str(error) not in reported:
                reported.add(str(error))
                echo_error(f"shardwise: no prediction: {error}")
            return None

    return predict


def _measure_script(spec: ScalingSpec) -> tuple[list[ScalingCurve], bool, str]:
    """Return the curve of a script, whether it runs on the CPU, and a title."""
    job_options = {"--plan": spec.plan, "--set": spec.settings}
    job_options |= {"--backend": spec.place.backend, "--device": spec.place.device}
    for option, value in job_options.items():
        if value:
            raise InputError(
                f"{option} applies to a job, but {spec.script} is run as a script",
                code="cli.option-not-applicable",
                fix=f"omit {option}, or pass it after the script",
            )
    pattern = read_pattern(spec.pattern) if spec.pattern is not None else None
    if pattern is not None and spec.mode:
        raise InputError(
            f"--mode {spec.mode} applies to wall times, but --pattern reads the throughput from the output",
            code="cli.options-conflict",
            fix="omit --mode or --pattern",
        )
    ranks, cores, gpus = _read_ranks(spec), usable_cores(), len(probe_gpus())
    read_nproc(str(max(ranks)), num_gpus=gpus, num_cores=cores)
    target = Script(spec.script, spec.arguments)
    check_target(target)
    warn_if_busy()
    curve = measure_script(target, ranks, rounds=spec.rounds, mode=spec.mode or "strong", pattern=pattern)
    return [curve], not gpus, Path(spec.script).name
