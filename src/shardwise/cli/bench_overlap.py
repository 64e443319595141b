"""`shardwise bench overlap`: how much of a job's communication hides behind its compute, and what to set."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from shardwise.cli.bench import bench_device, load_torch_job, place_options, show_table, warn_if_busy
from shardwise.environment import identify
from shardwise.errors import InputError
from shardwise.runs.console import DONE, say

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.bench.overlap import Advice, Overlap
    from shardwise.plans import Plan


def _numbers(_context: click.Context, option: click.Parameter, text: str | None) -> tuple[float, ...] | None:
    """Read numbers above 0 with commas between them."""
    if text is None:
        return None
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        values = ()
    if not values or not all(0 < value < float("inf") for value in values):
        raise InputError(
            f"{option.opts[0]} is {text!r}", code="cli.number-list-invalid", fix="write numbers above 0, such as 1,5,25"
        )
    return values


@click.command(
    "overlap", context_settings={"token_normalize_func": lambda token: token.replace("_", "-")}, no_args_is_help=True
)
@click.argument("job", metavar="JOB.py[:NAME]")
@click.option("--plan", "plan_spec", default="auto", show_default=True, help="auto, preset, product or .toml file.")
@click.option(
    "--nproc", "--nproc-per-node", "nproc", type=click.IntRange(min=1), help="Processes to start (default: 1)."
)
@click.option("--buckets", callback=_numbers, metavar="MB,MB", help="Sizes of DDP's buckets (default: 1,5,25,100).")
@click.option("--prefetch", callback=_numbers, metavar="N,N", help="FSDP's blocks gathered ahead (default: 1,2,4).")
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True, help="Times to build each setting.")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Override a field of the job or the plan.")
@place_options(
    device="Where to run (default: cuda where there is one).",
    backend="gloo, nccl, mpi or ucc (default: by device); gloo ranks may share a GPU.",
)
@click.option("--out", type=click.Path(path_type=Path), help="Write the plan with what is recommended: a .toml file.")
@click.option("--json", "as_json", is_flag=True, help="Write what was measured as JSON to standard output.")
@click.option("--report", type=click.Path(path_type=Path), help="Write a report: .html or .md.")
def command(
    *,
    job: str,
    plan_spec: str,
    nproc: int | None,
    buckets: tuple[float, ...] | None,
    prefetch: tuple[float, ...] | None,
    rounds: int,
    settings: tuple[str, ...],
    device: str | None,
    backend: str | None,
    out: Path | None,
    as_json: bool,
    report: Path | None,
) -> int:
    """Measure a step of the Job in JOB.py with, without, and of communication alone, under settings of a plan."""
    from shardwise.bench.overlap import Effort, advise, advised_plan, check_plan, measure_overlap
    from shardwise.planner.settle import settle, split_settings

    _check_files(out, report)
    reference, overrides = split_settings(job, settings)
    size = identify().world_size if identify().world_size > 1 else nproc or 1
    where, opened = bench_device(device, backend, nproc or 1)
    batch_size = load_torch_job(reference).batch_size
    plan = settle(plan_spec, batch_size=batch_size, world_size=size, device=where, overrides=overrides)
    check_plan(plan)
    varied = _settings(plan, buckets, prefetch)
    warn_if_busy()
    found = measure_overlap(
        reference,
        plan,
        varied,
        effort=Effort(rounds=rounds),
        nproc=nproc,
        device=opened,
        backend=backend,
    )
    if found is None:
        return DONE  # another rank of this world shows it
    advice = advise(found)
    title = f"{Path(reference.path).name} on {plan.layout} (zero {plan.zero}), {size} ranks"
    _show(found, advice, title, as_json=as_json)
    if out is not None:
        _write_plan(advised_plan(plan, found, advice), out)
    if report is not None:
        _write_report(found, advice, title, opened, report)
    return DONE


def _check_files(out: Path | None, report: Path | None) -> None:
    """Refuse places that cannot be written to before anything is measured."""
    from shardwise.bench.report.write import check_report_path

    if report is not None:
        check_report_path(report)
    if out is not None and (out.suffix != ".toml" or not out.parent.is_dir()):
        raise InputError(
            f"--out {out} is no place for a plan",
            code="bench.plan-path-invalid",
            fix="name a .toml file in a folder that is there",
        )


def _settings(
    plan: Plan, buckets: tuple[float, ...] | None, prefetch: tuple[float, ...] | None
) -> list[dict[str, object]]:
    """Return the settings to measure; options that change nothing in this plan are refused."""
    from shardwise.bench.overlap import BUCKETS_MB, PREFETCHES, vary
    from shardwise.parallel.support import uses_ddp

    kind = f"plan {plan.layout} (zero {plan.zero})"
    if buckets is not None and not uses_ddp(plan):
        raise InputError(
            f"--buckets are DDP's, and {kind} has none",
            code="bench.buckets-without-ddp",
            fix="use --plan ddp, or leave it out",
        )
    if prefetch is not None and plan.zero < 2:
        raise InputError(
            f"--prefetch is for cut weights, and {kind} keeps them whole",
            code="bench.prefetch-without-shards",
            fix="use --plan fsdp",
        )
    if prefetch is not None and not all(depth == int(depth) for depth in prefetch):
        raise InputError(
            "--prefetch counts blocks", code="bench.prefetch-not-whole", fix="use whole numbers, such as 1,2,4"
        )
    return vary(plan, buckets=buckets or BUCKETS_MB, prefetches=tuple(int(depth) for depth in prefetch or PREFETCHES))


def _show(found: Sequence[Overlap], advice: Advice, title: str, *, as_json: bool) -> None:
    import msgspec

    from shardwise.bench.overlap import overlap_table, verdict

    if as_json:
        hidden = [{"hidden": each.split.hidden, "hidden_spread": each.split.hidden_spread} for each in found]
        settings = [{**msgspec.to_builtins(each), **share} for each, share in zip(found, hidden, strict=True)]
        document = {"title": title, "settings": settings, "advice": advice, "verdict": verdict(found, advice)}
        say(msgspec.json.encode(document).decode())
        return
    say(title)
    show_table(overlap_table(found, advice))
    say(verdict(found, advice))


def _write_plan(plan: Plan, out: Path) -> None:
    from shardwise.plans.toml import plan_to_toml

    try:
        out.write_text(plan_to_toml(plan))
    except OSError as error:
        raise InputError(
            f"{out} cannot be written ({error.strerror})", code="cli.output-write-failed", fix="name another place"
        ) from None


def _write_report(found: Sequence[Overlap], advice: Advice, title: str, device: str, path: Path) -> None:
    import torch

    from shardwise.bench.overlap import overlap_findings
    from shardwise.bench.report.findings import machine_facts
    from shardwise.bench.report.write import write_report

    facts = machine_facts(torch.device(device))
    write_report(overlap_findings(found, advice, title=f"Overlap: {title}", facts=facts), path)
