"""`train`: a described job on ranks of this node, or of many, from its Spec to its report."""

from __future__ import annotations

import hashlib
import inspect
import sys
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

from shardwise.engines.backends import backend_row
from shardwise.engines.engine import engine_named
from shardwise.environment import MPI_STARTERS, Identity, identify
from shardwise.errors import InputError, JobError, LaunchError, ShardwiseError
from shardwise.job import Job, JobReference, load_job
from shardwise.launcher.local.attempts import Launched, LocalLaunch
from shardwise.launcher.local.attempts import launch as launch_local
from shardwise.launcher.nodes.node import NodesSpec, join_run, node_facts
from shardwise.launcher.nodes.rounds import launch_nodes
from shardwise.monitor.sinks import SinkSpec, parse_sink
from shardwise.parallel.support import uses_ddp
from shardwise.planner.settle import LocalDevice, check_model_fits, local_device, settle_job_plan, split_settings
from shardwise.plans import Plan
from shardwise.plans.toml import plan_to_toml
from shardwise.recorder.imports import be_deterministic
from shardwise.runner.elsewhere import start_elsewhere
from shardwise.runner.local import settle_nodes, worker_launch, write_run_inputs
from shardwise.runner.observers import Follower, following, start_guard
from shardwise.runner.presets import report_effects, report_preset, settle_preset
from shardwise.runner.report import TrainReport, conclude, read_result
from shardwise.runner.slurm import start_by_slurm
from shardwise.runs import RunDirectory, create_run, share_run
from shardwise.runs.console import echo_error
from shardwise.runs.failure import describe_failure, write_failure
from shardwise.spec import signature_of
from shardwise.training.spec import TrainSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from shardwise.dist import World

T = TypeVar("T")


def train(
    job: Job | str | TrainSpec, plan: Plan | str = "auto", world: World | None = None, **options: Any
) -> TrainReport:
    """Train a job: on ranks that this call starts, or, inside a world, as one of its ranks.

    `train("job.py", nproc=2)` takes the options of `shardwise train`. `train(job, plan, world)` is called on every
    rank of a world and takes the options about saving and replicas, `run` (a run directory) and `show_progress`.
    """
    if isinstance(job, TrainSpec):
        return train_job(job)
    if world is not None:
        return _train_here(job, plan, world, **options)
    if isinstance(plan, Plan):
        raise LaunchError(
            "a Plan object is for a world that exists, and train would start its ranks",
            code="train.plan-without-world",
            fix='pass world=, or plan="plan.toml"',
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
    plan: Any,
    world: World,
    *,
    run: RunDirectory | None = None,
    show_progress: bool = True,
    **options: Any,
) -> TrainReport:
    from shardwise.training.loop import train as train_in  # imports torch

    asked = TrainSpec.of("", **options)
    if asked != TrainSpec(job="", save=asked.save, replicas=asked.replicas):
        raise LaunchError(
            f"train got {', '.join(options)} and a world, whose ranks have been started already",
            code="train.option-inside-world",
            fix="pass only options about saving and replicas, run= and show_progress=",
        )
    result = train_in(job, plan, world, run=run, show_progress=show_progress, save=asked.save, replicas=asked.replicas)
    return TrainReport(run=str(run.path) if run else "", result=result)


def _path_of(job: Job) -> str:
    """Return FILE.py:NAME of a job that stands in the script that runs; ranks load it from there."""
    main = sys.modules["__main__"]
    names = [name for name, value in vars(main).items() if value is job]
    file = getattr(main, "__file__", None)
    if not names or file is None:
        raise JobError(
            "ranks load a job from its file, and this Job is not a variable of the script that runs",
            code="job.not-in-a-file",
            fix='write it to a file and pass its path: train("job.py", nproc=2)',
        )
    return f"{file}:{names[0]}"


