"""--slurm: the command as a job of SLURM, or as a step of the allocation around it."""

from __future__ import annotations

import atexit
import os
import secrets
import shlex
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from shardwise.environment import variables
from shardwise.errors import LaunchError
from shardwise.launcher.options import read_nodes
from shardwise.launcher.slurm import (
    BatchSpec,
    batch_script,
    is_step,
    nodes_of_allocation,
    num_tasks,
    read_directives,
    require_slurm,
    settle_nproc,
    srun_argv,
    submit,
)
from shardwise.runner.local import command_argv
from shardwise.runs import create_run
from shardwise.runs.console import PREEMPTED, echo, echo_error

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardwise.launcher.spec import LaunchSpec
    from shardwise.runs import RunDirectory
    from shardwise.training.spec import TrainSpec


def start_by_slurm(spec: LaunchSpec | TrainSpec, name: str, *, grace_s: float, dry_run: bool = False) -> int | None:
    """Submit this command, or run it in the allocation around it; None when that is not what was asked for.

    `name` is the job's, `grace_s` the time that ranks get to save. Inside an allocation this does not return: srun
    takes over.
    """
    around = variables("SLURM_")
    asked = spec.submit.slurm
    if is_step(around) and (asked is None or num_tasks(around) > 1):
        signal.signal(signal.SIGUSR1, _leave)
        atexit.register(signal.signal, signal.SIGUSR1, signal.SIG_IGN)  # a run that has ended keeps its exit code
        return None
    if asked is None:
        _warn_of_idle_nodes(spec, around)
        return None
    directives = read_directives(asked)
    nodes = read_nodes(spec.rendezvous.nnodes) if spec.rendezvous.nnodes is not None else None
    nproc = settle_nproc(_asked_nproc(spec), directives)
    num_nodes = nodes_of_allocation(around, nodes, nproc)
    if num_nodes is not None:
        elastic = nodes is not None and nodes[0] < nodes[1]
        argv = srun_argv(num_nodes, elastic=elastic, inside=is_step(around))
        argv += _command(spec, nodes, nproc, spec.run_dir)
        if not dry_run:
            _become(argv)
        echo(shlex.join(argv))
        return 0
    folder = spec.run_dir or Path("runs", f"{name}-TIME")
    batch = BatchSpec(
        name=name,
        nodes=nodes or (1, 1),
        command=tuple(_command(spec, nodes, nproc, folder)),
        nproc=nproc,
        run=str(folder),
        directives=directives,
        grace_s=grace_s,
    )
    if dry_run:
        echo(f"{batch_script(batch)}\n{_describe(batch)}")
        return 0
    require_slurm("sbatch")
    run = create_run(spec.run_dir, name)
    folder = run.path.resolve()
    _submit(replace(batch, run=str(folder), command=tuple(_command(spec, nodes, nproc, folder))), run)
    return 0


def _submit(spec: BatchSpec, run: RunDirectory) -> None:
    """Submit the script and print its job number; nothing is left of one that SLURM refuses."""
    run.batch_script.write_text(batch_script(spec), errors="surrogateescape")
    try:
        job = submit(run.batch_script)
    except LaunchError:
        run.batch_script.unlink()
        run.remove()
        raise
    echo_error(f"shardwise: job {job} is submitted; the run is in {run.path}, its output in slurm-{job}.out there")
    echo(job)


def _leave(*_: object) -> NoReturn:
    """End on SIGUSR1, SLURM's notice before a time limit, while there are no ranks to pass it on to: run it again."""
    sys.exit(PREEMPTED)


def _warn_of_idle_nodes(spec: LaunchSpec | TrainSpec, around: Mapping[str, str]) -> None:
    if around.get("SLURM_JOB_NUM_NODES", "1") != "1" and spec.rendezvous.nnodes is None:
        echo_error(f"shardwise: SLURM gave this job {around['SLURM_JOB_NUM_NODES']} nodes; --slurm would use them all")


def _become(argv: list[str]) -> NoReturn:
    """Let srun take over this process, so that signals and the terminal are its own."""
    require_slurm(argv[0])
    # The secret is not on the command line, which every user of the machine can read.
    os.execvpe(argv[0], argv, {**variables(""), "SHARDWISE_SECRET": secrets.token_hex(16)})  # noqa: S606 - no shell


def _command(
    spec: LaunchSpec | TrainSpec, nodes: tuple[int, int] | None, nproc: int | None, run_dir: Path | None
) -> list[str]:
    """Return what runs on each node: this command again, without --slurm."""
    first = [] if nodes is None or nodes[0] == nodes[1] else [f"--nnodes={nodes[0]}:{nodes[1]}"]
    first.append(f"--nproc-per-node={_asked_nproc(spec) if nproc is None else nproc}")
    if run_dir is not None:
        first.append(f"--run-dir={run_dir}")
    return [sys.executable, "-m", "shardwise", *command_argv(spec.replace(nproc=None, run_dir=None), first)]


def _describe(spec: BatchSpec) -> str:
    """Return which ranks each node will have."""
    least, most = spec.nodes
    lines = []
    for node in range(most):
        ranks = "as many ranks as it counts"
        if spec.nproc is not None:
            first, last = node * spec.nproc, (node + 1) * spec.nproc - 1
            ranks = f"{f'ranks {first}-{last}' if last > first else f'rank {first}'} of {most * spec.nproc}"
        optional = "" if node < least else ", which may be missing"
        lines.append(f"# node {node}{optional} (SLURM_NODEID={node}): {ranks}; {shlex.join(spec.command)}")
    return "\n".join(lines)


def _asked_nproc(spec: LaunchSpec | TrainSpec) -> str | None:
    return None if spec.nproc is None else str(spec.nproc)
