"""`shardwise bench step`: a job's step under a plan, measured and beside what was predicted."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from shardwise.cli.bench import load_torch_job, place_options
from shardwise.environment import identify
from shardwise.errors import InputError, JobError
from shardwise.planner.search.subject import describe_job
from shardwise.runs.console import DONE, complain, say

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardwise.bench.profile import ProfileSpec, StepProfile
    from shardwise.bench.step import StepMeasurement
    from shardwise.environment import Identity
    from shardwise.job import Job
    from shardwise.plans import Plan


@click.command(
    "step", context_settings={"token_normalize_func": lambda token: token.replace("_", "-")}, no_args_is_help=True
)
@click.argument("job", metavar="JOB.py[:NAME]")
@click.option("--plan", "plan_spec", default="auto", show_default=True, help="auto, preset, product or .toml file.")
@click.option(
    "--nproc", "--nproc-per-node", "nproc", type=click.IntRange(min=1), help="Processes to start (default: 1)."
)
@click.option("--fake-world", type=click.IntRange(min=1), help="Run one rank of so many; the others are fake.")
@click.option("--rank", type=click.IntRange(min=0), default=0, show_default=True, help="Which rank of a fake world.")
@click.option("--steps", type=click.IntRange(min=1), default=5, show_default=True, help="Steps to measure.")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Override a field of the job or the plan.")
@place_options(
    devices=("cpu", "cuda", "cuda:0"),
    device="Where to run (default: cuda where there is one); ranks share cuda:0.",
    backend="gloo, nccl, mpi or cpu:gloo,cuda:nccl (default: by the device).",
)
@click.option("--profile", "profiled", is_flag=True, help="Also name the kernels that take the time.")
@click.option("--trace", type=click.Path(path_type=Path), help="Write a trace for Perfetto, .json or .json.gz.")
@click.option("--report", type=click.Path(path_type=Path), help="Write a report, .html or .md.")
@click.option("--json", "as_json", is_flag=True, help="Write what was measured as JSON to standard output.")
def command(
    *,
    job: str,
    plan_spec: str,
    nproc: int | None,
    fake_world: int | None,
    rank: int,
    steps: int,
    settings: tuple[str, ...],
    device: str | None,
    backend: str | None,
    profiled: bool,
    trace: Path | None,
    report: Path | None,
    as_json: bool,
) -> int:
    """Run a few steps of the Job in JOB.py under a plan: time by phase, throughput, utilisation, memory.

    Starts its own ranks; under srun, torchrun or shardwise launch it is one of theirs.
    """
    from shardwise.planner.settle import local_device, settle, split_settings

    me = identify()
    _check(me, nproc=nproc, fake_world=fake_world, rank=rank)
    profile = _profile_spec(profiled=profiled, trace=trace, report=report)
    reference, overrides = split_settings(job, settings)
    loaded = load_torch_job(reference)
    local = nproc or me.local_world_size
    kind = device.partition(":")[0] if device else None
    where = local_device(kind, 1 if device == "cuda:0" or fake_world else local)
    plan = settle(
        plan_spec,
        batch_size=loaded.batch_size,
        world_size=fake_world or nproc or me.world_size,
        device=where,
        overrides=overrides,
    )
    from shardwise.bench.step import measure_ranks, rehearse

    if fake_world:
        index = "cuda:0" if where.kind == "cuda" else "cpu"
        found = [rehearse(loaded, plan, rank=rank, steps=steps, device=index, profile=profile)]
    else:
        found = measure_ranks(
            reference, plan, steps=steps, device=device or where.kind, backend=backend, profile=profile
        )
    if not found:
        return DONE  # rank 0 speaks for all
    predicted, used = _expected(loaded, plan, found, processes=1 if fake_world else local)
    show(found, as_json=as_json, predicted=predicted, used=used)
    if report is not None:
        _write_report(found, report, predicted=predicted, used=used)
    return DONE


def _check(me: Identity, *, nproc: int | None, fake_world: int | None, rank: int) -> None:
    if me.world_size > 1 and (nproc or fake_world):
        asked = f"--nproc {nproc}" if nproc else f"--fake-world {fake_world}"
        raise InputError(
            f"{asked} inside a world of {me.world_size} ranks that {me.source} started",
            code="cli.option-inside-world",
            fix="leave it out, or run it by itself",
        )
    if fake_world and nproc:
        raise InputError(
            f"--fake-world {fake_world} runs in one process, and --nproc {nproc} starts more",
            code="cli.options-conflict",
            fix="leave one out",
        )
    if rank and not fake_world:
        raise InputError(
            f"--rank {rank} is for a fake world", code="cli.option-not-applicable", fix="add --fake-world N"
        )


def _profile_spec(*, profiled: bool, trace: Path | None, report: Path | None) -> ProfileSpec | None:
    """Return what to profile, once the paths are known to be writable; a trace needs a profile."""
    if report is not None:
        from shardwise.bench.report.write import check_report_path

        check_report_path(report)
    if not profiled and trace is None:
        return None
    from shardwise.bench.profile import ProfileSpec, check_trace_path

    if trace is not None:
        check_trace_path(trace)
    return ProfileSpec(trace=None if trace is None else trace.absolute())


def _expected(
    job: Job, plan: Plan, found: list[StepMeasurement], *, processes: int
) -> tuple[dict[str, float] | None, float | None]:
    """Return what planning says of the step and the share of the matmul rate it reached; None where nothing is known.

    Nothing is predicted for several nodes, of whose links this machine knows nothing.
    """
    from shardwise.bench.step import training_flops, utilisation
    from shardwise.bench.step_findings import predict_step

    try:
        model = describe_job(job, plan.precision.compute)
    except JobError as error:
        complain(f"shardwise: nothing predicted: {error}")
        return None, None
    used = utilisation(found, training_flops(model.for_plan(plan)))
    if found[0].backend != "fake" and processes < found[0].world_size:
        return None, used
    return predict_step(job, plan, lambda *_: model, processes=processes), used


def show(
    found: list[StepMeasurement],
    *,
    as_json: bool,
    predicted: Mapping[str, float] | None = None,
    used: float | None = None,
) -> None:
    """Show the slowest rank's figures, with predictions beside them where there are some; or all ranks as JSON.

    `used` is the share of the matmul rate.
    """
    import msgspec

    from shardwise.bench.step import compare
    from shardwise.bench.step_findings import label, shown, slowest

    if as_json:
        say(msgspec.json.encode({"measured": found, "predicted": predicted, "utilisation": used}).decode())
        return
    worst = slowest(found)
    ranks = "fake world" if worst.backend == "fake" else f"slowest of {len(found)}"
    say(f"plan {worst.plan} · rank {worst.rank} of {worst.world_size} ({ranks}) · {worst.device}")
    for name, value, expected in compare(worst, predicted):
        beside = "" if expected is None else f"   predicted {shown(name, expected)} ({expected / value - 1:+.1%})"
        say(f"{label(name):14} {shown(name, value):>14}{beside}")
    if used is not None:
        say(f"{'utilisation':14} {used:>13.1%}   of the matmul rate, by what forward and backward need")
    say(f"{'spread':14} {worst.step.spread:>13.1%}   over {worst.step.repeats} steps")
    for words, num_bytes in worst.at_peak:
        say(f"  {num_bytes / 2**20:10.2f} MiB  {words}")
    if worst.profile is not None:
        _show_profile(worst.profile)


def _show_profile(profile: StepProfile) -> None:
    """Show where the time of the profiled steps went."""
    say(
        f"profiled {profile.steps} steps of {profile.seconds * 1e3:,.2f} ms: compute {profile.compute_s * 1e3:,.2f} ms,"
        f" communication {profile.communication_s * 1e3:,.2f} ms ({profile.exposed_s * 1e3:,.2f} ms of it exposed),"
        f" idle {profile.idle_s * 1e3:,.2f} ms"
    )
    for kernel in profile.top:
        share = kernel.seconds / profile.seconds
        say(f"  {kernel.seconds * 1e3:10.3f} ms {share:6.1%} {kernel.calls:8g} x  {kernel.name[:80]}")
    if profile.trace is not None:
        say(f"trace {profile.trace} (open it at https://ui.perfetto.dev)")


def _write_report(
    found: list[StepMeasurement], path: Path, *, predicted: Mapping[str, float] | None, used: float | None
) -> None:
    from shardwise.bench.report.findings import machine_facts
    from shardwise.bench.report.write import write_report
    from shardwise.bench.step_findings import step_findings

    write_report(step_findings(found, predicted=predicted, used=used, facts=machine_facts(None)), path)
    complain(f"shardwise: report in {path}")
