"""`shardwise train`: a described job on N processes of this machine."""

from __future__ import annotations

import shlex
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardwise.cli.describe import describe_job, job_rules, nearest_key
from shardwise.cli.follow import summarise
from shardwise.cli.launch_plan import node_options, settle_nodes
from shardwise.cli.main import with_job_file
from shardwise.cli.sinks import HELP, checked_sinks
from shardwise.cli.train_options import (
    equality_options,
    hang_options,
    place_options,
    saving_options,
    settle_equality,
    settle_hang,
    settle_saving,
    start_guard,
)
from shardwise.environment import MPI_STARTERS, identify
from shardwise.errors import InputError, LaunchError, with_code
from shardwise.runs import create_run
from shardwise.runs.console import BAD_INPUT, DONE, INTERRUPTED, JOB_FAILED, PREEMPTED, complain
from shardwise.runs.failure import NOT_SAVED

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardwise.cli.train_nodes import RanksSpec
    from shardwise.environment import Identity
    from shardwise.job import Job, JobReference
    from shardwise.job.engine import MadeFor
    from shardwise.launcher.local.attempts import Launched
    from shardwise.monitor.sinks import SinkSpec
    from shardwise.planner.settle import LocalDevice
    from shardwise.plans import Plan
    from shardwise.runs import RunDirectory


@click.command(
    "train", context_settings={"token_normalize_func": lambda token: token.replace("_", "-")}, no_args_is_help=True
)
@click.argument("job", metavar="JOB.py[:NAME]")
@click.option(
    "--nproc", "--nproc-per-node", "nproc", type=click.IntRange(min=1), help="Processes to start (default: 1)."
)
@click.option("--plan", "plan_spec", default="auto", show_default=True, help="auto, preset, product or .toml file.")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Override a field of the job or the plan.")
@click.option("--run-dir", type=click.Path(path_type=Path), help="Where to write the run (default: runs/NAME-TIME).")
@saving_options
@click.option("--max-restarts", type=click.IntRange(min=0), default=0, help="Times to go on after a failure.")
@node_options
@hang_options
@equality_options(check_every=1000)
@click.option("--preset", metavar="NAME", help="Variables for a kind of cluster, as launch has it: gcp, infiniband ...")
@place_options(
    device="Where to train (default: cuda where there is one).",
    backend="gloo, nccl, mpi, ucc or cpu:gloo,cuda:nccl (default: by device).",
)
@click.option(
    "--sink",
    "sinks",
    multiple=True,
    metavar="KIND:PLACE",
    callback=checked_sinks,
    help=f"Mirror the run into a tracker, from a process of its own: {HELP}.",
)
def command(
    *,
    job: str,
    nproc: int | None,
    plan_spec: str,
    settings: tuple[str, ...],
    run_dir: Path | None,
    backend: str | None,
    device: str | None,
    **more: Any,
) -> int:
    """Train the Job in JOB.py, with progress, a report and a run directory."""
    from shardwise.cli.elsewhere import start_elsewhere
    from shardwise.cli.join import train_in_world, write_run_inputs
    from shardwise.cli.sinks import tell_preset
    from shardwise.cli.slurm import start_by_slurm
    from shardwise.cli.train_nodes import train_on_nodes
    from shardwise.job import load_job
    from shardwise.job.engine import engine_of
    from shardwise.launcher.local.attempts import LocalLaunch

    started_at = time.time()
    tell_preset(more["preset"])  # first: an unknown one is refused here, not on every machine
    if (elsewhere := start_elsewhere(grace_s=LocalLaunch.grace_s)) is not None:
        return elsewhere
    me = identify()
    reference, plan_overrides = split_settings(job, settings)
    loaded = load_job(reference)
    told = settle_saving(more) | settle_equality(more)
    if (submitted := start_by_slurm(reference.name, run_dir, grace_s=LocalLaunch.grace_s)) is not None:
        return submitted
    nodes = settle_nodes(more)
    if _is_rank(me, backend, nproc) and (nodes is None or me.source != "slurm"):
        _check_joining(me, nproc, more["sinks"], more["preset"])
        train_in_world(
            loaded, reference, plan_spec, plan_overrides, run_dir=run_dir, told=told, backend=backend, device=device
        )
        return DONE
    nproc = nproc or 1
    where = this_device(device, nproc, engine_of(loaded))
    plan = _settle(loaded, plan_spec, nproc * (nodes.most if nodes else 1), where, plan_overrides)
    _check(loaded, plan)
    ranks = _ranks(plan, where, nproc, more)
    order = {
        "job": reference,
        "plan_sources": dict(plan.sources),
        "started_at": started_at,
        "backend": backend,
        "device": where.kind,
        **told,
    }
    if nodes is not None:
        launched, run, is_first = train_on_nodes(nodes, plan, reference, order, ranks, run_dir=run_dir)
        return _conclude(ranks, launched, run, is_first=is_first)
    run = create_run(run_dir, reference.name)
    write_run_inputs(run, reference, plan)
    return _conclude(ranks, _launch(order, run, ranks), run)


