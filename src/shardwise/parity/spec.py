"""The Spec and the Report of `verify`: the job and the plans to compare, and a verdict per plan."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import msgspec

from shardwise.engines.engine import engine_named
from shardwise.errors import InputError
from shardwise.job.load import parse_overrides
from shardwise.planner.settle import LocalDevice, settle, with_engine
from shardwise.plans import Plan, Precision
from shardwise.plans.pipeline import SCHEDULES
from shardwise.runs.console import BAD_INPUT, CHECK_FAILED, DONE, render_table
from shardwise.spec import PositiveInt, Report, Spec, argument, option

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from rich.table import Table

    from shardwise.job.job import Framework

STEPS = 4
"""Default number of steps: two full steps, a partial step, and a full step that depends on the state after it."""
RESUMED_STEPS = 6
NPROC = 4
PROPOSE_NPROC = 2


class VerifySpec(Spec, frozen=True, kw_only=True):
    """The options of `shardwise verify`: a job, and the plans to compare with training in one process."""

    job: Annotated[str, argument("JOB.py[:NAME]")]
    plans: str | tuple[str, ...] = "all"
    """all, or a comma-separated list of presets, products and .toml files; zero3+recompute=full overrides a field."""
    steps: PositiveInt | None = None
    """Number of optimizer steps to compare (default: 4; 6 with --resume)."""
    nproc: Annotated[PositiveInt | None, option("--nproc", "--nproc-per-node")] = None
    """Number of CPU ranks (default: 4; 2 with --propose-rules)."""
    precision: Literal["fp64", "fp32"] = "fp64"
    """fp64 verifies equality; fp32 compares with the measured rounding noise."""
    backend: Literal["gloo", "mpi"] = "gloo"
    """Backend of plans on several ranks; mpi ranks are started by mpirun."""
    resume: bool = False
    """Kill each plan, resume it on other ranks, and compare with an uninterrupted run."""
    shrink: bool = False
    """Reduce the width and depth of the model without changing its structure."""
    settings: Annotated[tuple[str, ...], option("--set", metavar="KEY=VALUE")] = ()
    """Override a field of the job or of every plan."""
    timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 600.0
    """Time limit of each training run in seconds."""

    @property
    def num_steps(self) -> int:
        """Number of steps of each training run."""
        return self.steps or (RESUMED_STEPS if self.resume else STEPS)


# The Report of verify: a verdict per plan, as JSON, as a table for the terminal, or as Markdown.


Status = Literal["passed", "failed", "refused", "does not apply"]
STATUSES: dict[Status, str] = {"passed": "green", "failed": "bold red", "refused": "yellow", "does not apply": "dim"}
"""Status -> style on a terminal, in the order of the summary."""
KEYED = 'set Job(masks="keyed"), or pass --set masks=keyed, which makes random numbers a function of the sample'
"""Fix that makes random numbers comparable."""
RANDOM, UNKNOWN = "random numbers", "unknown cause"
"""Causes of findings."""
Kind = Literal["initial value", "loss", "gradient", "gradient norm", "parameter", "buffer", "evaluation", "metric"]


class Gap(msgspec.Struct, frozen=True, kw_only=True):
    """The difference between a value under a plan and in one process, or between two ranks."""

    kind: Kind
    name: str
    """Name of the parameter, buffer or metric; empty for a loss or a norm."""
    step: int | None
    """Counted from 0; None for values before the first step or after the last."""
    relative: float
    """Largest difference divided by the largest value."""
    limit: float
    between: str = "the plan and one process"

    @property
    def beyond(self) -> float:
        """The gap as a multiple of its limit; a value above 1 fails."""
        return self.relative / self.limit

    def __str__(self) -> str:
        at = "" if self.step is None else f" of step {self.step + 1}"
        return f"{self.kind} {self.name}{at}".replace("  ", " ").rstrip()


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """The cause of a divergence and the evidence for it."""

    cause: str
    evidence: str
    parameter: str | None = None
    step: int | None = None
    ranks: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.cause}: {self.evidence}"


class PlanVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """The result of comparing a plan with one process."""

    plan: str
    status: Status
    measure: str = ""
    """The values that were compared, and their limit."""
    worst: Gap | None = None
    first: Gap | None = None
    """The first value, in the order of training, that exceeds its limit."""
    left_out: int = 0
    """Number of parameter elements that were not compared, because their gradient is rounding noise."""
    findings: tuple[Finding, ...] = ()
    reason: str = ""
    """The reason why a plan is not supported, or the error with which it crashed."""
    code: str = ""
    """Error code of a plan that is not supported."""
    seconds: float = 0.0

    @property
    def is_random(self) -> bool:
        """Whether the plan differs because ranks sample different random numbers."""
        return any(finding.cause == RANDOM for finding in self.findings)


class VerifyReport(Report, frozen=True, kw_only=True):
    """The verdicts on all plans of a job, each compared with one process."""

    job: str
    nproc: int
    steps: int
    precision: str
    beside: str = "one process"
    """The reference with which every plan was compared."""
    notes: tuple[str, ...]
    verdicts: tuple[PlanVerdict, ...]

    @classmethod
    def of(cls, verdicts: Sequence[PlanVerdict], **facts: Any) -> Self:
        """Return the report of verdicts; exit code 3 if a plan failed, 2 if a requested plan is not supported."""
        statuses = {verdict.status for verdict in verdicts}
        code = BAD_INPUT if "refused" in statuses else DONE
        return cls(verdicts=tuple(verdicts), exit_code=CHECK_FAILED if "failed" in statuses else code, **facts)

    def count(self, status: Status) -> int:
        """Return the number of plans with this status."""
        return sum(verdict.status == status for verdict in self.verdicts)

    def to_text(self) -> str:
        """Return a table of the plans in the width of the terminal, the notes, and a summary line."""
        counts = [f"{self.count(status)} {status}" for status in STATUSES if self.count(status)]
        counts = [each if each.startswith("1 ") else each.replace("does not", "do not") for each in counts]
        notes = [f"note: {note}" for note in self.notes]
        summary = (
            f"{self.job}: {', '.join(counts)}; {self.steps} steps on {self.nproc} ranks, compared with {self.beside}"
        )
        return "\n".join([render_table(_table(self.verdicts), width=140), "", *notes, summary])

    def to_markdown(self) -> str:
        """Return a Markdown table with a row per plan."""
        return markdown_table([self])


def verdict_lines(verdict: PlanVerdict) -> list[str]:
    """Return a verdict as sentences: its findings, the first divergence, and the reason for a refusal or crash."""
    lines = [str(finding) for finding in verdict.findings]
    first = verdict.first
    if first is not None:
        lines.append(
            f"first beyond its limit: {first}, {first.relative:.1e} apart between {first.between}"
            f" ({first.beyond:.2g} x the limit of {first.limit:.1e})"
        )
    return [*lines, verdict.reason] if verdict.reason else lines


def _table(verdicts: Sequence[PlanVerdict]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("plan", "result", "worst gap"):
        table.add_column(heading, no_wrap=True)
    table.add_column("", overflow="fold")
    for verdict in verdicts:
        lines = verdict_lines(verdict)
        gap = f"{verdict.worst.relative:.1e}" if verdict.worst else ""
        if not lines:
            lines = [f"{verdict.worst}; {verdict.measure}" if verdict.worst else verdict.measure]
        status = Text(verdict.status, style=STATUSES[verdict.status])
        table.add_row(Text(verdict.plan), status, gap, Text("\n".join(lines)))
    return table


def markdown_table(reports: Sequence[VerifyReport]) -> str:
    """Return a Markdown table of the worst gaps, with a row per plan and a column per job and world."""
    plans = list(dict.fromkeys(verdict.plan for report in reports for verdict in report.verdicts))
    cells = {
        (verdict.plan, number): _cell(verdict) for number, report in enumerate(reports) for verdict in report.verdicts
    }
    heads = [f"{report.job} x {report.nproc}" for report in reports]
    lines = ["| plan | " + " | ".join(heads) + " |", "|---" * (1 + len(reports)) + "|"]
    for plan in plans:
        row = [cells.get((plan, number), "") for number in range(len(reports))]
        lines.append(f"| `{plan}` | " + " | ".join(row) + " |")
    return "\n".join(lines) + "\n"


def _cell(verdict: PlanVerdict) -> str:
    if verdict.status == "passed" and verdict.worst is not None:
        mark = "~ " if verdict.measure.startswith("loss") else ""
        return f"{mark}{verdict.worst.relative:.0e}"
    return "" if verdict.status == "does not apply" else f"**{verdict.status}**"


Exact = Literal["fp64", "fp32"]

BANDS = {"rounds": 0.25, "powersgd": 0.15, "batch_norm": 0.15, "bf16": 0.03, "fp16": 0.03, "float8": 0.03, "int8": 0.03}
"""Option that changes the arithmetic -> largest relative difference of a step's loss. Low-rank gradients, statistics of
half a batch and steps of half a batch change all values; a short mantissa only rounds them. For losses that halve
within four steps, the loss of replicas after a local partial step was 18 % higher."""


def all_plans(nproc: int) -> list[str]:
    """Return the plans of `--plans all` on `nproc` ranks."""
    plans = [
        "ddp",
        "ddp+accumulation=2",
        "ddp+accumulation=5",
        "ddp+accumulation=2+gradient_sync=every",
        "zero1",
        "zero2",
        "zero3",
        "zero3+accumulation=2",
        "zero3+accumulation=2+gradient_sync=every",
    ]
    if nproc >= 4 and nproc % 2 == 0:
        plans.append("hsdp")
    plans += ["tp", "tp+sequence_parallel=true", "cp", "cp+zero=3+recompute=full"]
    plans += [*_pipelines(nproc), *_products(nproc)]
    plans += [
        "ddp+recompute=full",
        "ddp+recompute=selective",
        "zero3+recompute=full",
        "zero3+offload.parameters=cpu+offload.optimizer=cpu",
        "zero3+compile=blocks",
        "ddp+precision=bf16",
        "zero3+precision=bf16",
        "ddp+precision=fp16",
        "ddp+communication.compression=bf16",
        "ddp+communication.compression=fp16",
        "ddp+communication.compression=powersgd",
        "ddp+communication.sync_every=2",
    ]
    return plans


def _pipelines(nproc: int) -> Iterator[str]:
    """Yield a pipeline plan per schedule, with twice as many micro-batches as ranks, so that all schedules overlap."""
    for schedule in SCHEDULES:
        yield f"pp+accumulation={2 * nproc}+pipeline.schedule={schedule}"


def _products(nproc: int) -> list[str]:
    if nproc % 4:
        return []
    rest = nproc // 2
    hybrids = [
        f"pp2.shard{rest}+accumulation=4",
        f"pp2.replicate{rest}+accumulation=4",
        f"pp2.replicate{rest}+accumulation=4+pipeline.schedule=zbv",
        f"pp2.tp{rest}+accumulation=4",
        f"shard2.tp{rest}",
        f"replicate2.tp{rest}",
        f"shard2.cp{rest}",
        f"cp2.tp{rest}",
    ]
    if nproc % 8 == 0:
        hybrids.append(f"pp2.shard{nproc // 4}.tp2+accumulation=4")
    return hybrids


def named_plans(plans: str | Sequence[str], settings: Mapping[str, str]) -> list[str] | None:
    """Return the requested plans with `settings` applied to each; None for "all"."""
    if plans != "all":
        more = "".join(f"+{key}={value}" for key, value in settings.items())
        return [name + more for name in parse_plans(plans if isinstance(plans, str) else ",".join(plans))]
    if settings:
        raise InputError(
            f"--set {next(iter(settings))} sets a field of the plan and cannot be combined with --plans all",
            code="cli.option-not-applicable",
            fix="list the plans, as in --plans ddp,zero3",
        )
    return None


def parse_plans(text: str) -> list[str]:
    """Parse the value of --plans; raise InputError for an empty list or a repeated plan."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise InputError(
            f"--plans {text!r} contains no plan", code="verify.no-plans", fix="pass --plans all, or --plans ddp,zero3"
        )
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InputError(f"--plans repeats {twice[0]}", code="verify.plan-repeated", fix="list each plan only once")
    return names


