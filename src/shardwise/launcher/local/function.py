"""Running a function on forked or fresh ranks of this machine, from a script or a notebook, as mp.spawn does."""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

from shardwise.environment import adopt, rank_environment
from shardwise.errors import LaunchError, RankFailedError
from shardwise.launcher.local.attempts import LOOPBACK, LocalLaunch, launch, loopback_listener
from shardwise.launcher.local.fork_parent import store_work
from shardwise.launcher.local.orders import STORE, StartStore
from shardwise.launcher.local.processes import RankProcess, start_fork
from shardwise.launcher.local.supervise import Outcome, supervise
from shardwise.launcher.local.target import Module
from shardwise.launcher.policy import RankExit, root_cause
from shardwise.runs import RunDirectory, Tail, create_run
from shardwise.runs.console import INTERRUPTED, describe_exit
from shardwise.runs.directory import use_listener_folder
from shardwise.runs.failure import describe_failure, read_failure, write_failure
from shardwise.torch_private.runtime import was_cuda_used

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from shardwise.launcher.local.starters import Starter


_NOTHING: Mapping[str, str] = MappingProxyType({})
_DUMP_S = 0.3
"""Time for a stuck rank to write its stacks before it is killed."""


def run_forked(
    body: Callable[[int], Any], nproc: int, *, timeout_s: float | None, extra: Mapping[str, str] = _NOTHING
) -> list[Any]:
    """Run `body(rank)` in `nproc` forks of this process and return the results by rank.

    The first failing rank's exception is raised here, with its traceback as a note. Results and exceptions
    travel by pickle; closures need not. `extra` are environment variables for all ranks.
    """
    # As short as multiprocessing's own "pymp-": a Unix socket of a listener in it may have a path of 107 bytes.
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
    use_listener_folder(str(folder))  # the parent removes it, also after a kill
    adopt(rank_environment(rank=rank, world_size=nproc, local_rank=rank, local_world_size=nproc, extra=extra))
    torch = sys.modules.get("torch")
    if torch is not None:
        # OMP's threads did not survive the fork: a first parallel region in the child would wait for them.
        torch.set_num_threads(1)
    leave_result(lambda: body(rank), rank, folder)
    return 0


def leave_result(call: Callable[[], Any], rank: int, folder: Path) -> None:
    """Make the call of one rank and leave its result in `folder`; a rank that raises leaves that, and ends here."""
    with (folder / f"{rank}.stacks").open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        result = folder / f"{rank}.pickle"
        try:
            result.write_bytes(pickle.dumps(call()))
        except BaseException as error:  # noqa: BLE001 - handed to the parent, which raises it
            result.write_bytes(portable(error))
            write_failure(folder / f"{rank}.json", describe_failure(error, rank))
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)  # here: letting go of the frames may wait for peers (DDP's destructor does)


def portable(error: BaseException) -> bytes:
    """Pickle an exception, or a description of one that cannot be unpickled."""
    try:
        data = pickle.dumps(error)
        pickle.loads(data)  # noqa: S301 - our own bytes: some exceptions pickle but do not unpickle
    except Exception:  # noqa: BLE001 - any class may break in any way here
        return pickle.dumps(RankFailedError(f"{type(error).__name__}: {error}", code="launch.rank-failed"))
    return data


def dump_stacks(process: RankProcess) -> None:
    """Send SIGUSR1, on which a hung rank dumps its stacks; mpirun forwards it to all of its ranks."""
    os.kill(process.pid, signal.SIGUSR1)
    time.sleep(_DUMP_S)


