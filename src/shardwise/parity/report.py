"""What verify found out: frozen values, as JSON, as a table for the terminal, as Markdown for the docs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from shardwise.runs.console import BAD_INPUT, CHECK_FAILED, DONE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

Status = Literal["passed", "failed", "refused", "does not apply"]
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
    """How one plan stands against one process."""

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


class VerifyReport(msgspec.Struct, frozen=True, kw_only=True):
    """How all plans stand against one process on one job."""

    job: str
    nproc: int
    steps: int
    precision: str
    beside: str = "one process"
    """What every plan was compared with."""
    notes: tuple[str, ...]
    verdicts: tuple[PlanVerdict, ...]

    @property
    def exit_code(self) -> int:
        """3 when a plan failed, 2 when one that was asked for by name was refused, else 0."""
        statuses = {verdict.status for verdict in self.verdicts}
        if "failed" in statuses:
            return CHECK_FAILED
        return BAD_INPUT if "refused" in statuses else DONE

    def count(self, status: Status) -> int:
        """Number of plans with this status."""
        return sum(verdict.status == status for verdict in self.verdicts)

    def to_json(self) -> str:
        """Return the whole report as indented JSON."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1).decode()


def verdict_words(verdict: PlanVerdict) -> list[str]:
    """Say a verdict in sentences: the finding, the first divergence, or why it was refused."""
    words = [str(finding) for finding in verdict.findings]
    first = verdict.first
    if first is not None:
        words.append(
            f"first beyond its limit: {first}, {first.relative:.1e} apart between {first.between}"
            f" ({first.beyond:.2g} x the limit of {first.limit:.1e})"
        )
    return [*words, verdict.reason] if verdict.reason else words


def report_table(report: VerifyReport) -> Table:
    """Lay the report out for a terminal."""
    from rich.table import Table
    from rich.text import Text

    styles = {"passed": "green", "failed": "bold red", "refused": "yellow", "does not apply": "dim"}
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("plan", no_wrap=True)
    table.add_column("result", no_wrap=True)
    table.add_column("worst gap", no_wrap=True)
    table.add_column("", overflow="fold")
    for verdict in report.verdicts:
        words = verdict_words(verdict) or [f"{verdict.worst}; {verdict.measure}" if verdict.worst else verdict.measure]
        table.add_row(
            Text(verdict.plan),
            Text(verdict.status, style=styles[verdict.status]),
            f"{verdict.worst.relative:.1e}" if verdict.worst else "",
            Text("\n".join(words)),
        )
    return table


def summary_line(report: VerifyReport) -> str:
    """Say the result in one line."""
    counts = [f"{report.count(status)} {status}" for status in ("passed", "failed", "refused", "does not apply")]
    said = ", ".join(words for words in counts if not words.startswith("0 "))
    return f"{report.job}: {said}; {report.steps} steps on {report.nproc} ranks beside {report.beside}"


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