def _is_rank(me: Identity, backend: str | None, nproc: int | None) -> bool:
    """Return whether this process is a rank already; backend mpi, whose ranks are mpirun's, is refused where not."""
    if me.world_size > 1 or backend != "mpi":
        return me.world_size > 1
    if me.source in MPI_STARTERS:
        return True
    raise LaunchError(
        "--backend mpi trains on ranks that mpirun has started, and it has not started this process",
        code="launch.mpi-without-mpirun",
        fix=f"mpirun -n {nproc or 2} shardwise train ... --backend mpi",
    )


def _check_joining(me: Identity, nproc: int | None, sinks: tuple[SinkSpec, ...], preset: str | None) -> None:
    """Refuse to start ranks or mirrors from a rank, or to set what it should have been started with."""
    if preset is not None:
        raise LaunchError(
            f"--preset {preset} is for ranks that shardwise starts, and {me.source} has started this one",
            code="cli.option-inside-world",
            fix=f'leave it out, and run eval "$(shardwise doctor env --preset {preset} --export)" before {me.source}',
        )
    if sinks:
        raise LaunchError(
            f"--sink {sinks[0]} goes with ranks that shardwise starts, and {me.source} has started this one",
            code="cli.option-inside-world",
            fix=f"leave it out, and run shardwise watch RUN --sink {sinks[0]} beside it",
        )
    if nproc is not None:
        raise LaunchError(
            f"--nproc {nproc} inside a world of {me.world_size} ranks that {me.source} started",
            code="cli.option-inside-world",
            fix="leave --nproc out, or start shardwise by itself",
        )


def split_settings(job: str, settings: tuple[str, ...]) -> tuple[JobReference, dict[str, str]]:
    """Give each --set to the job or to the plan, whichever has a field of that name."""
    import dataclasses

    from shardwise.job import Job, refer
    from shardwise.job.overrides import parse_overrides
    from shardwise.plans import Plan

    job_fields = {field.name for field in dataclasses.fields(Job)}
    plan_fields = {field.name for field in dataclasses.fields(Plan)} - {"version", "sources"}
    overrides = parse_overrides(settings)
    for key in overrides:
        name = key.partition(".")[0]
        if name not in job_fields | plan_fields:
            raise InputError(f"--set {key}: there is no key {name!r}", code="cli.set-unknown-key", fix=nearest_key(key))
    of_job = {key: value for key, value in overrides.items() if key.partition(".")[0] in job_fields}
    of_plan = {key: value for key, value in overrides.items() if key not in of_job}
    return refer(job, of_job), of_plan


def this_device(asked: str | None, nproc: int, made_for: MadeFor = "torch") -> LocalDevice:
    """Find out what settling must know of the GPUs, without touching CUDA; MLX finds its device by itself."""
    from shardwise.hardware import probe_gpus
    from shardwise.planner.settle import MLX, LocalDevice

    if made_for == "mlx":
        if asked == "cuda":
            raise LaunchError(
                "--device cuda, but the job's model is MLX's, which finds its device",
                code="support.mlx-device",
                fix="leave it out",
            )
        return MLX
    gpus = probe_gpus() if asked != "cpu" else ()
    if not gpus:
        if asked == "cuda":
            raise LaunchError(
                "--device cuda, but this machine shows no NVIDIA GPU", code="launch.no-gpu", fix="use --device cpu"
            )
        return LocalDevice()
    if nproc > len(gpus):
        raise LaunchError(
            f"--nproc {nproc} is more than the {len(gpus)} GPUs that are visible",
            code="launch.nproc-exceeds-gpus",
            fix=f"use --nproc {len(gpus)}, or --device cpu",
        )
    return LocalDevice(kind="cuda", has_bf16=all(gpu.has_bf16 for gpu in gpus), name=gpus[0].name)


