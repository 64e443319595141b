"""`train`: train a job on the ranks of one or more nodes, and return a TrainReport."""

from __future__ import annotations

import inspect
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from shardwise.engines.backends import backend_row
from shardwise.engines.engine import engine_named
from shardwise.environment import MPI_STARTERS, Identity, identify
from shardwise.errors import InputError, JobError, LaunchError, ShardwiseError
from shardwise.job import Job, JobReference, load_job, refer
from shardwise.job.load import refuse_during_import
from shardwise.launcher.local.attempts import Launched, LocalLaunch
from shardwise.launcher.local.attempts import launch as launch_local
from shardwise.monitor.sinks import SinkSpec, parse_sink
from shardwise.planner.settle import check_model_fits, local_device, settle_in_world, settle_job_plan, split_settings
from shardwise.plans import Plan
from shardwise.plans.rules import uses_ddp
from shardwise.plans.toml import plan_to_toml
from shardwise.recorder.imports import be_deterministic
from shardwise.runner.local import (
    describe_plan,
    open_run,
    settle_nodes,
    settle_preset,
    tuning_of,
    with_inherited_settings,
    worker_launch,
    write_run_inputs,
)
from shardwise.runner.nodes import NodeInputs, run_on_nodes
from shardwise.runner.observers import (
    TrainReport,
    conclude,
    following,
    read_result,
    report_effects,
    report_preset,
    start_guard,
)
from shardwise.runner.remote import start_by_slurm, start_remote
from shardwise.runs import RunDirectory, create_run
from shardwise.runs.console import echo, echo_error
from shardwise.runs.failure import describe_failure, write_failure
from shardwise.spec import signature_of
from shardwise.training.spec import TrainSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from shardwise.dist import World
    from shardwise.launcher.nodes.node import NodesSpec

T = TypeVar("T")


def train(
    job: Job | str | TrainSpec, plan: Plan | str = "auto", world: World | None = None, **options: Any
) -> TrainReport:
    """Train a job on ranks that this function starts, or as a rank of an existing world.

    `train("job.py", nproc=2)` starts ranks and accepts the options of `shardwise train`. `train(job, plan, world)`
    must be called on every rank of a world, and accepts the checkpoint and replica options, `tune`, `run_dir` and
    `show_progress`. Both write a run directory with the trained weights: `report.weights`, `report.load_model()`.
    """
    refuse_during_import("sw.train")
    if isinstance(job, TrainSpec):
        return train_job(job)
    if world is not None:
        return _train_here(job, plan, world, **options)
    if isinstance(plan, Plan):
        raise LaunchError(
            "train accepts a Plan object only together with a world",
            code="train.plan-without-world",
            fix='pass world=, or the path of a plan file: plan="plan.toml"',
        )
    return train_job(TrainSpec.of(_path_of(job) if isinstance(job, Job) else str(job), plan=plan, **options))


train.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [
        *(inspect.signature(train).parameters[name] for name in ("job", "plan", "world")),
        *(
            each
            for each in signature_of(TrainSpec).parameters.values()
            if each.kind is inspect.Parameter.KEYWORD_ONLY and each.name != "plan"
        ),
    ]
)


def _train_here(
    job: Any,
    plan: Plan | str,
    world: World,
    *,
    run: RunDirectory | None = None,
    show_progress: bool = True,
    **options: Any,
) -> TrainReport:
    """Train in an existing world. Communicates over the world; call on every rank.

    Without `run`, rank 0 creates the run directory: `run_dir`, or runs/SCRIPT-TIME.
    """
    from shardwise.training.loop import train as train_in  # imports torch

    spec = TrainSpec.of("", **options)
    if spec != TrainSpec(job="", run_dir=spec.run_dir, save=spec.save, replicas=spec.replicas, tune=spec.tune):
        raise LaunchError(
            f"train with a world cannot start ranks, got the options {', '.join(options)}",
            code="train.option-inside-world",
            fix="pass only checkpoint and replica options, tune=, run_dir=, run= and show_progress=",
        )
    tuning = tuning_of(spec, None)
    if isinstance(job, str):
        reference = refer(job, {})
        job, tuning = load_job(reference), tuning_of(spec, reference)

    def prepare() -> tuple[Plan, RunDirectory]:
        spec.save.check_remote(run.path if run is not None else spec.run_dir)
        settled = settle_in_world(job, plan, world, {}, tuning) if isinstance(plan, str) else plan
        made = run or create_run(spec.run_dir, _script_name())
        if not made.plan.exists():
            made.plan.write_text(plan_to_toml(settled))
        return settled, made

    settled, made = _from_main(world, prepare)
    with _failures(made, world, is_new=run is None):
        result = train_in(
            job, settled, world, run=made, show_progress=show_progress, save=spec.save, replicas=spec.replicas
        )
    return TrainReport(run=str(made.path), result=result)


