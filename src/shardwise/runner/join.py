"""Training as a rank of a world that torchrun, srun or mpirun has started."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from shardwise.dist import world
from shardwise.errors import InputError, JobError, ShardwiseError
from shardwise.job.engine import engine_of
from shardwise.planner.job_plan import settle_job_plan
from shardwise.planner.settle import MLX, LocalDevice
from shardwise.recorder.imports import be_deterministic
from shardwise.runner.local import write_run_inputs
from shardwise.runs import RunDirectory, create_run
from shardwise.runs.console import complain
from shardwise.runs.failure import describe_failure, write_failure
from shardwise.training.train import train

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from shardwise.dist import World
    from shardwise.job import Job, JobReference
    from shardwise.plans import Plan
    from shardwise.training.spec import TrainSpec

T = TypeVar("T")


def train_in_world(
    spec: TrainSpec, job: Job, reference: JobReference, plan_overrides: Mapping[str, str]
) -> RunDirectory | None:
    """Train in the world this process was started in; communicates over it, on every rank.

    Returns the run directory on rank 0, None on the others.
    """
    if spec.deterministic:
        be_deterministic(seed=None)  # the job has one
    made_for = engine_of(job)
    if made_for == "mlx" and spec.place.backend == "mpi":
        from shardwise.engines.mlx.mpi import mpi_group

        mpi_group()  # first: MLX would not join an MPI that the world has started
    with world(backend=spec.place.backend, device="cpu" if made_for == "mlx" else spec.place.device) as here:

        def prepare() -> tuple[Plan, RunDirectory]:
            device = _describe_device(here) if made_for == "torch" else MLX
            plan = settle_job_plan(job, spec.plan, world_size=here.size, device=device, overrides=plan_overrides)
            run = create_run(spec.run_dir, reference.name)
            write_run_inputs(run, reference, plan)
            return plan, run

        _compare_jobs(here, reference)
        plan, run = _from_main(here, prepare)
        if here.is_main and here.source != "shardwise":
            complain(f"shardwise: {here.source} has started these ranks, so nothing detects hangs, as launch would")
        try:
            # A job that SLURM has requeued finds what it saved before.
            save = spec.save.replace(resume="auto") if run.checkpoints.exists() else spec.save
            train(job, plan, here, run=run, save=save, replicas=spec.replicas)
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


def _describe_device(here: World) -> LocalDevice:
    import torch

    if here.device.type != "cuda":
        return LocalDevice()
    return LocalDevice(
        kind="cuda",
        has_bf16=torch.cuda.get_device_capability(here.device) >= (8, 0),
        name=torch.cuda.get_device_name(here.device),
    )
