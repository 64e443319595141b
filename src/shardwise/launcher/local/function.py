"""Running a function on the ranks of this machine, from a script or a notebook: what mp.spawn is for."""

from __future__ import annotations

import pickle
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.errors import LaunchError, RankFailedError
from shardwise.launcher.local.attempts import LOOPBACK, LaunchSpec, launch, loopback_listener
from shardwise.launcher.local.fork import raise_failure, run_forked
from shardwise.launcher.local.processes import start_fork
from shardwise.launcher.local.target import Module
from shardwise.launcher.policy import root_cause
from shardwise.runs import RunDirectory, Tail, create_run

if TYPE_CHECKING:
    from collections.abc import Callable


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
    return _from_a_fresh_process((fn, args, kwargs), nproc)


def _may_fork_here() -> bool:
    """Whether children of this process would be sound: one thread, CUDA untouched, no process group of its own.

    MLX computes in a thread that Python does not count, and a fork without it waits for ever.
    """
    if not sys.platform.startswith("linux") or threading.active_count() > 1 or "mlx.core" in sys.modules:
        return False
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return True
    started = torch.distributed.is_available() and torch.distributed.is_initialized()
    return not (started or torch.cuda.is_initialized() or torch.cuda._is_in_bad_fork())  # noqa: SLF001 - no public one


def _from_here(call: Callable[[], Any], nproc: int) -> list[Any]:
    from shardwise.launcher.local.child import store_work
    from shardwise.launcher.local.orders import STORE, StartStore

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


def _from_a_fresh_process(call: tuple[Any, ...], nproc: int) -> list[Any]:
    import cloudpickle

    with tempfile.TemporaryDirectory(prefix="shardwise-") as name:
        folder = Path(name)
        (folder / "call").write_bytes(cloudpickle.dumps(call))
        run = create_run(folder / "run", "launch")
        spec = LaunchSpec(
            target=Module("shardwise.launcher.local.call", (name,)), nproc=nproc, preload=("torch", "numpy")
        )
        launched = launch(spec, run, observers=[_Echo(run, nproc)])
        if launched.outcome.interrupted:
            raise KeyboardInterrupt
        cause = root_cause(launched.outcome.exits)
        if cause is not None:
            raise_failure(cause, folder / f"{cause.rank}.pickle")
        if any(exit_.stopped for exit_ in launched.outcome.exits):
            raise RankFailedError("the ranks were stopped before they were done", code="launch.ranks-stopped")
        return [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(nproc)]  # noqa: S301 - our own ranks wrote it


class _Echo:
    """Shows what ranks print through sys.stdout, which a notebook has its own of."""

    def __init__(self, run: RunDirectory, nproc: int) -> None:
        self._tails = [Tail(path(rank)) for rank in range(nproc) for path in (run.stdout, run.stderr)]

    def tick(self) -> None:
        """Show what is new."""
        for tail in self._tails:
            sys.stdout.write(tail.read().decode(errors="replace"))
