"""`shardwise verify`: every plan on the user's own job, beside one process."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardwise.cli.doctor import say_json
from shardwise.cli.main import refuse_started_ranks
from shardwise.errors import InputError
from shardwise.runs.console import complain, counted, say

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardwise.job import JobReference
    from shardwise.parity import PlanVerdict, VerifyReport
    from shardwise.parity.plans import Exact


@click.command(
    "verify", context_settings={"token_normalize_func": lambda token: token.replace("_", "-")}, no_args_is_help=True
)
@click.argument("job", metavar="JOB.py[:NAME]")
@click.option(
    "--plans",
    default="all",
    show_default=True,
    help="all, or presets, products and .toml files, comma separated; zero3+recompute=full overrides a field.",
)
@click.option("--steps", type=click.IntRange(min=1), help="Optimizer steps to compare (default: 4, 6 with --resume).")
@click.option(
    "--nproc",
    "--nproc-per-node",
    "nproc",
    type=click.IntRange(min=1),
    help="CPU ranks (default: 4, 2 with --propose-rules).",
)
@click.option(
    "--precision",
    type=click.Choice(["fp64", "fp32"]),
    default="fp64",
    show_default=True,
    help="fp64 for equality, fp32 against the measured noise.",
)
@click.option(
    "--backend",
    type=click.Choice(["gloo", "mpi"], case_sensitive=False),
    default="gloo",
    show_default=True,
    help="What ranks talk over; mpi's are started by mpirun.",
)
@click.option("--resume", is_flag=True, help="Kill each plan, resume it on other ranks, and compare with no kill.")
@click.option("--propose-rules", "propose", is_flag=True, help="Find tensor rules for the model, and confirm them.")
@click.option("--shrink", is_flag=True, help="Make the model small in width and depth, never in structure.")
@click.option(
    "--set", "settings", multiple=True, metavar="KEY=VALUE", help="Override a field of the job or of every plan."
)
@click.option("--json", "as_json", is_flag=True, help="Write the report as JSON to standard output.")
@click.option("--markdown", type=click.Path(path_type=Path, dir_okay=False), help="Write the table to this file.")
@click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False), help="Write confirmed tensor rules to this file."
)
def command(
    *,
    job: str,
    plans: str,
    steps: int | None,
    nproc: int | None,
    precision: str,
    backend: str,
    resume: bool,
    propose: bool,
    shrink: bool,
    settings: tuple[str, ...],
    as_json: bool,
    markdown: Path | None,
    out: Path | None,
) -> int:
    """Train the Job in JOB.py under each plan and in one process, and compare every number.

    With --propose-rules: find tensor rules for a model that has none, confirm them, and say them as Python.
    With --resume: kill it, resume it on other ranks, and compare samples, losses and weights with a run nobody stopped.
    """
    from shardwise.parity import verify
    from shardwise.parity.prepare import STEPS
    from shardwise.parity.report import markdown_table
    from shardwise.planner.job_plan import split_settings

    _check_place(markdown)
    reference, of_plans = split_settings(job, settings)
    exact: Exact = precision  # type: ignore[assignment]  # one of the two choices above
    more: dict[str, Any] = {"resume": resume, "backend": backend, "markdown": markdown, "out": out}
    _check_options(propose=propose, nproc=nproc, plans=plans, settings=of_plans, **more)
    if propose:
        return _propose_rules(
            reference, nproc=nproc or 2, steps=steps or STEPS, precision=exact, shrink=shrink, as_json=as_json, out=out
        )
    report = verify(
        reference,
        _named(plans, of_plans),
        nproc=nproc or 4,
        steps=steps or (6 if resume else STEPS),
        precision=exact,
        shrink=shrink,
        resume=resume,
        backend=backend,
        on_verdict=_tell,
    )
    if markdown is not None:
        markdown.write_text(markdown_table([report]))
    if as_json:
        say(report.to_json())
    else:
        _show(report)
    return report.exit_code


def _check_place(markdown: Path | None) -> None:
    """Refuse a process that is a rank already, and a report that cannot be written."""
    refuse_started_ranks("verify starts its own ranks")
    if markdown is not None and not markdown.parent.is_dir():
        raise InputError(
            f"--markdown {markdown} is in a folder that is not there",
            code="cli.output-folder-missing",
            fix="make the folder first",
        )


def _named(plans: str, settings: dict[str, str]) -> list[str] | None:
    """Return the plans that were typed, each with the settings for all of them; None for all there are."""
    from shardwise.parity.plans import parse_plans

    if plans != "all":
        return ["+".join([name, *(f"{key}={value}" for key, value in settings.items())]) for name in parse_plans(plans)]
    if settings:
        key = next(iter(settings))
        raise InputError(
            f"--set {key} is a field of plans, and --plans all brings its own",
            code="cli.option-not-applicable",
            fix="name the plans",
        )
    return None


def _tell(verdict: PlanVerdict) -> None:
    """Say that a plan is done, while others are still to come."""
    complain(f"{verdict.plan}: {verdict.status} ({verdict.seconds:.1f} s)")


def _show(report: VerifyReport) -> None:
    """Show the table, as wide as the terminal."""
    import sys

    from rich.console import Console

    from shardwise.parity.report import report_table, summary_line

    console = Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else 140)
    console.print(report_table(report))
    console.print()
    for note in report.notes:
        say(f"note: {note}")
    say(summary_line(report))


def _propose_rules(
    reference: JobReference, *, nproc: int, steps: int, precision: Exact, shrink: bool, as_json: bool, out: Path | None
) -> int:
    """Find tensor rules for the model, print them as Python or JSON, write them to `out`, and return the exit code."""
    from shardwise.job.job import rules_to_toml
    from shardwise.parity.propose import propose

    found = propose(reference, nproc=nproc, steps=steps, precision=precision, shrink=shrink, on_trial=_tell_trial)
    if out is not None and found.rules:
        out.write_text(rules_to_toml(found.rules, found.words))
    if as_json:
        say_json(found)
    elif found.rules:
        say(_rules_as_python(found.rules))
    for part, reason in found.weakened.items():
        complain(f"{part} could be cut more, but then: {reason}")
    complain(found.words)
    return found.exit_code


def _check_options(
    *,
    propose: bool,
    nproc: int | None,
    plans: str,
    settings: Mapping[str, str],
    resume: bool,
    backend: str,
    markdown: Path | None,
    out: Path | None,
) -> None:
    """Refuse options that say nothing together."""
    if out is not None and not propose:
        raise InputError(
            f"--out {out} is for tensor rules",
            code="cli.option-not-applicable",
            fix="add --propose-rules, or write --markdown FILE",
        )
    if out is not None and not out.parent.is_dir():
        raise InputError(
            f"--out {out} is in a folder that is not there",
            code="cli.output-folder-missing",
            fix="make the folder first",
        )
    given = {
        "--plans": plans != "all",
        "--resume": resume,
        f"--backend {backend}": backend != "gloo",
        "--markdown": markdown is not None,
    }
    named = [option for option, is_given in given.items() if is_given] + [f"--set {key}" for key in settings]
    if propose and named:
        raise InputError(
            f"--propose-rules tries tp alone, and {named[0]} asks for more",
            code="cli.options-conflict",
            fix="run one after the other",
        )
    if propose and nproc == 1:
        raise InputError(
            "--propose-rules tries rules with tp=1, and tp=1 cuts nothing",
            code="verify.rules-one-rank",
            fix="use --nproc 2 or more",
        )


def _rules_as_python(rules: Mapping[str, str]) -> str:
    """Write rules as they are pasted into a job file."""
    lines = [f"    {pattern!r}: {style!r},".replace("'", '"') for pattern, style in rules.items()]
    return "\n".join(["tensor_rules={", *lines, "},"])


def _tell_trial(rules: dict[str, str], verdict: PlanVerdict) -> None:
    """Say that a trial is done, while others may still come."""
    complain(f"tried {counted(len(rules), 'tensor rule')}: {verdict.status} ({verdict.seconds:.1f} s)")
