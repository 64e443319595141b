"""`shardwise bench scaling`: a job or any script on more and more ranks."""

from __future__ import annotations

import ast
import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardwise.cli.bench import bench_device, load_torch_job, place_options, show_table, warn_if_busy
from shardwise.cli.main import refuse_started_ranks
from shardwise.environment import num_threads
from shardwise.errors import InputError
from shardwise.planner.search.subject import describe_job
from shardwise.runs.console import DONE, complain, say

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardwise.bench.scaling import Mode, ScalingCurve
    from shardwise.job import Job
    from shardwise.plans import Plan

_OF_A_JOB = {"plan_spec": "--plan", "settings": "--set", "backend": "--backend", "device": "--device"}


@click.command(
    "scaling",
    context_settings={
        "token_normalize_func": lambda token: token.replace("_", "-"),
        "allow_interspersed_args": False,  # options stand before the script, the rest is the script's
    },
    no_args_is_help=True,
)
@click.option("--ranks", metavar="N,N", help="Numbers of ranks (default: powers of two up to --nproc).")
@click.option(
    "--nproc",
    "--nproc-per-node",
    "nproc",
    type=click.IntRange(min=1),
    help="Most processes to start (default: GPUs, else cores).",
)
@click.option("--mode", type=click.Choice(["strong", "weak"]), help="Which scaling (default: a job's both).")
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True, help="Times to start each number.")
@click.option("--plan", "plan_spec", help="Of a job: preset, product or .toml file, refitted (default: ddp).")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Override a field of the job or the plan.")
@place_options(
    device="Where a job runs (default: cuda if there is one).",
    backend="Of a job: gloo, nccl, mpi or ucc (default: by device); gloo ranks may share a GPU.",
)
@click.option("--pattern", metavar="REGEX", help="Of a script: finds its throughput in its output, by one group.")
@click.option("--json", "as_json", is_flag=True, help="Write what was measured as JSON to standard output.")
@click.option("--report", type=click.Path(path_type=Path), help="Write a report: .html or .md.")
@click.argument("script", metavar="JOB.py[:NAME]|SCRIPT.py")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(*, script: str, arguments: tuple[str, ...], as_json: bool, report: Path | None, **options: Any) -> int:
    """Measure the throughput of a Job, or of any script, on more and more ranks of this machine."""
    from shardwise.bench.report.write import check_report_path

    refuse_started_ranks("bench scaling starts its own ranks")
    if report is not None:
        check_report_path(report)
    if not arguments and options["pattern"] is None and _is_job(script):
        curves, on_cpu, title = _measure_job(script, options)
    else:
        curves, on_cpu, title = _measure_script(script, arguments, options)
    _show(curves, title, on_cpu=on_cpu, as_json=as_json, report=report)
    return DONE


def _is_job(script: str) -> bool:
    """Whether a file has a Job to measure, seen from its words: a script must not run to find out."""
    path_text, colon, _ = script.partition(":")
    path = Path(path_text)
    if not path.is_file():
        raise InputError(
            f"{path_text} is not there", code="cli.file-not-found", fix="name a Python file: a job or a script"
        )
    if colon:
        return True
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        raise InputError(
            f"{path_text} is not Python", code="cli.not-python", fix="name a Python file: a job or a script"
        ) from None
    assignments = [node for node in tree.body if isinstance(node, ast.Assign)]
    assigned = [target for node in assignments for target in node.targets]
    return any(isinstance(target, ast.Name) and target.id == "job" for target in assigned)


def _read_ranks(options: dict[str, Any]) -> tuple[int, ...]:
    """Return the numbers of ranks, in order."""
    from shardwise.bench.scaling import powers_of_two
    from shardwise.hardware import probe_gpus, usable_cores

    text, nproc = options["ranks"], options["nproc"]
    if text is None:
        return powers_of_two(nproc or len(probe_gpus()) or usable_cores())
    if nproc is not None:
        raise InputError(
            f"--ranks {text} says how many, and --nproc {nproc} too", code="cli.options-conflict", fix="leave one out"
        )
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise InputError(
            f"--ranks is {text!r}", code="cli.number-list-invalid", fix="write numbers of ranks, such as 1,2,4"
        )
    return tuple(sorted({int(part) for part in parts}))


