"""--slurm: from the words of a launch to a job of SLURM, or to a step of the allocation around it."""

from __future__ import annotations

import os
import secrets
import shlex
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click
from click.core import ParameterSource

from shardwise.cli.node_words import launch_words
from shardwise.environment import variables
from shardwise.errors import LaunchError
from shardwise.launcher.options import read_nodes
from shardwise.launcher.slurm import (
    BatchSpec,
    batch_script,
    is_step,
    nodes_of_allocation,
    nodes_of_step,
    num_tasks,
    read_directives,
    require_slurm,
    settle_nproc,
    srun_words,
    submit,
)
from shardwise.runs import create_run
from shardwise.runs.console import PREEMPTED, complain, say

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardwise.runs import RunDirectory

_NPROC = ("nproc_per_node", "nproc")
"""Ranks per node, as launch and train call the parameter."""
_OURS = (*_NPROC, "log_dir", "run_dir")
"""Parameters whose words are ours to write, since the job settles them."""


def implied_nodes() -> dict[str, Any]:
    """Return the options about nodes that an srun step around this launcher implies; empty outside of one.

    `train` without --nproc and --nnodes is no launcher there, but a rank.
    """
    context = click.get_current_context()
    typed = _typed(context)
    if context.info_name == "train" and not typed & {"nproc", "nnodes"}:
        return {}
    return nodes_of_step(variables("SLURM_"), context.params, typed)


def start_by_slurm(name: str, run_dir: Path | None, *, grace_s: float, dry_run: bool = False) -> int | None:
    """Submit this launch, or run it in the allocation around it; None when that is not what was asked for.

    `name` is the job's, `grace_s` what ranks get to save. Inside an allocation this does not return: srun takes over.
    """
    context = click.get_current_context()
    around = variables("SLURM_")
    asked = context.params["slurm"]
    if is_step(around) and (asked is None or num_tasks(around) > 1):
        _listen_to_slurm(context)
        return None
    if asked is None:
        _warn_of_idle_nodes(context, around)
        return None
    directives = read_directives(asked)
    nodes = read_nodes(context.params["nnodes"]) if "nnodes" in _typed(context) else None
    nproc = settle_nproc(_asked_nproc(context), directives)
    num_nodes = nodes_of_allocation(around, nodes, nproc)
    if num_nodes is not None:
        elastic = nodes is not None and nodes[0] < nodes[1]
        words = srun_words(num_nodes, elastic=elastic, inside=is_step(around))
        words += _command(context, nodes, nproc, run_dir)
        if not dry_run:
            _become(words)
        say(shlex.join(words))
        return 0
    folder = run_dir or Path("runs", f"{name}-TIME")
    spec = BatchSpec(
        name=name,
        nodes=nodes or (1, 1),
        command=tuple(_command(context, nodes, nproc, folder)),
        nproc=nproc,
        run=str(folder),
        directives=directives,
        grace_s=grace_s,
    )
    if dry_run:
        say(f"{batch_script(spec)}\n{_describe(spec)}")
        return 0
    require_slurm("sbatch")
    run = create_run(run_dir, name)
    folder = run.path.resolve()
    _submit(replace(spec, run=str(folder), command=tuple(_command(context, nodes, nproc, folder))), run)
    return 0


def _submit(spec: BatchSpec, run: RunDirectory) -> None:
    """Submit the script and say which job it is; nothing is left of one that SLURM refuses."""
    run.batch_script.write_text(batch_script(spec), errors="surrogateescape")
    try:
        job = submit(run.batch_script)
    except LaunchError:
        run.batch_script.unlink()
        run.remove()
        raise
    complain(f"shardwise: job {job} is submitted; the run is in {run.path}, its output in slurm-{job}.out there")
    say(job)


def _listen_to_slurm(context: click.Context) -> None:
    """Take SIGUSR1, by which SLURM says that time is over, also while there are no ranks to hand it on to."""

    def leave(*_: object) -> NoReturn:
        sys.exit(PREEMPTED)  # nothing has begun: run it again

    signal.signal(signal.SIGUSR1, leave)
    context.call_on_close(lambda: signal.signal(signal.SIGUSR1, signal.SIG_IGN))


def _warn_of_idle_nodes(context: click.Context, around: Mapping[str, str]) -> None:
    if around.get("SLURM_JOB_NUM_NODES", "1") != "1" and "nnodes" not in _typed(context):
        complain(f"shardwise: SLURM gave this job {around['SLURM_JOB_NUM_NODES']} nodes; --slurm would use them all")


def _become(words: list[str]) -> NoReturn:
    """Let srun take over this process, so that signals and the terminal are its own."""
    require_slurm(words[0])
    # The secret is not on the command line, which every user of the machine can read.
    os.execvpe(words[0], words, {**variables(""), "SHARDWISE_SECRET": secrets.token_hex(16)})  # noqa: S606 - no shell


def _command(
    context: click.Context, nodes: tuple[int, int] | None, nproc: int | None, run_dir: Path | None
) -> list[str]:
    """Return what runs on each node: this launch again, without --slurm."""
    first = [] if nodes is None or nodes[0] == nodes[1] else [f"--nnodes={nodes[0]}:{nodes[1]}"]
    first.append(f"--nproc-per-node={_asked_nproc(context) if nproc is None else nproc}")
    if run_dir is not None:
        first.append(f"--run-dir={run_dir}")
    return [sys.executable, "-m", "shardwise", *launch_words(context, first, without=_OURS)]


def _describe(spec: BatchSpec) -> str:
    """Say which ranks each node will have."""
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


def _asked_nproc(context: click.Context) -> str | None:
    """Return --nproc as typed, None when it was not."""
    return next((str(context.params[name]) for name in _NPROC if name in _typed(context)), None)


def _typed(context: click.Context) -> frozenset[str]:
    """Return the names of the parameters that the user gave."""
    names = (parameter.name or "" for parameter in context.command.params)
    sources = {name: context.get_parameter_source(name) for name in names}
    return frozenset(name for name, source in sources.items() if source not in (None, ParameterSource.DEFAULT))