def _settle(job: Job, spec: str, nproc: int, device: LocalDevice, overrides: dict[str, str]) -> Plan:
    from shardwise.planner.settle import searching, settle

    return settle(
        spec,
        batch_size=job.batch_size,
        world_size=nproc,
        device=device,
        overrides=overrides,
        choose=searching(job, describe_job, job_rules(job)),
    )


def _check(job: Job, plan: Plan) -> None:
    """Refuse what cannot work before anything starts; torch is needed only for what looks at the model or the data."""
    from shardwise.engines.available import require_engine
    from shardwise.parallel.support import require_supported

    require_supported(plan)
    require_engine(plan)
    layout = plan.layout
    cuts = layout.tp > 1 or layout.pp > 1 or layout.cp > 1
    if cuts or plan.fused_loss or plan.capture != "none" or job.lora is not None:
        from shardwise.training.preflight import check_model

        check_model(job, plan)


def _ranks(plan: Plan, device: LocalDevice, nproc: int, options: Mapping[str, Any]) -> RanksSpec:
    """Settle how ranks are started and looked after; refuse variables with which they cannot run."""
    from shardwise.cli.sinks import settle_preset
    from shardwise.cli.train_nodes import RanksSpec
    from shardwise.parallel.support import uses_ddp

    preset, num_gpus = options["preset"], nproc if device.kind == "cuda" else 0
    return RanksSpec(
        nproc=nproc,
        max_restarts=options["max_restarts"],
        sinks=options["sinks"],
        hang=settle_hang(options),
        preset=preset,
        variables=settle_preset(preset, nproc=nproc, num_gpus=num_gpus, uses_ddp=uses_ddp(plan)),
    )


def _launch(order: dict[str, object], run: RunDirectory, ranks: RanksSpec) -> Launched:
    """Start the ranks with their order, and show what they do until they end."""
    from shardwise.cli.follow import following
    from shardwise.launcher.local.attempts import launch

    with following(run, ranks.sinks) as [follower]:
        guards = start_guard(run, ranks.hang, range(ranks.nproc), say=follower.line)
        return launch(ranks.to_launch(order, run), run, observers=[follower, *guards], note=complain)


def _conclude(ranks: RanksSpec, launched: Launched, run: RunDirectory, *, is_first: bool = True) -> int:
    """Say how it ended; a run that was refused before its first step leaves nothing behind."""
    from shardwise.cli.node_words import resume_words
    from shardwise.cli.sinks import tell_effects
    from shardwise.launcher.explain import explain_outcome
    from shardwise.launcher.policy import Finish, root_cause

    tell_effects(ranks.preset, ranks.variables, run)
    outcome = launched.outcome
    if isinstance(launched.decision, Finish) and launched.decision.exit_code == PREEMPTED:
        is_saved = not any(one.failure and NOT_SAVED in one.failure.message for one in outcome.exits)
        words = "stopped and saved" if is_saved else "stopped, its last state not saved"
        again = shlex.join(resume_words(click.get_current_context(), run.path))
        complain(f"shardwise: {words}; continue with: {again}")
        return INTERRUPTED if outcome.interrupted == signal.SIGINT else PREEMPTED
    if outcome.interrupted:
        complain(f"shardwise: interrupted; the run is in {run.path}")
        # By SIGUSR1 a batch system asks for the place, not for an end: it begins again, if nothing was saved yet.
        return PREEMPTED if outcome.interrupted == signal.SIGUSR1 else INTERRUPTED
    cause = root_cause(outcome.exits)
    if cause is None and isinstance(launched.decision, Finish):
        if is_first:
            summarise(run)
        return DONE
    if cause is not None and cause.failure is not None and cause.failure.exit_code == BAD_INPUT and not run.has_trained:
        if click.get_current_context().find_root().params["debug"]:
            complain(cause.failure.traceback)
        sentence = with_job_file(cause.failure.message, click.get_current_context().params["job"])
        complain(f"shardwise: {with_code(sentence, cause.failure.code)}")
        run.remove()
        return BAD_INPUT
    complain(explain_outcome(outcome, run))
    complain(f"shardwise: the run is in {run.path}")
    return JOB_FAILED