def take_results(outcome: Outcome, nproc: int, folder: Path, timeout_s: float | None) -> list[Any]:
    """Return what the ranks of `outcome` left in `folder`, by rank, or raise what the first that failed raised."""
    if outcome.interrupted:
        raise KeyboardInterrupt(INTERRUPTED)
    if outcome.timed_out:
        stacks = "\n".join(f"rank {rank}:\n{(folder / f'{rank}.stacks').read_text()}" for rank in outcome.timed_out)
        ranks = ", ".join(map(str, outcome.timed_out))
        raise RankFailedError(
            f"ranks {ranks} were still running after {timeout_s} s\n{stacks}", code="launch.rank-timeout"
        )
    cause = root_cause(outcome.exits)
    if cause is not None:
        raise_failure(cause, folder / f"{cause.rank}.pickle")
    if any(exit_.stopped for exit_ in outcome.exits):
        raise RankFailedError("the ranks were stopped before they were done", code="launch.ranks-stopped")
    return [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(nproc)]  # noqa: S301 - our own child wrote it


def raise_failure(cause: RankExit, path: Path) -> NoReturn:
    """Raise the exception that a rank left at `path`, its traceback as a note; or an error with its exit code."""
    if cause.failure is None or not path.exists():
        raise RankFailedError(
            f"rank {cause.rank} ended with {describe_exit(cause.returncode)}", code="launch.rank-exited"
        )
    error = pickle.loads(path.read_bytes())  # noqa: S301 - our own child wrote it
    error.add_note(f"on rank {cause.rank}:\n{cause.failure.traceback}")
    raise error


def launch_function(fn: Callable[..., Any], *args: Any, nproc: int = 2, **kwargs: Any) -> list[Any]:
    """Run `fn(*args, **kwargs)` on `nproc` ranks of this machine and return its results by rank.

    Ranks have torchrun's variables, so `sw.world()` and `init_process_group()` work inside. They are forks of this
    process where that is clean, else of a fresh one (a notebook has threads), and then `fn` travels by cloudpickle.
    The first failing rank's exception is raised here.
    """
    if not isinstance(nproc, int) or nproc < 1:
        raise LaunchError(
            f"launch(nproc={nproc!r})", code="launch.nproc-invalid", fix="give a whole number of at least 1"
        )
    if _may_fork_here():
        return _from_here(lambda: fn(*args, **kwargs), nproc)
    return run_fresh(partial(fn, *args, **kwargs), nproc, shows_output=True)


def _may_fork_here() -> bool:
    """Whether children of this process would be sound: one thread, CUDA untouched, no process group of its own.

    MLX computes in a thread that Python does not count, and a fork without it waits without limit.
    """
    if not sys.platform.startswith("linux") or threading.active_count() > 1 or "mlx.core" in sys.modules:
        return False
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return True
    started = torch.distributed.is_available() and torch.distributed.is_initialized()
    return not (started or was_cuda_used())


def _from_here(call: Callable[[], Any], nproc: int) -> list[Any]:
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
    shows_output: bool = False,
) -> list[Any]:
    """Make `call()` on `nproc` ranks that share nothing with this process, and return its results by rank.

    It travels by cloudpickle. The first failing rank's exception is raised here. `starter` serves several calls;
    without one, this call starts its own, which imports `preload` once for all ranks.
    """
    import cloudpickle

    with tempfile.TemporaryDirectory(prefix="shardwise-") as name:
        folder = Path(name)
        (folder / "call").write_bytes(cloudpickle.dumps(call))
        run = create_run(folder / "run", "launch")
        target = Module("shardwise.launcher.local.call", (name,))
        observers = [_Echo(run, nproc)] if shows_output else []
        spec = LocalLaunch(target=target, nproc=nproc, preload=preload)
        outcome = launch(spec, run, observers=observers, starter=starter).outcome
        return take_results(outcome, nproc, folder, None)


class _Echo:
    """Shows what ranks print through sys.stdout, which a notebook has its own of."""

    def __init__(self, run: RunDirectory, nproc: int) -> None:
        self._tails = [Tail(path(rank)) for rank in range(nproc) for path in (run.stdout, run.stderr)]

    def tick(self) -> None:
        """Show what is new."""
        for tail in self._tails:
            sys.stdout.write(tail.read().decode(errors="replace"))
