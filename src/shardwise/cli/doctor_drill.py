"""`shardwise doctor drill`: faults in the user's own job, and whether they are named and the job comes back."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardwise.cli.doctor import say_json
from shardwise.cli.main import refuse_started_ranks
from shardwise.errors import InputError
from shardwise.runs.console import CHECK_FAILED, DONE, complain, say

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardwise.doctor.drill.drill import DrillTarget
    from shardwise.doctor.drill.faults import Kind
    from shardwise.doctor.drill.judge import DrillResult
    from shardwise.launcher.local.attempts import LocalLaunch
    from shardwise.runs import RunDirectory

_CHOICES = ("kill", "freeze", "slow", "mismatch", "link", "checkpoint", "disk", "all")
_STEPS = 40
_OF_A_JOB = {
    "plan_spec": "--plan",
    "settings": "--set",
    "steps": "--steps",
    "device": "--device",
    "backend": "--backend",
}


@click.command(
    "drill",
    context_settings={
        "token_normalize_func": lambda token: token.replace("_", "-"),
        "allow_interspersed_args": False,  # options stand before the script, the rest is the script's
    },
    no_args_is_help=True,
)
@click.option(
    "--drill",
    "drills",
    multiple=True,
    type=click.Choice(_CHOICES),
    default=("all",),
    help="What to do to it; may be repeated (default: all).",
)
@click.option(
    "--nproc", "--nproc-per-node", "nproc", type=click.IntRange(min=2), default=2, show_default=True, help="Ranks."
)
@click.option("--plan", "plan_spec", help="Of a job: auto, preset, product or .toml file (default: auto).")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Override a field of the job or the plan.")
@click.option(
    "--steps", type=click.IntRange(min=10), help=f"Of a job: optimizer steps of each run (default: {_STEPS})."
)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="Of a job (default: cuda where there is one).")
@click.option("--backend", help="Of a job: gloo, nccl or cpu:gloo,cuda:nccl (default: by device).")
@click.option(
    "--hang-after",
    type=click.FloatRange(min=0),
    default=3.0,
    show_default=True,
    metavar="SECONDS",
    help="When a rank that others wait for is missed; 0 notices nothing.",
)
@click.option(
    "--run-dir", type=click.Path(path_type=Path), help="Folder that keeps all runs (default: a temporary one)."
)
@click.option("--script", "is_script", is_flag=True, help="It is no job: run it as launch does, with its arguments.")
@click.option("--json", "as_json", is_flag=True, help="Write the results as JSON to standard output.")
@click.argument("script", metavar="JOB.py[:NAME]|SCRIPT.py")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(*, script: str, arguments: tuple[str, ...], is_script: bool, as_json: bool, **options: Any) -> int:
    """Do harm to ranks, links, checkpoints and disk of your own job, and check that it is named and comes back."""
    from shardwise.doctor.drill.drill import run_drills

    refuse_started_ranks("drills start their own ranks")
    kinds = _kinds(options["drills"], is_script=is_script)
    subject = _script(script, arguments, options) if is_script else _job(script, arguments, options)
    with _folder(options["run_dir"]) as (folder, failed):
        results = run_drills(subject, kinds, folder, hang_after_s=options["hang_after"], tell=_tell)
        failed += [result for result in results if not result.passed]
    if as_json:
        say_json({"drills": results, "passed": not failed})
    else:
        _show(results)
    return CHECK_FAILED if failed else DONE


def _kinds(asked: Sequence[str], *, is_script: bool) -> list[Kind]:
    """Return the drills to run, each once."""
    from shardwise.doctor.drill.faults import KINDS, OF_JOBS

    if is_script and (beyond := [kind for kind in OF_JOBS if kind in asked]):
        raise InputError(
            f"--drill {beyond[0]} is about checkpoints of a job, and --script has its own",
            code="cli.option-not-applicable",
            fix="drill a job, or leave it out",
        )
    able = [kind for kind in KINDS if not is_script or kind not in OF_JOBS]
    return [kind for kind in able if kind in asked or "all" in asked]


def _job(job: str, arguments: tuple[str, ...], options: dict[str, Any]) -> DrillTarget:
    """Return a described job, a few steps long, as `train` would launch it."""
    from shardwise.doctor.drill.drill import DrillTarget, save_interval
    from shardwise.job import load_job
    from shardwise.job.engine import engine_of
    from shardwise.job.job import LENGTHS
    from shardwise.launcher.spec import DeviceSpec
    from shardwise.parallel.support import require_supported
    from shardwise.planner.job_plan import local_device, split_settings
    from shardwise.planner.settle import settle
    from shardwise.runner.local import worker_launch, write_run_inputs
    from shardwise.training.spec import SaveSpec, TrainSpec

    if arguments:
        raise InputError(
            f"{job} is a job and takes no argument {arguments[0]!r}",
            code="cli.unexpected-argument",
            fix="put options before it, or add --script",
        )
    lengths = [text for text in options["settings"] if text.partition("=")[0].strip() in LENGTHS]
    if lengths:
        raise InputError(
            f"--set {lengths[0]} is the length of the job",
            code="doctor.drill-length-set",
            fix="use --steps for that of a drill",
        )
    steps, nproc = options["steps"] or _STEPS, options["nproc"]
    reference, overrides = split_settings(job, (*options["settings"], f"steps={steps}"))
    loaded = load_job(reference)
    if engine_of(loaded) == "mlx":
        raise InputError(
            f"drills come with steps of torch's optimizers, and the model of {job} is MLX's",
            code="support.mlx-model",
            fix="shardwise verify --resume kills and resumes it",
        )
    where = local_device(options["device"], nproc)
    plan = settle(
        options["plan_spec"] or "auto",
        batch_size=loaded.batch_size,
        world_size=nproc,
        device=where,
        overrides=overrides,
    )
    require_supported(plan)
    train_spec = TrainSpec(
        job=job,
        place=DeviceSpec(device=where.kind, backend=options["backend"]),
        save=SaveSpec(every=save_interval(steps), resume="never"),
    )

    def spec(run: RunDirectory) -> LocalLaunch:
        write_run_inputs(run, reference, plan, started_at=time.time())
        return worker_launch(train_spec, run, nproc=nproc)

    return DrillTarget(name=reference.name, spec=spec, steps=steps)


def _script(path: str, arguments: tuple[str, ...], options: dict[str, Any]) -> DrillTarget:
    """Return a script as `launch` would start it."""
    from shardwise.doctor.drill.drill import DrillTarget
    from shardwise.launcher.local.attempts import LocalLaunch
    from shardwise.launcher.local.target import Script, check_target
    from shardwise.runner.local import PRELOAD

    if given := [option for name, option in _OF_A_JOB.items() if options[name]]:
        raise InputError(
            f"{given[0]} is for a job, and --script says that {path} is none",
            code="cli.option-not-applicable",
            fix="leave one of them out",
        )
    target = Script(path, arguments)
    check_target(target)
    spec = LocalLaunch(target=target, nproc=options["nproc"], preload=PRELOAD)
    return DrillTarget(name=target.name, spec=lambda _: spec)


@contextlib.contextmanager
def _folder(named: Path | None) -> Iterator[tuple[Path, list[DrillResult]]]:
    """Yield where runs go, and a list for results that failed: a temporary folder stays if there are some."""
    failed: list[DrillResult] = []
    if named is not None:
        if named.exists() and (not named.is_dir() or any(named.iterdir())):
            raise InputError(
                f"--run-dir {named} is not empty", code="run.directory-not-empty", fix="name another folder"
            )
        yield named, failed
        return
    folder = Path(tempfile.mkdtemp(prefix="shardwise-drill-"))
    try:
        yield folder, failed
    finally:
        if not failed:
            shutil.rmtree(folder, ignore_errors=True)


def _tell(result: DrillResult) -> None:
    """Say that a drill is done, while others are still to come."""
    complain(f"{result.drill}: {_status(result)}")


def _status(result: DrillResult) -> str:
    return "passed" if result.passed else "failed"


def _show(results: Sequence[DrillResult]) -> None:
    """Show the table, and below it what is not as it should be."""
    rows = [("drill", "fault", "named", "after", "came back", "after", "")]
    rows += [
        (
            result.drill,
            result.fault,
            result.who or "nobody",
            _seconds(result.detected_s),
            result.recovery or "no",
            _seconds(result.recovered_s),
            _status(result),
        )
        for result in results
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        say("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    say("")
    for result in results:
        for problem in result.problems:
            say(f"{result.drill}: {problem}")
        if result.problems:
            say(f"{result.drill}: shardwise doctor run {result.run}")
    passed = sum(result.passed for result in results)
    say(f"{passed} of {len(results)} drills passed")


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.1f} s"
