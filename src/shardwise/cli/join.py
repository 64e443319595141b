"""Training as a rank of a world that torchrun, srun or mpirun has started."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.cli.summary import summarise
from shardwise.parallel.support import require_supported
from shardwise.plan import Device, settle
from shardwise.run import RunDirectory, create_run

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from shardwise.job import Job, JobReference
    from shardwise.plan import Plan
    from shardwise.world import World


def train_in_world(
    job: Job,
    reference: JobReference,
    plan_spec: str,
    plan_overrides: Mapping[str, str],
    *,
    run_dir: Path | None,
    backend: str | None,
    device: str | None,
) -> None:
    """Train in the world this process was started in; communicates over it, on every rank."""
    from shardwise.train.train import train
    from shardwise.world import world

    with world(backend=backend, device=device) as here:
        plan = settle(
            plan_spec,
            batch_size=job.batch_size,
            world_size=here.size,
            device=_describe_device(here),
            overrides=plan_overrides,
        )
        require_supported(plan)
        run = _share_run(here, reference, plan, run_dir)
        train(job, plan, here, run=run)
        if here.is_main:
            summarise(run)


def _share_run(here: World, reference: JobReference, plan: Plan, run_dir: Path | None) -> RunDirectory:
    """Have rank 0 make the run directory and tell the others; communicates over the world."""
    run = None
    if here.is_main:
        run = create_run(run_dir, reference.name)
        write_run_inputs(run, reference, plan)
    shared: RunDirectory = here.gather(run)[0]
    return shared


def write_run_inputs(run: RunDirectory, reference: JobReference, plan: Plan) -> None:
    """Write down what will run: the job's reference and the resolved plan."""
    import msgspec

    from shardwise.plan.toml import plan_to_toml

    run.job.write_bytes(msgspec.json.format(msgspec.json.encode(reference), indent=1))
    run.plan.write_text(plan_to_toml(plan))


def _describe_device(here: World) -> Device:
    import torch

    if here.device.type != "cuda":
        return Device()
    return Device(
        kind="cuda",
        has_bf16=torch.cuda.get_device_capability(here.device) >= (8, 0),
        name=torch.cuda.get_device_name(here.device),
    )
