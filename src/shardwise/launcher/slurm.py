"""SLURM: the batch script of a launch, its submission, and the nodes of an allocation or a step."""

from __future__ import annotations

import math
import re
import shlex
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardwise.environment import identify
from shardwise.errors import LaunchError
from shardwise.launcher.options import read_nodes
from shardwise.runs.console import PREEMPTED

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path


EXAMPLE = "--slurm time=2:00:00,partition=gpu,gpus-per-node=8"
_FLAGS = frozenset({"contiguous", "exclusive", "hold", "no-requeue", "overcommit", "oversubscribe", "spread-job"})
"""Options of sbatch that need no value."""
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
_BEFORE_START = 128 + signal.SIGUSR1
"""How a launcher ends that was asked to stop before it could catch the signal."""
_SCRIPT = """\
#!/bin/bash
{directives}

# By this the launchers of the job know each other; ranks never see it.
SHARDWISE_SECRET=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \\n')
export SHARDWISE_SECRET

# SLURM sends USR1 before the time is over, to this shell alone, which handles it only while it waits.
trap 'asked=yes; kill -USR1 "$step"' USR1

# One launcher per node. It finds its node rank and the others by SLURM's variables.
{srun} \\
    {command} &
step=$!
while kill -0 "$step" 2> /dev/null; do wait "$step"; done
wait "$step"
code=$?
{requeue}exit "$code"
"""
_REQUEUE = f"""
# {PREEMPTED}: the ranks have saved; {_BEFORE_START}: they had not started yet. The job continues when it runs again.
if [ -n "$asked" ] && [ "$code" = {PREEMPTED} -o "$code" = {_BEFORE_START} ]; then scontrol requeue "$SLURM_JOB_ID"; fi
"""


@dataclass(frozen=True, kw_only=True)
class BatchSpec:
    """What to submit, settled."""

    name: str
    nodes: tuple[int, int]
    """Machines, at least and at most."""
    command: tuple[str, ...]
    """What runs on each node: a launcher, which finds its node rank in SLURM's variables."""
    nproc: int | None
    """Ranks of each node; None where only the node can count them."""
    run: str
    """Folder of the run, absolute: there the output goes, and there a requeued job continues."""
    directives: Mapping[str, str]
    """The user's, by sbatch's long names; empty values are flags."""
    grace_s: float
    """What the launcher gives ranks to save."""

    @property
    def is_elastic(self) -> bool:
        """Whether the run continues without some of its nodes."""
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
    """Return the GPUs of each node that are asked for, as in gpus-per-node=h100:4 or gres=gpu:4; None for none."""
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
        srun=" ".join(srun_argv('"$SLURM_JOB_NUM_NODES"', elastic=spec.is_elastic)),
        command=shlex.join(spec.command),
        requeue="" if "no-requeue" in spec.directives else _REQUEUE,
    )


def srun_argv(num_nodes: int | str, *, elastic: bool = False, inside: bool = False) -> list[str]:
    """Return the argv before a launcher that starts it once on each node of an allocation.

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
        "open-mode": "append",  # a requeued job continues in the same file
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


# Inside SLURM: the nodes of a step or an allocation, checked against what was asked for; pure.


_WHERE = frozenset({"rdzv_endpoint", "master_addr"})


def is_step(variables: Mapping[str, str]) -> bool:
    """Return whether this process is a task that srun started, by SLURM's `variables`."""
    return identify(variables).source == "slurm"


def num_tasks(variables: Mapping[str, str]) -> int:
    """Return how many tasks the step around this process has; 1 outside of a step, as in a shell by srun --pty."""
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


# Handing a batch script to SLURM, with one sentence for each refusal.


_ANSWER_S = 60.0
_LOOK_S = 3.0
_HOPELESS = frozenset({"BadConstraints", "PartitionConfig", "PartitionNodeLimit", "PartitionTimeLimit"})
"""Reasons to wait that no end of other jobs will change."""


def require_slurm(program: str) -> None:
    """Refuse where there is no SLURM."""
    if shutil.which(program) is None:
        raise LaunchError(
            f"--slurm, but this machine has no {program}",
            code="launch.slurm-not-found",
            fix="run it where SLURM's commands are, or add --dry-run to see the script",
        )


def submit(script: Path) -> str:
    """Submit a batch script and return the job's id; what SLURM would never start is refused."""
    done = _slurm("sbatch", "--parsable", str(script))
    if done.returncode != 0:
        raise LaunchError(
            f"SLURM refuses the job ({_reason(done.stderr)})",
            code="launch.slurm-refused",
            fix="change --slurm or --nnodes",
        )
    job = done.stdout.strip().partition(";")[0]
    waiting_for = _why_it_waits(job)
    if waiting_for in _HOPELESS:
        _slurm("scancel", job)
        raise LaunchError(
            f"SLURM would never start the job ({waiting_for})",
            code="launch.slurm-never-starts",
            fix="change --slurm or --nnodes",
        )
    return job


def _why_it_waits(job: str) -> str:
    """Return the reason why a job waits in SLURM's terms, once its scheduler has looked at it; empty when unknown."""
    deadline = time.monotonic() + _LOOK_S
    while time.monotonic() < deadline:
        try:
            found = _slurm("squeue", "--noheader", f"--jobs={job}", "--format=%T %r")
        except LaunchError:
            return ""  # the job is queued, whether squeue answers or not
        state, _, reason = found.stdout.strip().partition(" ")
        if state != "PENDING" or reason != "None":
            return reason
        time.sleep(0.1)
    return ""


def _slurm(*argv: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(list(argv), capture_output=True, text=True, check=False, timeout=_ANSWER_S)
    except subprocess.TimeoutExpired:
        raise LaunchError(
            f"{argv[0]} has not answered for {_ANSWER_S:g} s",
            code="launch.slurm-timeout",
            fix="see whether SLURM is up",
        ) from None


def _reason(errors: str) -> str:
    """Return the most telling line of what sbatch wrote: the first, without its own name."""
    lines = [line.removeprefix("sbatch: ").removeprefix("error: ").strip() for line in errors.splitlines()]
    return next((line for line in lines if line), "it gives no reason")