def train_job(spec: TrainSpec) -> TrainReport:
    """Train the job of a Spec: settle its plan, start its ranks or join them, and return how it ended."""
    started_at = time.time()
    report_preset(spec.preset)  # first: an unknown one is refused here, not on every machine
    sinks = tuple(parse_sink(text) for text in spec.sinks)
    code = start_elsewhere(spec, grace_s=LocalLaunch.grace_s)
    if code is not None:
        return TrainReport(exit_code=code)
    me = identify()
    reference, plan_overrides = split_settings(spec.job, spec.settings)
    job = load_job(reference)
    asked = spec
    spec = spec.replace(save=spec.save.resolved())
    code = start_by_slurm(asked, reference.name, grace_s=LocalLaunch.grace_s)
    if code is not None:
        return TrainReport(exit_code=code)
    nodes = _nodes(spec)
    if _is_rank(me, spec) and (nodes is None or me.source != "slurm"):
        _check_joining(me, spec)
        main_run = _train_in_world(spec, job, reference, plan_overrides)
        return read_result(main_run) if main_run is not None else TrainReport()
    nproc = spec.nproc or 1
    device = local_device(spec.place.device, nproc, job.engine)
    num_nodes = nodes.most if nodes else 1
    plan = settle_job_plan(job, spec.plan, world_size=nproc * num_nodes, device=device, overrides=plan_overrides)
    check_model_fits(job, plan)
    num_gpus = nproc if device.kind == "cuda" else 0
    added = settle_preset(spec.preset, nproc=nproc, num_gpus=num_gpus, uses_ddp=uses_ddp(plan))
    spec = spec.replace(nproc=nproc, place=spec.place.replace(device=device.kind))
    if nodes is not None:
        launched, run, is_first = _run_on_nodes(
            spec, nodes, plan, reference, sinks=sinks, variables=added, started_at=started_at
        )
    else:
        run, is_first = create_run(spec.run_dir, reference.name), True
        write_run_inputs(run, reference, plan, started_at=started_at)
        launched = _run(spec, run, sinks, added)
    report_effects(spec.preset, added, run)
    return conclude(asked, launched, run, is_first=is_first)


def _nodes(spec: TrainSpec) -> NodesSpec | None:
    """Return the nodes of the run; without --nproc and --nnodes a task of srun is a rank, not a launcher."""
    rendezvous = spec.rendezvous
    if identify().source == "slurm" and spec.nproc is None and rendezvous.nnodes is None:
        return None
    return settle_nodes(rendezvous, standalone=False, max_restarts=spec.max_restarts)


def _is_rank(me: Identity, spec: TrainSpec) -> bool:
    """Return whether this process is a rank already; backend mpi, whose ranks are mpirun's, is refused where not."""
    if me.world_size > 1 or not backend_row(spec.place.backend).starts_by_mpirun:
        return me.world_size > 1
    if me.source in MPI_STARTERS:
        return True
    raise LaunchError(
        "--backend mpi requires processes that mpirun started, and it did not start this one",
        code="launch.mpi-without-mpirun",
        fix=f"mpirun -n {spec.nproc or 2} shardwise train ... --backend mpi",
    )


def _check_joining(me: Identity, spec: TrainSpec) -> None:
    """Refuse to start ranks or mirrors from a rank, or to set what it should have been started with."""
    if spec.preset is not None:
        export = f'eval "$(shardwise doctor env --preset {spec.preset} --export)"'
        raise LaunchError(
            f"--preset {spec.preset} is for ranks that shardwise starts, and {me.source} has started this one",
            code="cli.option-inside-world",
            fix=f"leave it out, and run {export} before {me.source}",
        )
    if spec.sinks:
        raise LaunchError(
            f"--sink {spec.sinks[0]} is for ranks that shardwise starts, and {me.source} has started this one",
            code="cli.option-inside-world",
            fix=f"leave it out, and run shardwise watch RUN --sink {spec.sinks[0]} beside it",
        )
    if spec.nproc is not None:
        raise LaunchError(
            f"--nproc {spec.nproc} inside a world of {me.world_size} ranks that {me.source} started",
            code="cli.option-inside-world",
            fix="leave --nproc out, or start shardwise by itself",
        )


def _run(spec: TrainSpec, run: RunDirectory, sinks: Sequence[SinkSpec], variables: Mapping[str, str]) -> Launched:
    """Start the ranks of one node, and show what they do until they end."""
    nproc = spec.nproc or 1
    with following(run, sinks) as [follower]:
        guards = start_guard(run, spec.hang, range(nproc), note=follower.line)
        local = worker_launch(spec, run, nproc=nproc, added=variables)
        return launch_local(local, run, observers=[follower, *guards], note=echo_error)


