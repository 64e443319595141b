"""Handing a batch script to SLURM, with its refusals put into one sentence."""

from __future__ import annotations

import shutil
import subprocess
import time
from typing import TYPE_CHECKING

from shardwise.errors import LaunchError

if TYPE_CHECKING:
    from pathlib import Path

_PATIENCE_S = 60.0
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
    """Return the reason why a job waits in SLURM's word, once its scheduler has looked at it; empty when unknown."""
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


def _slurm(*words: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(list(words), capture_output=True, text=True, check=False, timeout=_PATIENCE_S)
    except subprocess.TimeoutExpired:
        raise LaunchError(
            f"{words[0]} has not answered for {_PATIENCE_S:g} s",
            code="launch.slurm-timeout",
            fix="see whether SLURM is up",
        ) from None


def _reason(errors: str) -> str:
    """Return the most telling line of what sbatch wrote: the first, without its own name."""
    lines = [line.removeprefix("sbatch: ").removeprefix("error: ").strip() for line in errors.splitlines()]
    return next((line for line in lines if line), "it does not say why")
