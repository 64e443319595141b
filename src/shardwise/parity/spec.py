"""What `verify` is asked (a job, plans, how to compare) and its Report: a verdict per plan, as text, JSON, Markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import msgspec

from shardwise.runs.console import BAD_INPUT, CHECK_FAILED, DONE, render_table
from shardwise.spec import PositiveInt, Report, Spec, argument, option

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table


STEPS = 4
"""By default: two full steps, a short one, and a full one that shows what the short one left behind."""
RESUMED_STEPS = 6
NPROC = 4
PROPOSE_NPROC = 2


class VerifySpec(Spec, frozen=True, kw_only=True):
    """A job, and the plans that are compared with one process."""

    job: Annotated[str, argument("JOB.py[:NAME]")]
    plans: str | tuple[str, ...] = "all"
    """all, or presets, products and .toml files, comma separated; zero3+recompute=full overrides a field."""
    steps: PositiveInt | None = None
    """Optimizer steps to compare (default: 4, 6 with --resume)."""
    nproc: Annotated[PositiveInt | None, option("--nproc", "--nproc-per-node")] = None
    """CPU ranks (default: 4, 2 with --propose-rules)."""
    precision: Literal["fp64", "fp32"] = "fp64"
    """fp64 for equality, fp32 against the measured noise."""
    backend: Literal["gloo", "mpi"] = "gloo"
    """Backend of plans on several ranks; ranks over mpi are started by mpirun."""
    resume: bool = False
    """Kill each plan, resume it on other ranks, and compare with no kill."""
    shrink: bool = False
    """Make the model small in width and depth, never in structure."""
    settings: Annotated[tuple[str, ...], option("--set", metavar="KEY=VALUE")] = ()
    """Override a field of the job or of every plan."""
    timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 600.0
    """Seconds that one training may take."""

    @property
    def num_steps(self) -> int:
        """Steps that every plan trains."""
        return self.steps or (RESUMED_STEPS if self.resume else STEPS)


# The Report of verify: a verdict per plan, as JSON, as a table for the terminal, as Markdown for the docs.


Status = Literal["passed", "failed", "refused", "does not apply"]
STATUSES: dict[Status, str] = {"passed": "green", "failed": "bold red", "refused": "yellow", "does not apply": "dim"}
"""Status -> style on a terminal, in the order of the summary."""
KEYED = 'set Job(masks="keyed"), or --set masks=keyed, which makes each draw a function of its sample'
"""What makes random numbers comparable."""
Kind = Literal["initial value", "loss", "gradient", "gradient norm", "parameter", "buffer", "evaluation", "metric"]


class Gap(msgspec.Struct, frozen=True, kw_only=True):
    """How far one value of a plan is from one process, or one rank from another."""

    kind: Kind
    name: str
    """Of the parameter, buffer or metric; empty for a loss or a norm."""
    step: int | None
    """Counted from 0; None for values before the first step or after the last."""
    relative: float
    """Largest difference over the largest value."""
    limit: float
    between: str = "the plan and one process"

    @property
    def beyond(self) -> float:
        """How many times its limit the gap is; at most 1 passes."""
        return self.relative / self.limit

    def __str__(self) -> str:
        at = "" if self.step is None else f" of step {self.step}"
        return f"{self.kind} {self.name}{at}".replace("  ", " ")


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A named cause of a divergence, and the evidence for it."""

    cause: str
    evidence: str
    parameter: str | None = None
    step: int | None = None
    ranks: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.cause}: {self.evidence}"


class PlanVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """How one plan compares with one process."""

    plan: str
    status: Status
    measure: str = ""
    """What was compared, and the limit."""
    worst: Gap | None = None
    first: Gap | None = None
    """The first value, in the order of training, that is beyond its limit."""
    left_out: int = 0
    """Elements of parameters that were not compared: their gradient is rounding noise that the optimizer amplifies."""
    findings: tuple[Finding, ...] = ()
    reason: str = ""
    """Why a plan was refused or crashed."""
    seconds: float = 0.0


class VerifyReport(Report, frozen=True, kw_only=True):
    """How all plans compare with one process on one job."""

    job: str
    nproc: int
    steps: int
    precision: str
    beside: str = "one process"
    """What every plan was compared with."""
    notes: tuple[str, ...]
    verdicts: tuple[PlanVerdict, ...]

    @classmethod
    def of(cls, verdicts: Sequence[PlanVerdict], **facts: Any) -> Self:
        """Return the report of these verdicts; it exits with 3 when a plan failed, 2 when a named one was refused."""
        statuses = {verdict.status for verdict in verdicts}
        code = BAD_INPUT if "refused" in statuses else DONE
        return cls(verdicts=tuple(verdicts), exit_code=CHECK_FAILED if "failed" in statuses else code, **facts)

    def count(self, status: Status) -> int:
        """Number of plans with this status."""
        return sum(verdict.status == status for verdict in self.verdicts)

    def to_text(self) -> str:
        """Return a table of the plans, as wide as the terminal, the notes, and the result in one line."""
        counts = [f"{self.count(status)} {status}" for status in STATUSES if self.count(status)]
        notes = [f"note: {note}" for note in self.notes]
        summary = f"{self.job}: {', '.join(counts)}; {self.steps} steps on {self.nproc} ranks beside {self.beside}"
        return "\n".join([render_table(_table(self.verdicts), width=140), "", *notes, summary])

    def to_markdown(self) -> str:
        """Return a Markdown table, a row per plan."""
        return markdown_table([self])


def verdict_lines(verdict: PlanVerdict) -> list[str]:
    """Return a verdict as sentences: the finding, the first divergence, or why it was refused."""
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
    """Return a Markdown table, a row per plan and a column per job and world, cells with the worst gap."""
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
