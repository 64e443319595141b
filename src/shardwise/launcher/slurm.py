"""SLURM support: the batch script of a launch, its submission, and the nodes of an allocation or a job step."""

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
"""Options of sbatch that do not have a value."""
_RESERVED = {
    "nodes": "use --nnodes",
    "ntasks": "use --nnodes for the number of nodes and --nproc for the ranks per node",
    "ntasks-per-node": "use --nproc, because SLURM starts one launcher per node, which starts the ranks",
    "gpus-per-task": "use gpus-per-node, because SLURM starts one launcher per node as its task",
    "array": "submit each job separately, because the jobs of an array would share one run directory",
    "wrap": "remove wrap, because shardwise generates the script",
}
"""Options of sbatch that conflict with the generated script, with the fix."""
_SPARE_S = 30
"""Seconds between the exit of the ranks and the job's time limit, in which launchers exit and the job is requeued."""
_BEFORE_START = 128 + signal.SIGUSR1
"""Exit code of a launcher that received SIGUSR1 before it installed its signal handler."""
_SCRIPT = """\
#!/bin/bash
{directives}

# The launchers of the job authenticate each other with this secret; it is not passed to ranks.
SHARDWISE_SECRET=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \\n')
export SHARDWISE_SECRET

# SLURM sends USR1 before the time limit to this shell only; bash runs the trap while it waits.
trap 'asked=yes; kill -USR1 "$step"' USR1

# One launcher per node, which reads its node rank and the address of node 0 from SLURM's variables.
{srun} \\
    {command} &
step=$!
while kill -0 "$step" 2> /dev/null; do wait "$step"; done
wait "$step"
code=$?
{requeue}exit "$code"
"""
_REQUEUE = f"""
# {PREEMPTED}: the ranks saved a checkpoint; {_BEFORE_START}: they had not started. The requeued job resumes.
if [ -n "$asked" ] && [ "$code" = {PREEMPTED} -o "$code" = {_BEFORE_START} ]; then scontrol requeue "$SLURM_JOB_ID"; fi
"""


@dataclass(frozen=True, kw_only=True)
class BatchSpec:
    """The resolved settings of a SLURM batch job."""

    name: str
    nodes: tuple[int, int]
    """Minimum and maximum number of nodes."""
    command: tuple[str, ...]
    """The launcher's command line on each node; it reads its node rank from SLURM's variables."""
    nproc: int | None
    """Number of ranks per node; None if it depends on the hardware of the node."""
    run: str
    """Absolute path of the run directory, which contains the job's output and from which a requeued job resumes."""
    directives: Mapping[str, str]
    """The user's sbatch options by long name; the value of a flag is empty."""
    grace_s: float
    """Seconds that ranks get to save a checkpoint after a stop request."""

    @property
    def is_elastic(self) -> bool:
        """Whether the run may continue with fewer nodes."""
        return self.nodes[0] < self.nodes[1]


def read_directives(text: str) -> dict[str, str]:
    """Parse --slurm KEY=VALUE,... with sbatch's long options.

    An entry that is neither KEY=VALUE nor a flag extends the previous value, as in partition=a,b.
    """
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
                f"--slurm entries must be KEY=VALUE, got {part!r}",
                code="launch.slurm-syntax",
                fix=f"write {EXAMPLE}, or --slurm -- SCRIPT without options",
            )
    for key in found:
        if key in _RESERVED:
            raise LaunchError(
                f"--slurm {key}= conflicts with the batch script", code="launch.slurm-key-reserved", fix=_RESERVED[key]
            )
    if "signal" in found and not re.fullmatch(r"B:(SIG)?USR1@[0-9]+", found["signal"]):
        raise LaunchError(
            f"--slurm signal={found['signal']} does not signal the batch script, which requeues the job",
            code="launch.slurm-signal-invalid",
            fix="write signal=B:USR1@SECONDS",
        )
    return found


def gpus_per_node(directives: Mapping[str, str]) -> int | None:
    """Return the number of GPUs per node that gpus-per-node=h100:4 or gres=gpu:4 requests; None without either."""
    requested = directives.get("gpus-per-node")
    if requested is None:
        generic = [part for part in directives.get("gres", "").split(",") if part.partition(":")[0] == "gpu"]
        requested = ",".join(generic) or None
    if requested is None:
        return None
    num_gpus = 0
    for part in requested.split(","):
        count = part.rpartition(":")[2]
        num_gpus += int(count) if count.isdigit() else 1
    return num_gpus