def _script_name() -> str:
    """Return the name of the main script, which names the run directory; "train" in an interactive session."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    if file is None:
        return "train"
    path = Path(file)
    return path.parent.name if path.stem == "__main__" else path.stem


def _path_of(job: Job) -> str:
    """Return FILE.py:NAME of a job that is a variable of the main script, from which ranks load it."""
    main = sys.modules["__main__"]
    names = [name for name, value in vars(main).items() if value is job]
    file = getattr(main, "__file__", None)
    if not names or file is None:
        raise JobError(
            "ranks load a job from its file, but this Job is not a variable of the main script",
            code="job.not-in-a-file",
            fix='define the Job in a file and pass its path: train("job.py", nproc=2)',
        )
    return f"{file}:{names[0]}"


def train_job(spec: TrainSpec) -> TrainReport:
    """Train the job of a Spec: resolve its plan, start the ranks or join their world, and return a TrainReport."""
    started_at = time.time()
    report_preset(spec.preset)  # first, so that an unknown preset raises here and not on every machine
    sinks = tuple(parse_sink(text) for text in spec.sinks)
    code = start_remote(spec, grace_s=LocalLaunch.grace_s + spec.save.upload_grace_s, dry_run=spec.dry_run)
    if code is not None:
        return TrainReport(exit_code=code)
    me = identify()
    spec = with_inherited_settings(spec)
    reference, plan_overrides = split_settings(spec.job, spec.settings)
    job = load_job(reference)
    requested = spec
    spec = spec.replace(save=spec.save.resolved())
    code = start_by_slurm(
        requested, reference.name, grace_s=LocalLaunch.grace_s + spec.save.upload_grace_s, dry_run=spec.dry_run
    )
    if code is not None:
        return TrainReport(exit_code=code)
    nodes = _nodes(spec)
    if not spec.dry_run and _is_rank(me, spec) and (nodes is None or me.source != "slurm"):
        _check_joining(me, spec)
        main_run = _train_in_world(spec, job, reference, plan_overrides)
        return read_result(main_run) if main_run is not None else TrainReport()
    if spec.max_restarts and not spec.save.is_periodic:
        lost = "a restart repeats all steps, because no checkpoint is saved before the end; add --save-every 100"
        echo_error(f"note: --max-restarts {spec.max_restarts} without --save-every: {lost}")
    nproc = spec.nproc or 1
    device = local_device(spec.place.device, nproc, job.engine)
    num_nodes = nodes.most if nodes else 1
    tuning = tuning_of(spec, reference, nodes)
    plan = settle_job_plan(
        job, spec.plan, world_size=nproc * num_nodes, device=device, overrides=plan_overrides, tuning=tuning
    )
    check_model_fits(job, plan)
    if spec.dry_run:
        echo(describe_plan(requested, nodes, plan))
        return TrainReport()
    num_gpus = nproc if device.kind == "cuda" else 0
    added = settle_preset(spec.preset, nproc=nproc, num_gpus=num_gpus, uses_ddp=uses_ddp(plan))
    spec = spec.replace(nproc=nproc, place=spec.place.replace(device=device.kind))
    if nodes is not None:
        given = NodeInputs(spec=spec, reference=reference, plan=plan, overrides=plan_overrides, device=device)
        launched, run, is_first = run_on_nodes(given, nodes, sinks=sinks, variables=added, started_at=started_at)
    else:
        run, is_first = open_run(spec, reference), True
        write_run_inputs(run, reference, plan, spec=requested, started_at=started_at)
        launched = _run(spec, run, sinks, added)
    report_effects(spec.preset, added, run)
    return conclude(requested, launched, run, is_first=is_first)


def _nodes(spec: TrainSpec) -> NodesSpec | None:
    """Return the nodes of the run, None for a single node; without --nproc and --nnodes, an srun task is a rank."""
    rendezvous = spec.rendezvous
    if identify().source == "slurm" and spec.nproc is None and rendezvous.nnodes is None:
        return None
    return settle_nodes(rendezvous, standalone=False, max_restarts=spec.max_restarts)


def _is_rank(me: Identity, spec: TrainSpec) -> bool:
    """Return whether this process is a rank; raises LaunchError for backend mpi if mpirun has not started it."""
    if me.world_size > 1 or not backend_row(spec.place.backend).starts_by_mpirun:
        return me.world_size > 1
    if me.source in MPI_STARTERS:
        return True
    raise LaunchError(
        "--backend mpi requires mpirun, but mpirun did not start this process",
        code="launch.mpi-without-mpirun",
        fix=f"run mpirun -n {spec.nproc or 2} shardwise train ... --backend mpi",
    )


def _check_joining(me: Identity, spec: TrainSpec) -> None:
    """Raise LaunchError for options that a rank cannot apply, because its launcher has already started it."""
    if spec.preset is not None:
        export = f'eval "$(shardwise doctor env --preset {spec.preset} --export)"'
        raise LaunchError(
            f"--preset {spec.preset} requires that shardwise starts the ranks, but {me.source} started them",
            code="cli.option-inside-world",
            fix=f"remove --preset, and run {export} before {me.source}",
        )
    if spec.sinks:
        raise LaunchError(
            f"--sink {spec.sinks[0]} requires that shardwise starts the ranks, but {me.source} started them",
            code="cli.option-inside-world",
            fix=f"remove --sink, and run shardwise watch RUN --sink {spec.sinks[0]} while the ranks train",
        )
    if spec.nproc is not None:
        raise LaunchError(
            f"--nproc {spec.nproc} has no effect, because {me.source} started {me.world_size} ranks",
            code="cli.option-inside-world",
            fix=f"remove --nproc, or run shardwise without {me.source}",
        )


def _run(spec: TrainSpec, run: RunDirectory, sinks: Sequence[SinkSpec], variables: Mapping[str, str]) -> Launched:
    """Start the ranks of a single node and show their progress until they exit."""
    nproc = spec.nproc or 1
    with following(run, sinks) as [follower]:
        guards = start_guard(run, spec.hang, range(nproc), note=follower.line)
        local = worker_launch(spec, run, nproc=nproc, added=variables)
        return launch_local(local, run, observers=[follower, *guards], note=echo_error)


def _train_in_world(
    spec: TrainSpec, job: Job, reference: JobReference, plan_overrides: Mapping[str, str]
) -> RunDirectory | None:
    """Train as a rank of the world that a launcher started. Communicates over the world; call on every rank.

    Returns the run directory on rank 0 and None on the other ranks.
    """
    if spec.deterministic:
        be_deterministic(seed=None)  # the job has a seed
    # These import torch, which reads the variables of deterministic mode.
    from shardwise.dist import world
    from shardwise.training.loop import train as train_here

    engine = engine_named(job.engine)
    engine.prepare_rank(spec.place.backend)
    with world(backend=spec.place.backend, device=engine.world_device(spec.place.device)) as here:

        def prepare() -> tuple[Plan, RunDirectory]:
            plan = settle_in_world(job, spec.plan, here, plan_overrides, tuning_of(spec, reference))
            run = open_run(spec, reference)
            write_run_inputs(run, reference, plan)
            return plan, run

        _compare_jobs(here, reference)
        plan, run = _from_main(here, prepare)
        if here.is_main and here.source != "shardwise":
            echo_error(f"shardwise: hangs are not detected, because {here.source} started the ranks")
        with _failures(run, here, is_new=True):
            # A job that SLURM has requeued resumes from its checkpoints.
            save = spec.save.replace(resume="auto") if run.checkpoints.exists() else spec.save
            train_here(job, plan, here, run=run, save=save, replicas=spec.replicas)
        return run if here.is_main else None


@contextmanager
def _failures(run: RunDirectory, here: World, *, is_new: bool) -> Iterator[None]:
    """Write the failure of this rank; remove a new run directory after an input error before the first step."""
    try:
        yield
    except Exception as error:
        if isinstance(error, InputError) and is_new and here.is_main and not run.has_trained:
            run.remove()
        elif not isinstance(error, InputError):
            write_failure(run.error(here.rank), describe_failure(error, here.rank))
        raise


def _from_main(here: World, make: Callable[[], T]) -> T:
    """Call `make` on rank 0 and return its result, or raise its error, on every rank. Communicates over the world."""
    result: T | ShardwiseError | None = None
    if here.is_main:
        try:
            result = make()
        except ShardwiseError as error:
            result = error
    shared = here.gather(result)[0]
    if isinstance(shared, ShardwiseError):
        raise shared
    decided: T = shared
    return decided


def _compare_jobs(here: World, reference: JobReference) -> None:
    """Raise JobError if ranks loaded different job files. Communicates over the world; call on every rank."""
    digests = here.gather(reference.digest)
    different = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if different:
        raise JobError(
            f"{reference.path} on ranks {different} differs from the file on rank 0",
            code="job.file-differs",
            fix="copy the same file to all nodes",
        )