def settle_plan(text: str, *, batch_size: int, nproc: int, framework: Framework = "torch") -> Plan:
    """Return the plan SPEC+KEY=VALUE+... resolved for a batch size, `nproc` CPU ranks and a model of `framework`."""
    spec, *settings = text.split("+")
    overrides = parse_overrides(settings)
    device = engine_named(framework).local_device("cpu") or LocalDevice()
    return settle(spec, batch_size=batch_size, world_size=nproc, device=device, overrides=overrides)


def one_process(batch_size: int, *, dtype: Exact, accumulation: int = 1, framework: Framework = "torch") -> Plan:
    """Return the one-rank plan with which other plans are compared."""
    plan = Plan.preset("ddp", 1, batch_size=batch_size, accumulation=accumulation)
    return with_engine(in_precision(plan, dtype), framework)


def in_precision(plan: Plan, dtype: Exact) -> Plan:
    """Return the plan with all values stored and computed in a single dtype."""
    precision = Precision(parameter=dtype, compute=dtype, reduce=dtype, optimizer=dtype)
    return dataclasses.replace(plan, precision=precision)


def measured_in(plan: Plan, requested: Exact) -> Exact:
    """Return the dtype in which a plan is compared: fp32 if its engine does not support fp64."""
    return requested if engine_named(plan.engine).has_fp64 else "fp32"


