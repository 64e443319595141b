"""Training as a rank of a world that torchrun, srun or mpirun has started."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from shardwise.cli.describe import describe_job, job_rules
from shardwise.cli.follow import summarise
from shardwise.engines.available import require_engine
from shardwise.errors import InputError, JobError, ShardwiseError
from shardwise.job.engine import engine_of
from shardwise.parallel.support import require_supported
from shardwise.planner.settle import MLX, LocalDevice, searching, settle
from shardwise.recorder.imports import be_deterministic
from shardwise.runs import RunDirectory, create_run
from shardwise.runs.console import complain
from shardwise.runs.failure import describe_failure, write_failure

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from shardwise.dist import World
    from shardwise.job import Job, JobReference
    from shardwise.plans import Plan

T = TypeVar("T")


def train_in_world(
    job: Job,
    reference: JobReference,
    plan_spec: str,
    plan_overrides: Mapping[str, str],
    *,
    run_dir: Path | None,
    told: Mapping[str, Any],
    backend: str | None,
    device: str | None,
) -> None:
    """Train in the world this process was started in, as `told` by the options; communicates over it, on every rank."""
    from shardwise.dist import world
    from shardwise.training.train import train

    if told["deterministic"]:
        be_deterministic(seed=None)
    made_for = engine_of(job)
    if made_for == "mlx" and backend == "mpi":
        from shardwise.engines.mlx.mpi import mpi_group

        mpi_group()  # first: MLX would not join an MPI that the world has started
    with world(backend=backend, device="cpu" if made_for == "mlx" else device) as here:

        def prepare() -> tuple[Plan, RunDirectory]:
            plan = settle(
                plan_spec,
                batch_size=job.batch_size,
                world_size=here.size,
                device=_describe_device(here) if made_for == "torch" else MLX,
                overrides=plan_overrides,
                choose=searching(job, describe_job, job_rules(job)),
            )
            require_supported(plan)
            require_engine(plan)
            run = create_run(run_dir, reference.name)
            write_run_inputs(run, reference, plan)
            return plan, run

        _compare_jobs(here, reference)
        plan, run = _from_main(here, prepare)
        if here.is_main and here.source != "shardwise":
            complain(f"shardwise: {here.source} has started these ranks, so nobody looks on for hangs, as launch would")
        try:
            # A job that SLURM has requeued finds what it saved before.
            resume = "auto" if run.checkpoints.exists() else told["resume"]
            how = {name: value for name, value in told.items() if name not in ("resume", "deterministic")}
            train(job, plan, here, run=run, resume=resume, **how)
        except Exception as error:
            if here.is_main and isinstance(error, InputError) and not run.has_trained:
                run.remove()
            elif not isinstance(error, InputError):
                write_failure(run.error(here.rank), describe_failure(error, here.rank))
            raise
        if here.is_main:
            summarise(run)


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


def write_run_inputs(run: RunDirectory, reference: JobReference, plan: Plan) -> None:
    """Write down what will run: the job's reference and the resolved plan."""
    import msgspec

    from shardwise.plans.toml import plan_to_toml

    run.job.write_bytes(msgspec.json.format(msgspec.json.encode(reference), indent=1))
    run.plan.write_text(plan_to_toml(plan))


def _describe_device(here: World) -> LocalDevice:
    import torch

    if here.device.type != "cuda":
        return LocalDevice()
    return LocalDevice(
        kind="cuda",
        has_bf16=torch.cuda.get_device_capability(here.device) >= (8, 0),
        name=torch.cuda.get_device_name(here.device),
    )