def _run_on_nodes(
    spec: TrainSpec,
    nodes: NodesSpec,
    plan: Plan,
    reference: JobReference,
    *,
    sinks: Sequence[SinkSpec],
    variables: Mapping[str, str],
    started_at: float,
) -> tuple[Launched, RunDirectory, bool]:
    """Take part in a training on many nodes; return how it ended, where, and whether this is the first node.

    `plan` is for the most nodes; the workers refit it to those that have joined. The first node mirrors the run.
    """
    nproc = spec.nproc or 1
    for fewer in range(nodes.least, nodes.most):
        plan.refit(fewer * nproc)  # refuses now what it would refuse when a node is lost
    facts = {
        **node_facts(nodes, reference.name),
        "job file": reference.digest[:12],
        "plan": hashlib.sha256(plan_to_toml(plan).encode()).hexdigest()[:12],
    }

    def make_run(named: Path | None) -> RunDirectory:
        run = create_run(spec.run_dir, reference.name) if named is None else share_run(spec.run_dir or named)
        if not run.plan.exists():  # else node 0 has written it to a disk that we share
            write_run_inputs(run, reference, plan, started_at=started_at)
        return run

    with join_run(nodes, facts, make_run, echo_error) as (link, run):
        is_first = link.node == 0
        shown: AbstractContextManager[list[Follower]] = following(run, sinks) if is_first else nullcontext([])
        with shown as followers:
            note = followers[0].line if followers else echo_error
            guards = start_guard(run, spec.hang, range(0), exchange=link, note=note)

            def follow(placed: range) -> None:
                for guard in guards:
                    guard.follow(placed)

            launched = launch_nodes(
                worker_launch(spec, run, nproc=nproc, added=variables),
                nodes,
                link,
                run,
                observers=[*followers, *guards],
                on_assigned=follow,
                note=echo_error,
            )
            return launched, run, is_first


def _train_in_world(
    spec: TrainSpec, job: Job, reference: JobReference, plan_overrides: Mapping[str, str]
) -> RunDirectory | None:
    """Train in the world this process was started in; communicates over it, on every rank.

    Returns the run directory on rank 0, None on the others.
    """
    if spec.deterministic:
        be_deterministic(seed=None)  # the job has one
    # These import torch, which has to find determinism set.
    from shardwise.dist import world
    from shardwise.training.loop import train as train_here

    engine = engine_named(job.engine)
    engine.prepare_rank(spec.place.backend)
    with world(backend=spec.place.backend, device=engine.world_device(spec.place.device)) as here:

        def prepare() -> tuple[Plan, RunDirectory]:
            device = engine.local_device(None) or _device_of(here)
            plan = settle_job_plan(job, spec.plan, world_size=here.size, device=device, overrides=plan_overrides)
            run = create_run(spec.run_dir, reference.name)
            write_run_inputs(run, reference, plan)
            return plan, run

        _compare_jobs(here, reference)
        plan, run = _from_main(here, prepare)
        if here.is_main and here.source != "shardwise":
            echo_error(f"shardwise: {here.source} has started these ranks, so nothing detects hangs, as launch would")
        try:
            # A job that SLURM has requeued finds what it saved before.
            save = spec.save.replace(resume="auto") if run.checkpoints.exists() else spec.save
            train_here(job, plan, here, run=run, save=save, replicas=spec.replicas)
        except Exception as error:
            if here.is_main and isinstance(error, InputError) and not run.has_trained:
                run.remove()
            elif not isinstance(error, InputError):
                write_failure(run.error(here.rank), describe_failure(error, here.rank))
            raise
        return run if here.is_main else None


def _from_main(here: World, make: Callable[[], T]) -> T:
    """Have rank 0 decide for all, also when it fails; communicates over the world."""
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
    """Refuse ranks that loaded different job files; communicates over the world."""
    digests = here.gather(reference.digest)
    different = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if different:
        raise JobError(
            f"{reference.path} is another file on ranks {different} than on rank 0",
            code="job.file-differs",
            fix="copy the same file to all nodes",
        )


def _device_of(here: World) -> LocalDevice:
    import torch

    if here.device.type != "cuda":
        return LocalDevice()
    return LocalDevice(
        kind="cuda",
        has_bf16=torch.cuda.get_device_capability(here.device) >= (8, 0),
        name=torch.cuda.get_device_name(here.device),
    )