def resolve_nproc(nproc: str | None, directives: Mapping[str, str]) -> int | None:
    """Return the number of ranks per node from --nproc, which may be None, and the requested GPUs.

    Returns None if the number depends on the hardware of the node. Raises LaunchError for more ranks than GPUs.
    """
    gpus = gpus_per_node(directives)
    if nproc is None:
        return gpus or 1
    if not nproc.isdigit():
        return gpus if nproc in ("gpu", "auto") else None
    if gpus and int(nproc) > gpus:
        raise LaunchError(
            f"--nproc {nproc} exceeds the {gpus} GPUs per node that --slurm requests",
            code="launch.nproc-exceeds-gpus",
            fix=f"use --nproc {gpus}, or --slurm gpus-per-node={nproc}",
        )
    return int(nproc)


def batch_script(spec: BatchSpec) -> str:
    """Return the batch script to submit with sbatch."""
    directives = [f"#SBATCH --{key}{'=' if value else ''}{value}" for key, value in _directives(spec).items()]
    return _SCRIPT.format(
        directives="\n".join(directives),
        srun=" ".join(srun_argv('"$SLURM_JOB_NUM_NODES"', elastic=spec.is_elastic)),
        command=shlex.join(spec.command),
        requeue="" if "no-requeue" in spec.directives else _REQUEUE,
    )


def srun_argv(num_nodes: int | str, *, elastic: bool = False, inside: bool = False) -> list[str]:
    """Return the srun command that starts one launcher on each node of an allocation.

    An `elastic` run continues after a node fails. `inside` means that this process is in a step, such as srun --pty,
    whose cores the new step shares.
    """
    return [
        "srun",
        f"--nodes={num_nodes}",
        f"--ntasks={num_nodes}",
        "--ntasks-per-node=1",
        "--cpu-bind=none",  # by default all ranks of the node would share the single core of the task
        "--export=ALL",  # also if the job was submitted with --export=NONE
        "--kill-on-bad-exit=0",  # launchers exit together and report the root cause
        *(["--no-kill"] if elastic else []),
        *(["--overlap"] if inside else []),
    ]


def _directives(spec: BatchSpec) -> dict[str, str]:
    """Return the directives of the script in order; the user's options override the defaults."""
    least, most = spec.nodes
    ours = {
        "job-name": spec.name,
        "nodes": str(most) if least == most else f"{least}-{most}",
        "ntasks-per-node": "1",
        "output": f"{spec.run}/slurm-%j.out",
        "open-mode": "append",  # a requeued job appends to the same file
        "signal": f"B:USR1@{math.ceil(spec.grace_s) + _SPARE_S}",
        "requeue": "",
    }
    if spec.nproc and not {"exclusive", "cpus-per-task", "cpus-per-gpu"} & set(spec.directives):
        ours["cpus-per-task"] = str(spec.nproc)  # by default the launcher and all ranks would share one core
    if spec.is_elastic:
        ours["no-kill"] = ""  # by default SLURM ends a job when one of its nodes fails
        del ours["ntasks-per-node"]  # with it SLURM allocates the minimum number of nodes, without it the maximum
    if "no-requeue" in spec.directives:
        del ours["requeue"]
    return ours | dict(spec.directives)


# Inside SLURM: the nodes of a job step or an allocation, checked against the options; pure functions.


_WHERE = frozenset({"rdzv_endpoint", "master_addr"})


def is_step(variables: Mapping[str, str]) -> bool:
    """Return whether the environment `variables` are those of a task that srun started."""
    return identify(variables).source == "slurm"


def num_tasks(variables: Mapping[str, str]) -> int:
    """Return the number of tasks of the job step of this process; 1 outside of a step or in srun --pty."""
    return identify(variables).world_size


