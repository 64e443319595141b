"""The batch script of a launch under SLURM: directives, one launcher per node, a requeue at the end of time; pure."""

from __future__ import annotations

import math
import re
import shlex
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwise.errors import LaunchError
from shardwise.runs.exitcodes import PREEMPTED

if TYPE_CHECKING:
    from collections.abc import Mapping

EXAMPLE = "--slurm time=2:00:00,partition=gpu,gpus-per-node=8"
_FLAGS = frozenset({"contiguous", "exclusive", "hold", "no-requeue", "overcommit", "oversubscribe", "spread-job"})
"""Options of sbatch that may stand without a value."""
_NOT_THESE = {
    "nodes": "use --nnodes",
    "ntasks": "use --nnodes for machines and --nproc for ranks on each",
    "ntasks-per-node": "use --nproc: SLURM starts one launcher per node, which starts the ranks",
    "gpus-per-task": "use gpus-per-node: SLURM's tasks are launchers, one per node",
    "array": "submit each of these jobs by itself: they would share one run directory",
    "wrap": "the script is ours to write",
}
"""Options of sbatch that would contradict the script, and what to do instead."""
_SPARE_S = 30
"""Between the end of the ranks and the end of the time: for the launchers to end and for the requeue."""
_UNHEARD = 128 + signal.SIGUSR1
"""How a launcher ends that was asked to stop before it could listen."""
_SCRIPT = """\
#!/bin/bash
{directives}

# By this the launchers of the job know each other; ranks never see it.
SHARDWISE_SECRET=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \\n')
export SHARDWISE_SECRET

# SLURM sends USR1 before the time is over, to this shell alone, which hears it only while it waits.
trap 'asked=yes; kill -USR1 "$step"' USR1

# One launcher per node. It finds its place and the others by SLURM's variables.
{srun} \\
    {command} &
step=$!
while kill -0 "$step" 2> /dev/null; do wait "$step"; done
wait "$step"
code=$?
{requeue}exit "$code"
"""
_REQUEUE = f"""
# {PREEMPTED}: the ranks have saved; {_UNHEARD}: they were not there yet. The job goes on when it is its turn again.
if [ -n "$asked" ] && [ "$code" = {PREEMPTED} -o "$code" = {_UNHEARD} ]; then scontrol requeue "$SLURM_JOB_ID"; fi
"""


@dataclass(frozen=True, kw_only=True)
class BatchSpec:
    """What to submit, settled."""

    name: str
    nodes: tuple[int, int]
    """Machines, at least and at most."""
    command: tuple[str, ...]
    """What runs on each node: a launcher, which finds its place in SLURM's variables."""
    nproc: int | None
    """Ranks of each node; None where only the node can count them."""
    run: str
    """Folder of the run, absolute: there the output goes, and there a requeued job goes on."""
    directives: Mapping[str, str]
    """The user's, by sbatch's long names; empty values are flags."""
    grace_s: float
    """What the launcher gives ranks to save."""

    @property
    def is_elastic(self) -> bool:
        """Whether the run goes on without some of its nodes."""
        return self.nodes[0] < self.nodes[1]


def read_directives(text: str) -> dict[str, str]:
    """Read --slurm KEY=VALUE,...: sbatch's long options; a comma begins a new one only where KEY= or a flag follows."""
    found: dict[str, str] = {}
    key = ""
    for part in text.split(",") if text else ():
        match = re.fullmatch(r"([a-z][a-z0-9_-]*)=(.+)", part.strip())
        if match:
            key = match[1].replace("_", "-")
            found[key] = match[2]
        elif part.strip() in _FLAGS:
            key = ""
            found[part.strip()] = ""
        elif key and part.strip() and not part.startswith("="):
            found[key] += f",{part}"  # partition=a,b
        else:
            raise LaunchError(
                f"--slurm has {part!r}, which is not KEY=VALUE",
                code="launch.slurm-syntax",
                fix=f"write {EXAMPLE}, or --slurm -- SCRIPT for none",
            )
    for key in found:
        if key in _NOT_THESE:
            raise LaunchError(
                f"--slurm {key}= is not for this script", code="launch.slurm-key-reserved", fix=_NOT_THESE[key]
            )
    if "signal" in found and not re.fullmatch(r"B:(SIG)?USR1@[0-9]+", found["signal"]):
        raise LaunchError(
            f"--slurm signal={found['signal']} would not reach the script, which requeues the job",
            code="launch.slurm-signal-invalid",
            fix="write signal=B:USR1@SECONDS",
        )
    return found


