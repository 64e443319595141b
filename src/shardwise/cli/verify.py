"""`shardwise verify`: compares training under each plan with training in a single process."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from shardwise.cli.main import WITH_UNDERSCORES, present, refuse_started_ranks, spec_options
from shardwise.errors import InputError
from shardwise.parity.spec import VerifySpec
from shardwise.runs.console import counted, echo_error

if TYPE_CHECKING:
    from shardwise.parity.spec import PlanVerdict

_FILE = click.Path(path_type=Path, dir_okay=False)


@click.command("verify", context_settings=WITH_UNDERSCORES, no_args_is_help=True)
@spec_options(VerifySpec, without=("timeout_s",))
@click.option("--propose-rules", "propose", is_flag=True, help="Find tensor-parallel rules for the model, and verify.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.option("--markdown", type=_FILE, help="Write the table to this file.")
@click.option("--out", type=_FILE, help="Write verified tensor-parallel rules to this file.")
def command(spec: VerifySpec, *, propose: bool, as_json: bool, markdown: Path | None, out: Path | None) -> int:
    """Train the job in JOB.py under each plan and in a single process, and compare losses, gradients and weights.

    With --propose-rules: find tensor-parallel rules for a model without rules, verify them, and print them as Python.
    With --resume: kill the job, resume it on a different number of ranks or under a different plan, and compare
    samples, losses and weights with an uninterrupted run.
    """
    refuse_started_ranks("verify starts its own ranks")
    _check_files(markdown, out, propose=propose)
    if propose:
        from shardwise.parity.propose import propose_rules

        rules = propose_rules(spec, on_trial=_show_trial)
        if out is not None and rules.rules:
            out.write_text(rules.to_toml())
        return present(rules, as_json=as_json)
    from shardwise.parity.verify import verify_job

    report = verify_job(spec, on_verdict=_show_verdict)
    if markdown is not None:
        markdown.write_text(report.to_markdown())
    return present(report, as_json=as_json)


def _check_files(markdown: Path | None, out: Path | None, *, propose: bool) -> None:
    """Raise InputError for a file that cannot be written, or that would not be used."""
    if out is not None and not propose:
        raise InputError(
            f"--out {out} is valid with --propose-rules only",
            code="cli.option-not-applicable",
            fix="add --propose-rules, or use --markdown FILE",
        )
    if markdown is not None and propose:
        raise InputError(
            "--propose-rules cannot be combined with --markdown",
            code="cli.options-conflict",
            fix="run verify once with each option",
        )
    for option, path in {"--markdown": markdown, "--out": out}.items():
        if path is not None and not path.parent.is_dir():
            raise InputError(
                f"{option} {path} is in a directory that does not exist",
                code="cli.output-folder-missing",
                fix="create the directory first",
            )


def _show_verdict(verdict: PlanVerdict) -> None:
    """Print the verdict of a plan."""
    echo_error(f"{verdict.plan}: {verdict.status} ({verdict.seconds:.1f} s)")


def _show_trial(rules: dict[str, str], verdict: PlanVerdict) -> None:
    """Print the verdict of a set of rules."""
    echo_error(f"tried {counted(len(rules), 'tensor rule')}: {verdict.status} ({verdict.seconds:.1f} s)")