def changed_numbers(plan: Plan, *, has_batch_norm: bool) -> dict[str, float]:
    """Return the options that change the arithmetic, as text with their loss bands; empty for an exact plan."""
    changes = {}
    if plan.precision.compute in BANDS:
        changes[f"computes in {plan.precision.compute}"] = BANDS[plan.precision.compute]
    if plan.precision.reduce in BANDS and plan.precision.reduce != plan.precision.compute:
        changes[f"reduces gradients in {plan.precision.reduce}"] = BANDS[plan.precision.reduce]
    if plan.precision.parameter in BANDS:
        changes[f"stores parameters in {plan.precision.parameter}"] = BANDS[plan.precision.parameter]
    if plan.precision.optimizer in BANDS:
        changes[f"stores optimizer states in {plan.precision.optimizer}"] = BANDS[plan.precision.optimizer]
    if plan.communication.compression != "none" and plan.layout.folded.dp > 1:
        compression = plan.communication.compression
        changes[f"compresses gradients by {compression}"] = BANDS[compression]
    if plan.communication.sync_every > 1 and plan.layout.replicate > 1:
        changes["trains replicas independently between synchronizations"] = BANDS["rounds"]
    if plan.batch_norm == "local" and has_batch_norm and plan.layout.dp > 1:
        changes["computes batch statistics per rank"] = BANDS["batch_norm"]
    return changes