def gpus_per_node(directives: Mapping[str, str]) -> int | None:
    """Return the GPUs of each node that are asked for, as in gpus-per-node=h100:4 or gres=gpu:4; None for no word."""
    asked = directives.get("gpus-per-node")
    if asked is None:
        generic = [part for part in directives.get("gres", "").split(",") if part.partition(":")[0] == "gpu"]
        asked = ",".join(generic) or None
    if asked is None:
        return None
    counts = [part.rpartition(":")[2] for part in asked.split(",")]
    return sum(int(count) if count.isdigit() else 1 for count in counts)


def settle_nproc(asked: str | None, directives: Mapping[str, str]) -> int | None:
    """Return the ranks of each node from --nproc (None: not typed) and the GPUs; None where only the node can count.

    Refused where there are more ranks than GPUs.
    """
    gpus = gpus_per_node(directives)
    if asked is None:
        return gpus or 1
    if not asked.isdigit():
        return gpus if asked in ("gpu", "auto") else None
    if gpus and int(asked) > gpus:
        raise LaunchError(
            f"--nproc {asked} is more than the {gpus} GPUs that each node is asked for",
            code="launch.nproc-exceeds-gpus",
            fix=f"use --nproc {gpus}, or --slurm gpus-per-node={asked}",
        )
    return int(asked)


def batch_script(spec: BatchSpec) -> str:
    """Return the script that sbatch gets."""
    directives = [f"#SBATCH --{key}{'=' if value else ''}{value}" for key, value in _directives(spec).items()]
    return _SCRIPT.format(
        directives="\n".join(directives),
        srun=" ".join(srun_words('"$SLURM_JOB_NUM_NODES"', elastic=spec.is_elastic)),
        command=shlex.join(spec.command),
        requeue="" if "no-requeue" in spec.directives else _REQUEUE,
    )


def srun_words(num_nodes: int | str, *, elastic: bool = False, inside: bool = False) -> list[str]:
    """Return the words before a launcher that start it once on each node of an allocation.

    `elastic` runs outlive a node. `inside` another step, as by srun --pty, the cores of that step are shared.
    """
    return [
        "srun",
        f"--nodes={num_nodes}",
        f"--ntasks={num_nodes}",
        "--ntasks-per-node=1",
        "--cpu-bind=none",  # a task's own share would be one core, and all ranks of the node would be on it
        "--export=ALL",  # also where the job was submitted without the environment
        "--kill-on-bad-exit=0",  # launchers end together, and with a report
        *(["--no-kill"] if elastic else []),
        *(["--overlap"] if inside else []),
    ]


def _directives(spec: BatchSpec) -> dict[str, str]:
    """Return all directives in the order of the script; the user's win."""
    least, most = spec.nodes
    ours = {
        "job-name": spec.name,
        "nodes": str(most) if least == most else f"{least}-{most}",
        "ntasks-per-node": "1",
        "output": f"{spec.run}/slurm-%j.out",
        "open-mode": "append",  # a requeued job goes on in the same file
        "signal": f"B:USR1@{math.ceil(spec.grace_s) + _SPARE_S}",
        "requeue": "",
    }
    if spec.nproc and not {"exclusive", "cpus-per-task", "cpus-per-gpu"} & set(spec.directives):
        ours["cpus-per-task"] = str(spec.nproc)  # SLURM would give the launcher, and so all ranks, one core
    if spec.is_elastic:
        ours["no-kill"] = ""  # SLURM ends a job of which a node is lost
        del ours["ntasks-per-node"]  # with it SLURM takes as few nodes as it may, else as many as it can
    if "no-requeue" in spec.directives:
        del ours["requeue"]
    return ours | dict(spec.directives)
