"""`shardwise bench step`: a job's step under a plan, measured and beside what was predicted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from shardwise.run.console import complain, say
from shardwise.run.exitcodes import DONE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardwise.bench.step import StepMeasurement
    from shardwise.job import Job
    from shardwise.plan import Plan

_UNITS = (("_bytes", 2**20, "MiB"), ("_per_s", 1.0, "/s"), ("_s", 1e-3, "ms"))


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
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="Where to run (default: cuda where there is one).")
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
    as_json: bool,
) -> int:
    """Run a few steps of the Job in JOB.py under a plan: time by phase, throughput, memory."""
    from shardwise.cli.train import split_settings, this_device
    from shardwise.environment import identify
    from shardwise.errors import InputError
    from shardwise.job import load_job
    from shardwise.plan import settle

    me = identify()
    if me.world_size > 1:
        raise InputError(f"bench starts its own ranks, and {me.source} has started this one", fix="run it by itself")
    if fake_world and nproc:
        raise InputError(
            f"--fake-world {fake_world} runs in one process, and --nproc {nproc} starts more", fix="leave one out"
        )
    if rank and not fake_world:
        raise InputError(f"--rank {rank} is for a fake world", fix="add --fake-world N")
    reference, overrides = split_settings(job, settings)
    loaded = load_job(reference)
    where = this_device(device, nproc or 1)
    plan = settle(
        plan_spec,
        batch_size=loaded.batch_size,
        world_size=fake_world or nproc or 1,
        device=where,
        overrides=overrides,
    )
    from shardwise.bench.step import measure_ranks, rehearse

    if fake_world:
        index = "cuda:0" if where.kind == "cuda" else "cpu"
        found = [rehearse(loaded, plan, rank=rank, steps=steps, device=index)]
    else:
        found = measure_ranks(reference, plan, steps=steps, device=where.kind)
    show(found, as_json=as_json, predicted=_predicted(loaded, plan, processes=nproc or 1))
    return DONE


def _predicted(job: Job, plan: Plan, *, processes: int) -> dict[str, float] | None:
    """Return what planning says of the step, None where the model cannot be described without weights."""
    from shardwise.bench.predict import predict_step
    from shardwise.cli.describe import describe_job
    from shardwise.errors import JobError

    try:
        return predict_step(job, plan, describe_job, processes=processes)
    except JobError as error:
        complain(f"shardwise: nothing predicted: {error}")
        return None


def show(found: list[StepMeasurement], *, as_json: bool, predicted: Mapping[str, float] | None = None) -> None:
    """Show the slowest rank's figures, with predictions beside them where there are some; or all ranks as JSON."""
    import msgspec

    from shardwise.bench.step import compare

    if as_json:
        say(msgspec.json.encode({"measured": found, "predicted": predicted}).decode())
        return
    slowest = max(found, key=lambda measured: measured.step.median_s)
    ranks = "fake world" if slowest.backend == "fake" else f"slowest of {len(found)}"
    say(f"plan {slowest.plan} · rank {slowest.rank} of {slowest.world_size} ({ranks}) · {slowest.device}")
    for name, value, expected in compare(slowest, predicted):
        beside = "" if expected is None else f"   predicted {_shown(name, expected)} ({expected / value - 1:+.1%})"
        say(f"{_label(name):14} {_shown(name, value):>14}{beside}")
    say(f"{'spread':14} {slowest.step.spread:>13.1%}   over {slowest.step.repeats} steps")
    for words, num_bytes in slowest.at_peak:
        say(f"  {num_bytes / 2**20:10.2f} MiB  {words}")


def _label(name: str) -> str:
    stem = name.removesuffix("_bytes").removesuffix("_s").removesuffix("_per")
    return {"peak": "peak memory", "first_peak": "peak at start", "reserved": "reserved"}.get(stem, stem)


def _shown(name: str, value: float) -> str:
    unit, size = next((unit, size) for ending, size, unit in _UNITS if name.endswith(ending))
    return f"{value / size:,.2f} {unit}"