def _measure_job(script: str, options: dict[str, Any]) -> tuple[list[ScalingCurve], bool, str]:
    """Return the curves of a job, whether it ran on the CPU, and a title."""
    from shardwise.bench.scaling import MODES, ScalingCase, measure_job, plan_for
    from shardwise.parallel.support import require_supported
    from shardwise.planner.settle import split_settings

    ranks = _read_ranks(options)
    reference, overrides = split_settings(script, options["settings"])
    where, opened = bench_device(options["device"], options["backend"], max(ranks))
    batch_size, spec = load_torch_job(reference).batch_size, options["plan_spec"] or "ddp"
    cases: dict[Mode, list[ScalingCase]] = {mode: [] for mode in MODES if options["mode"] in (None, mode)}
    for mode, points in cases.items():
        for number in ranks:
            plan = plan_for(spec, mode, number, batch_size=batch_size, device=where, overrides=overrides)
            points.append(ScalingCase(ranks=number, plan=plan))
    for case in itertools.chain.from_iterable(cases.values()):
        require_supported(case.plan)
    warn_if_busy()
    curves = measure_job(
        reference,
        cases,
        rounds=options["rounds"],
        opening={"device": opened, "backend": options["backend"]},
        predict=_predictor(),
    )
    return curves, where.kind == "cpu", f"{Path(reference.path).name}, plan {spec}"


def _predictor() -> Callable[[Job, Plan], float | None]:
    """Return what predicts the seconds of a step; where it cannot, that is said once."""
    from shardwise.bench.step_findings import predict_step

    said: set[str] = set()

    def predict(job: Job, plan: Plan) -> float | None:
        try:
            return predict_step(job, plan, describe_job, processes=plan.layout.world_size)["step_s"]
        except InputError as error:
            if str(error) not in said:
                said.add(str(error))
                complain(f"shardwise: nothing predicted: {error}")
            return None

    return predict


def _measure_script(
    script: str, arguments: tuple[str, ...], options: dict[str, Any]
) -> tuple[list[ScalingCurve], bool, str]:
    """Return the curve of a script, whether it has no GPUs to run on, and a title."""
    from shardwise.bench.scaling_report import measure_script, read_pattern
    from shardwise.hardware import probe_gpus, usable_cores
    from shardwise.launcher.local.target import Script, check_target
    from shardwise.launcher.options import read_nproc

    for name, option in _OF_A_JOB.items():
        if options[name]:
            raise InputError(
                f"{option} is for a job, and {script} is run as a script",
                code="cli.option-not-applicable",
                fix="write it after the script",
            )
    pattern = read_pattern(options["pattern"]) if options["pattern"] is not None else None
    if pattern is not None and options["mode"]:
        raise InputError(
            f"--mode {options['mode']} is for wall times, and --pattern reads a throughput",
            code="cli.options-conflict",
            fix="leave one out",
        )
    ranks, cores, gpus = _read_ranks(options), usable_cores(), len(probe_gpus())
    read_nproc(str(max(ranks)), num_gpus=gpus, num_cores=cores)
    target = Script(script, arguments)
    check_target(target)
    warn_if_busy()
    curve = measure_script(target, ranks, rounds=options["rounds"], mode=options["mode"] or "strong", pattern=pattern)
    return [curve], not gpus, Path(script).name


def _show(curves: Sequence[ScalingCurve], title: str, *, on_cpu: bool, as_json: bool, report: Path | None) -> None:
    import msgspec

    from shardwise.bench.scaling_report import Room, limits, scaling_findings, scaling_table, verdict
    from shardwise.hardware import probe_gpus, usable_cores

    room = Room(cores=usable_cores() if on_cpu else None, threads=num_threads(), gpus=len(probe_gpus()))
    notes = [limits(curve, room) for curve in curves]
    if as_json:
        say(msgspec.json.encode({"title": title, "curves": list(map(_plain, curves, notes))}).decode())
    else:
        say(title)
        for curve, words in zip(curves, notes, strict=True):
            say(f"\n{curve.title}")
            show_table(scaling_table(curve))
            for sentence in (*words, curve.note):
                say(sentence) if sentence else None
        say(f"\n{verdict(curves)}")
    if report is not None:
        from shardwise.bench.report.findings import machine_facts
        from shardwise.bench.report.write import write_report

        write_report(
            scaling_findings(curves, title=f"Scaling: {title}", facts=machine_facts(None), notes=notes), report
        )


def _plain(curve: ScalingCurve, words: list[str]) -> dict[str, Any]:
    """Return a curve for programs, with what is worked out from its points."""
    import msgspec

    points = [
        {
            **msgspec.to_builtins(point),
            "efficiency": curve.efficiency(point),
            "efficiency_spread": curve.efficiency_spread(point),
        }
        for point in curve.points
    ]
    return {"mode": curve.mode, "unit": curve.unit, "points": points, "note": curve.note, "limits": words}
