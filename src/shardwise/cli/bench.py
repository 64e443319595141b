"""`shardwise bench`: collectives, links, overlap, scaling and steps."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardwise.cli.main import WITH_UNDERSCORES, LazyGroup, present, refuse_started_ranks, takes
from shardwise.errors import InputError
from shardwise.measurement.specs import CommSpec, OverlapSpec, P2pSpec, ScalingSpec, StepSpec, bench
from shardwise.plans.toml import plan_to_toml
from shardwise.runs.console import DONE, echo_error

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardwise.plans import Plan
    from shardwise.spec import Spec

PARTS = {
    "comm": "Time, check and judge every collective, with the columns of nccl-tests.",
    "p2p": "Measure latency and bandwidth between all pairs of ranks, and find the slow link.",
    "overlap": "Measure how much of a job's communication hides behind its compute, and what to set.",
    "scaling": "Measure a job or a script on more and more ranks: efficiency, and where the time goes.",
    "step": "Run a few steps of a job under a plan: time by phase, throughput, memory.",
}

_FILE = click.Path(path_type=Path)


@click.group("bench", cls=LazyGroup, parts=PARTS, no_args_is_help=True)
def command() -> None:
    """Measure links, collectives, overlap, steps and scaling."""


def _outputs(call: Callable[..., int]) -> Callable[..., int]:
    """Give a command --json and --report."""
    page = click.option("--report", type=_FILE, help="Write a page (.html) or Markdown (.md) with plots.")
    return click.option("--json", "as_json", is_flag=True, help="Write all that was found as JSON.")(page(call))


def _measure(spec: Spec, *, as_json: bool, report: Path | None, **outputs: Callable[[Any], Any]) -> int:
    """Measure, show, write the report and hand it to each of `outputs`; rank 0 alone does so in a started world."""
    if report is not None:
        from shardwise.measurement.report.write import check_report_path  # imports torch

        check_report_path(report)
    found = bench(spec)
    if found is None:
        return DONE
    for write in outputs.values():
        write(found)
    if report is not None:
        found.write(report)
        echo_error(f"shardwise: report in {report}")
    return present(found, as_json=as_json)


def _check_folder(path: Path) -> None:
    if not path.parent.is_dir() or path.is_dir():
        raise InputError(
            f"{path} cannot be written", code="cli.output-not-writable", fix="name a file in a folder that exists"
        )


@command.command("comm", context_settings=WITH_UNDERSCORES)
@takes(CommSpec)
@_outputs
@click.option("--csv", "csv_path", type=_FILE, help="Write the table to this file.")
@click.option("--explain", metavar="NAME", help="Show on real ranks what a call does; all shows every one.")
def comm(spec: CommSpec, *, as_json: bool, report: Path | None, csv_path: Path | None, explain: str | None) -> int:
    """Time and check collectives on every size, dtype, reduce operation and group that is asked for.

    Without COLLECTIVE: all of them. Exit code 3 when a result is wrong or slower than in the earlier run.
    """
    if explain:
        from shardwise.cli.explain import explain as explain_call  # imports torch

        place = spec.place
        return explain_call(explain, spec.nproc, ops=spec.ops, device=place.device, backend=place.backend)
    if csv_path is None:
        return _measure(spec, as_json=as_json, report=report)
    _check_folder(csv_path)
    return _measure(spec, as_json=as_json, report=report, csv=lambda found: csv_path.write_text(found.to_csv()))


@command.command("p2p", context_settings=WITH_UNDERSCORES)
@takes(P2pSpec)
@_outputs
def p2p(spec: P2pSpec, *, as_json: bool, report: Path | None) -> int:
    """Measure latency and bandwidth between all pairs of ranks, check what arrives, and find the slow link.

    Alone it starts ranks here; on many machines start it there:
    shardwise launch --nnodes=2 ... -m shardwise bench p2p
    """
    return _measure(spec, as_json=as_json, report=report)


@command.command("overlap", context_settings=WITH_UNDERSCORES, no_args_is_help=True)
@takes(OverlapSpec)
@_outputs
@click.option("--out", type=_FILE, help="Write the plan with what is recommended: a .toml file.")
def overlap(spec: OverlapSpec, *, as_json: bool, report: Path | None, out: Path | None) -> int:
    """Measure a step of the Job in JOB.py with, without, and of communication alone, under settings of a plan."""
    if out is None:
        return _measure(spec, as_json=as_json, report=report)
    if out.suffix != ".toml" or not out.parent.is_dir():
        raise InputError(
            f"--out {out} is not a path for a plan",
            code="bench.plan-path-invalid",
            fix="name a .toml file in a folder that exists",
        )
    return _measure(spec, as_json=as_json, report=report, out=lambda found: _write_plan(found.plan, out))


def _write_plan(plan: Plan, out: Path) -> None:
    try:
        out.write_text(plan_to_toml(plan))
    except OSError as error:
        raise InputError(
            f"{out} cannot be written ({error.strerror})", code="cli.output-write-failed", fix="name another path"
        ) from None


@command.command(
    "scaling",
    # Options stand before the script; the rest is the script's.
    context_settings={**WITH_UNDERSCORES, "allow_interspersed_args": False},
    no_args_is_help=True,
)
@takes(ScalingSpec)
@_outputs
def scaling(spec: ScalingSpec, *, as_json: bool, report: Path | None) -> int:
    """Measure the throughput of a Job, or of any script, on more and more ranks of this machine."""
    refuse_started_ranks("bench scaling starts its own ranks")
    return _measure(spec, as_json=as_json, report=report)


@command.command("step", context_settings=WITH_UNDERSCORES, no_args_is_help=True)
@takes(StepSpec)
@_outputs
def step(spec: StepSpec, *, as_json: bool, report: Path | None) -> int:
    """Run a few steps of the Job in JOB.py under a plan: time by phase, throughput, utilisation, memory.

    Starts its own ranks; under srun, torchrun or shardwise launch it is one of theirs.
    """
    return _measure(spec, as_json=as_json, report=report)
