"""`shardwise plan`: finds the plans that fit a cluster, with their memory and time, and converts DeepSpeed configs."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from shardwise.cli.main import WITH_UNDERSCORES, present, spec_options
from shardwise.engines.engine import engine_named
from shardwise.errors import InputError
from shardwise.planner.plan import load_named_job, plan
from shardwise.planner.spec import PlanSpec
from shardwise.plans.toml import plan_to_toml, read_plan
from shardwise.runs.console import DONE, echo, echo_error

_FILE = click.Path(path_type=Path, dir_okay=False)


@click.command("plan", context_settings=WITH_UNDERSCORES, no_args_is_help=True)
@spec_options(PlanSpec)
@click.option("--calibrate", is_flag=True, help="First measure the rates of this machine (less than a minute).")
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
@click.option("--out", type=_FILE, help="Write the plan to this file, for train --plan FILE.")
@click.option("--picture", type=_FILE, help="Write a plot of memory and timeline to this SVG file.")
@click.option("--report", "page", type=_FILE, help="Write an HTML page with plots, reasons and the next command.")
@click.option("--to-deepspeed", type=_FILE, help="Write the plan as a JSON config for deepspeed.initialize.")
@click.option("--from-deepspeed", type=_FILE, help="Convert this DeepSpeed JSON config to a plan.")
@click.option("--nproc", type=click.IntRange(min=1), help="Number of ranks, if a DeepSpeed config does not set it.")
def command(
    spec: PlanSpec,
    *,
    calibrate: bool,
    as_json: bool,
    out: Path | None,
    picture: Path | None,
    page: Path | None,
    to_deepspeed: Path | None,
    from_deepspeed: Path | None,
    nproc: int | None,
) -> int:
    """Choose a plan for a published MODEL, a transformers CONFIG.json, or the job in JOB.py, on a cluster."""
    files = {"--out": out, "--picture": picture, "--report": page, "--to-deepspeed": to_deepspeed}
    _check_files(files)
    if from_deepspeed is not None:
        return _read_deepspeed(spec, from_deepspeed, out, to_deepspeed, nproc)
    if nproc is not None:
        raise InputError(
            f"--nproc {nproc} is valid with --from-deepspeed only",
            code="cli.option-not-applicable",
            fix=f"use --cluster {nproc}xthis for {nproc} ranks on this machine",
        )
    if spec.model is not None and spec.model.endswith(".toml") and to_deepspeed is not None:
        return _write_plan_file(spec.model, to_deepspeed)
    if calibrate:
        from shardwise.measurement.calibrate import calibrate as measure  # imports torch

        calibration = measure()
        echo_error(f"shardwise: measured {calibration.device.name} on {calibration.machine}")
    report = msgspec.structs.replace(plan(spec), out="" if out is None else str(out))
    present(report, as_json=as_json)
    if picture is not None:
        _write(picture, report.to_svg())
    if page is not None:
        _write(page, report.to_html())
    if report.chosen is not None and out is not None:
        _write(out, report.to_toml())
    if report.best is not None and to_deepspeed is not None:
        plans = [report.best] if report.forms else [candidate.plan for candidate in report.candidates]
        job = load_named_job(spec) if spec.is_job else None
        expressible, notes = engine_named("deepspeed").write_config(plans, to_deepspeed, job)
        if expressible.layout != report.best.layout:
            echo_error(f"note      the best plan that DeepSpeed's JSON can express is {expressible.layout}")
        echo_error("\n".join(notes))
    return report.exit_code


def _check_files(files: dict[str, Path | None]) -> None:
    """Raise InputError for a file that cannot be written, before anything is predicted."""
    for name, path in files.items():
        if path is None:
            continue
        if not path.parent.is_dir():
            raise InputError(
                f"{name} {path} is in a directory that does not exist",
                code="cli.output-folder-missing",
                fix="create the directory first",
            )
        if path.is_dir():
            raise InputError(
                f"{name} {path} is a directory", code="cli.output-is-folder", fix="pass the path of a file"
            )
    formats = (("--report", ".html", "cli.report-extension"), ("--picture", ".svg", "cli.picture-extension"))
    for name, suffix, code in formats:
        path = files[name]
        if path is not None and path.suffix != suffix:
            raise InputError(
                f"{name} must be a {suffix} file, got {path.name}",
                code=code,
                fix=f"use {path.stem}{suffix}",
            )


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"{path} cannot be written ({error.strerror})", code="cli.output-write-failed", fix="pass another path"
        ) from None


def _read_deepspeed(spec: PlanSpec, path: Path, out: Path | None, to_deepspeed: Path | None, nproc: int | None) -> int:
    """Convert a DeepSpeed config to a plan in `out` or on standard output, and list settings that are not converted."""
    if spec.model is not None or to_deepspeed is not None:
        other = spec.model or f"--to-deepspeed {to_deepspeed}"
        raise InputError(
            f"--from-deepspeed cannot be combined with {other}",
            code="cli.options-conflict",
            fix="remove one of the two",
        )
    reading = engine_named("deepspeed").read_config(
        path, num_ranks=nproc, batch_size=spec.batch_size, precision=spec.precision
    )
    if out is None:
        echo(plan_to_toml(reading.plan).rstrip())
    else:
        _write(out, plan_to_toml(reading.plan))
        echo(f"plan      {out}: {reading.plan.layout}, zero {reading.plan.zero}, for train --plan {out}")
    echo_error(f"job       batch_size={reading.plan.batch_size}")
    for note in reading.notes:
        echo_error(f"note      {note}")
    return DONE


def _write_plan_file(path: str, to_deepspeed: Path) -> int:
    """Convert a plan file to a DeepSpeed config."""
    _, notes = engine_named("deepspeed").write_config([read_plan(Path(path))], to_deepspeed, None)
    echo_error("\n".join(notes))
    return DONE