def nodes_of_step(variables: Mapping[str, str], options: Mapping[str, Any], typed: Collection[str]) -> dict[str, Any]:
    """Return the node options that this launcher's srun step implies, except the user's own options in `typed`.

    A step of several tasks must run one launcher per node; otherwise LaunchError names the srun option to use.
    """
    if not is_step(variables) or options.get("standalone"):
        return {}
    step = identify(variables)
    if step.local_world_size > 1:
        raise LaunchError(
            f"SLURM must start one launcher per node, got {step.local_world_size} on this node",
            code="launch.slurm-tasks-per-node",
            fix="use srun --ntasks-per-node=1 with --nproc, or one task per rank without a launcher",
        )
    least, most = read_nodes(options["nnodes"]) if "nnodes" in typed else (step.world_size, step.world_size)
    if not least <= step.world_size <= most:
        raise LaunchError(
            f"SLURM started {step.world_size} launchers, but --nnodes is {options['nnodes']}",
            code="launch.slurm-nnodes-mismatch",
            fix=f"use srun --nodes={most} --ntasks-per-node=1, or --nnodes {step.world_size}",
        )
    if step.world_size == 1:
        return {"nnodes": "1"}  # also for MIN:MAX, because no node can join a step later
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
    """Return the number of nodes of this shell's SLURM allocation to run on; None outside of an allocation.

    `nodes` is the (min, max) of --nnodes, or None. Raises LaunchError if the allocation is too small.
    """
    if "SLURM_JOB_ID" not in variables:
        return None
    job, have = variables["SLURM_JOB_ID"], int(variables.get("SLURM_JOB_NUM_NODES") or 1)
    least, most = nodes or (have, have)
    if have < least:
        raise LaunchError(
            f"--nnodes {least} exceeds the {have} nodes of SLURM allocation {job}",
            code="launch.slurm-too-few-nodes",
            fix=f"use --nnodes {have}, or salloc --nodes={least}",
        )
    gpus = re.search(r"[0-9]+$", variables.get("SLURM_GPUS_PER_NODE") or "")
    if nproc is not None and gpus is not None and nproc > int(gpus[0]) > 0:
        raise LaunchError(
            f"--nproc {nproc} exceeds the {gpus[0]} GPUs per node of SLURM allocation {job}",
            code="launch.nproc-exceeds-gpus",
            fix=f"use --nproc {gpus[0]}, or salloc --gpus-per-node={nproc}",
        )
    return min(have, most)


# Submission of a batch script to SLURM.


_COMMAND_TIMEOUT_S = 60.0
_PENDING_TIMEOUT_S = 3.0
_PERMANENT_REASONS = frozenset({"BadConstraints", "PartitionConfig", "PartitionNodeLimit", "PartitionTimeLimit"})
"""Pending reasons of squeue that do not change when other jobs end."""
_UNREACHABLE = ("resolve_ctls_from_dns_srv", "establish a configuration source", "contact slurm controller")
"""Parts of sbatch's messages if there is no configuration, or the controller does not answer."""


def require_slurm(program: str) -> None:
    """Raise LaunchError if this SLURM command is not on the PATH."""
    if shutil.which(program) is None:
        raise LaunchError(
            f"--slurm requires {program}, which is not on the PATH",
            code="launch.slurm-not-found",
            fix="run on a host with SLURM, or add --dry-run to print the script",
        )


def submit(script: Path) -> str:
    """Submit a batch script and return the job id; raise LaunchError for a job that SLURM rejects or cannot start."""
    done = _slurm("sbatch", "--parsable", str(script))
    if done.returncode != 0 and any(sign in done.stderr for sign in _UNREACHABLE):
        raise LaunchError(
            f"sbatch cannot reach the controller of SLURM ({_reason(done.stderr)})",
            code="launch.slurm-unreachable",
            fix="check with sinfo, set SLURM_CONF to the cluster's slurm.conf, or add --dry-run to print the script",
        )
    if done.returncode != 0:
        raise LaunchError(
            f"SLURM rejected the job ({_reason(done.stderr)})",
            code="launch.slurm-refused",
            fix="change --slurm or --nnodes",
        )
    job = done.stdout.strip().partition(";")[0]
    reason = _pending_reason(job)
    if reason in _PERMANENT_REASONS:
        _slurm("scancel", job)
        raise LaunchError(
            f"SLURM cannot start the job ({reason}), so it was cancelled",
            code="launch.slurm-never-starts",
            fix="change --slurm or --nnodes",
        )
    return job


def _pending_reason(job: str) -> str:
    """Wait for squeue to show why a job is pending and return that reason; empty if it is unknown."""
    deadline = time.monotonic() + _PENDING_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            found = _slurm("squeue", "--noheader", f"--jobs={job}", "--format=%T %r")
        except LaunchError:
            return ""  # the job is queued even if squeue does not respond
        state, _, reason = found.stdout.strip().partition(" ")
        if state != "PENDING" or reason != "None":
            return reason
        time.sleep(0.1)
    return ""


def _slurm(*argv: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(list(argv), capture_output=True, text=True, check=False, timeout=_COMMAND_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise LaunchError(
            f"{argv[0]} did not respond within {_COMMAND_TIMEOUT_S:g} s",
            code="launch.slurm-timeout",
            fix="check that the SLURM controller is running",
        ) from None


def _reason(errors: str) -> str:
    """Return the first non-empty line of sbatch's standard error, without the prefix "sbatch: error: "."""
    for line in errors.splitlines():
        text = line.removeprefix("sbatch: ").removeprefix("error: ").strip()
        if text:
            return text
    return "sbatch reported no reason"
