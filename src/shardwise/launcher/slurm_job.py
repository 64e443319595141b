"""Inside SLURM: what a step or an allocation says of the nodes of a run, checked against what was asked for; pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from shardwise.environment import identify
from shardwise.errors import LaunchError
from shardwise.launcher.options import read_nodes

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

_WHERE = frozenset({"rdzv_endpoint", "master_addr"})


def is_step(variables: Mapping[str, str]) -> bool:
    """Return whether this process is a task that srun started, as SLURM's `variables` tell."""
    return identify(variables).source == "slurm"


def num_tasks(variables: Mapping[str, str]) -> int:
    """Return how many tasks the step around this process has; 1 where there is none, as in a shell by srun --pty."""
    return identify(variables).world_size


def nodes_of_step(variables: Mapping[str, str], options: Mapping[str, Any], typed: Collection[str]) -> dict[str, Any]:
    """Return the options about nodes that the srun step around this launcher implies; those in `typed` stay.

    A step of several tasks is one launcher per node. Any other shape is refused with the directive that is right.
    """
    if not is_step(variables) or options.get("standalone"):
        return {}
    step = identify(variables)
    if step.local_world_size > 1:
        raise LaunchError(
            f"SLURM started {step.local_world_size} tasks on this node, and each would start the --nproc ranks again",
            code="launch.slurm-tasks-per-node",
            fix="use srun --ntasks-per-node=1 with --nproc, or as many tasks as ranks without a launcher",
        )
    least, most = read_nodes(options["nnodes"]) if "nnodes" in typed else (step.world_size, step.world_size)
    if not least <= step.world_size <= most:
        raise LaunchError(
            f"SLURM started {step.world_size} launchers, and --nnodes is {options['nnodes']}",
            code="launch.slurm-nnodes-mismatch",
            fix=f"use srun --nodes={most} --ntasks-per-node=1, or --nnodes {step.world_size}",
        )
    if step.world_size == 1:
        return {"nnodes": "1"}  # also of MIN:MAX: no node can join a step later
    found: dict[str, Any] = {"nnodes": f"{least}:{step.world_size}"}
    if not _WHERE & set(typed):
        found |= {"master_addr": step.master_addr, "node_rank": step.node_rank}
        if "master_port" not in typed:
            found["master_port"] = step.master_port
    elif options["rdzv_backend"] == "static":
        found["node_rank"] = step.node_rank
    if "rdzv_id" not in typed:
        found["rdzv_id"] = f"slurm-{variables['SLURM_JOB_ID']}.{variables['SLURM_STEP_ID']}"
    return {name: value for name, value in found.items() if name == "nnodes" or name not in typed}


def nodes_of_allocation(variables: Mapping[str, str], nodes: tuple[int, int] | None, nproc: int | None) -> int | None:
    """Return on how many nodes of the allocation around this shell to run; None when it is in none.

    `nodes` is what --nnodes asks for, None when it was not typed. An allocation that is too small is refused.
    """
    if "SLURM_JOB_ID" not in variables:
        return None
    job, have = variables["SLURM_JOB_ID"], int(variables.get("SLURM_JOB_NUM_NODES") or 1)
    least, most = nodes or (have, have)
    if have < least:
        raise LaunchError(
            f"--nnodes {least} is more than the {have} nodes of SLURM's allocation {job}",
            code="launch.slurm-too-few-nodes",
            fix=f"use --nnodes {have}, or salloc --nodes={least}",
        )
    gpus = re.search(r"[0-9]+$", variables.get("SLURM_GPUS_PER_NODE") or "")
    if nproc is not None and gpus is not None and nproc > int(gpus[0]) > 0:
        raise LaunchError(
            f"--nproc {nproc} is more than the {gpus[0]} GPUs that SLURM's allocation {job} has on each node",
            code="launch.nproc-exceeds-gpus",
            fix=f"use --nproc {gpus[0]}, or salloc --gpus-per-node={nproc}",
        )
    return min(have, most)
