"""`shardwise bench`: benchmarks of collectives, links, overlap, scaling and training steps."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardwise.cli.main import WITH_UNDERSCORES, LazyGroup, present, refuse_started_ranks, spec_options
from shardwise.errors import InputError
from shardwise.measurement.specs import CommSpec, OverlapSpec, P2pSpec, ScalingSpec, StepSpec, bench
from shardwise.plans.toml import plan_to_toml
from shardwise.runs.console import DONE, echo_error

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardwise.plans import Plan
    from shardwise.spec import Spec

PARTS = {
    "comm": "Benchmark and verify collectives, with the columns of nccl-tests.",
    "p2p": "Measure latency and bandwidth between all pairs of ranks, and find slow links.",
    "overlap": "Measure how much communication overlaps with compute, and recommend settings.",
    "scaling": "Measure the scaling efficiency of a job or a script on increasing numbers of ranks.",
    "step": "Profile a few training steps: time by phase, throughput and memory.",
}

_FILE = click.Path(path_type=Path)


@click.group("bench", cls=LazyGroup, parts=PARTS, no_args_is_help=True)
def command() -> None:
    """Benchmark collectives, links, overlap, training steps and scaling."""


def _outputs(call: Callable[..., int]) -> Callable[..., int]:
    """Add --json and --report to a command."""
    page = click.option("--report", type=_FILE, help="Write a report with plots, as .html or .md.")
    return click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")(page(call))


def _measure(spec: Spec, *, as_json: bool, report: Path | None, **outputs: Callable[[Any], Any]) -> int:
    """Run a benchmark; on rank 0, print its report and pass the report to each of `outputs`."""
    if report is not None:
        from shardwise.measurement.report import check_report_path  # imports torch

        check_report_path(report)
    found = bench(spec)
    if found is None:
        return DONE
    for write in outputs.values():
        write(found)
    if report is not None:
        found.write(report)
        echo_error(f"shardwise: wrote report {report}")
    return present(found, as_json=as_json)


def _check_directory(path: Path) -> None:
    if not path.parent.is_dir() or path.is_dir():
        raise InputError(
            f"{path} cannot be written", code="cli.output-not-writable", fix="pass a file in an existing directory"
        )


@command.command("comm", context_settings=WITH_UNDERSCORES)
@spec_options(CommSpec)
@_outputs
@click.option("--csv", "csv_path", type=_FILE, help="Write the table to this file.")
@click.option("--explain", metavar="NAME", help="Demonstrate a collective on real ranks, or each one with NAME all.")
def comm(spec: CommSpec, *, as_json: bool, report: Path | None, csv_path: Path | None, explain: str | None) -> int:
    """Benchmark and verify collectives for each size, dtype, reduce operation and group; by default, all collectives.

    The exit code is 3 if a result is wrong or slower than in the baseline.
    """
    if explain:
        from shardwise.measurement.explain_text import explain as explain_call  # imports torch

        place = spec.place
        return explain_call(explain, spec.nproc, ops=spec.ops, device=place.device, backend=place.backend)
    if csv_path is None:
        return _measure(spec, as_json=as_json, report=report)
    _check_directory(csv_path)
    return _measure(spec, as_json=as_json, report=report, csv=lambda found: csv_path.write_text(found.to_csv()))


@command.command("p2p", context_settings=WITH_UNDERSCORES)
@spec_options(P2pSpec)
@_outputs
def p2p(spec: P2pSpec, *, as_json: bool, report: Path | None) -> int:
    """Measure latency and bandwidth between all pairs of ranks, verify the received data, and find slow links.

    The command starts ranks on this machine. On several machines, run it with the launcher:
    shardwise launch --nnodes=2 ... -m shardwise bench p2p
    """
    return _measure(spec, as_json=as_json, report=report)


@command.command("overlap", context_settings=WITH_UNDERSCORES, no_args_is_help=True)
@spec_options(OverlapSpec)
@_outputs
@click.option("--out", type=_FILE, help="Write the plan with the recommended settings to this .toml file.")
def overlap(spec: OverlapSpec, *, as_json: bool, report: Path | None, out: Path | None) -> int:
    """Measure steps of the job in JOB.py with and without communication, and communication alone."""
    if out is None:
        return _measure(spec, as_json=as_json, report=report)
    if out.suffix != ".toml" or not out.parent.is_dir():
        raise InputError(
            f"--out must be a .toml file in an existing directory, got {out}",
            code="bench.plan-path-invalid",
            fix="pass another path, such as --out plan.toml",
        )
    return _measure(spec, as_json=as_json, report=report, out=lambda found: _write_plan(found.plan, out))


def _write_plan(plan: Plan, out: Path) -> None:
    try:
        out.write_text(plan_to_toml(plan))
    except OSError as error:
        raise InputError(
            f"{out} cannot be written ({error.strerror})", code="cli.output-write-failed", fix="pass another path"
        ) from None


@command.command(
    "scaling",
    # Options precede the script; all arguments after it are passed to the script.
    context_settings={**WITH_UNDERSCORES, "allow_interspersed_args": False},
    no_args_is_help=True,
)
@spec_options(ScalingSpec)
@_outputs
def scaling(spec: ScalingSpec, *, as_json: bool, report: Path | None) -> int:
    """Measure the throughput of a job, or of any script, on increasing numbers of ranks of this machine."""
    refuse_started_ranks("bench scaling starts its own ranks")
    return _measure(spec, as_json=as_json, report=report)


@command.command("step", context_settings=WITH_UNDERSCORES, no_args_is_help=True)
@spec_options(StepSpec)
@_outputs
def step(spec: StepSpec, *, as_json: bool, report: Path | None) -> int:
    """Profile a few steps of the job in JOB.py: time by phase, throughput, utilization and memory.

    The command starts ranks on this machine, unless srun, torchrun or shardwise launch has started it as a rank.
    """
    return _measure(spec, as_json=as_json, report=report)
