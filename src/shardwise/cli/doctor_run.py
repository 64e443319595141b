"""`shardwise doctor run`: a finished or stuck run explained from its directory."""

from __future__ import annotations

from pathlib import Path

import click

from shardwise.cli.doctor import say_json, say_verdicts
from shardwise.runs.console import say

_MOST_LINES = 40


@click.command("run", no_args_is_help=True)
@click.argument("path", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the story and the verdicts as JSON.")
def command(*, path: Path, as_json: bool) -> int:
    """Say what happened in the run directory RUN, why, what was lost, and what to type next."""
    from shardwise.doctor.catalogue import exit_code
    from shardwise.doctor.run.explain import explain
    from shardwise.doctor.run.facts import read_run

    report = explain(read_run(path))
    if as_json:
        say_json(report)
        return exit_code(report.verdicts)
    say(f"{path}: {report.state}" + (f" ({report.kind})" if report.kind else ""))
    left_out = len(report.story) - _MOST_LINES
    if left_out > 0:
        say(f"... {left_out} lines before: add --json")
    for line in report.story[-_MOST_LINES:]:
        say(line)
    say("")
    say_verdicts(report.verdicts)
    if report.commands:
        say("")
        for command_ in report.commands:
            say(command_)
    return exit_code(report.verdicts)
