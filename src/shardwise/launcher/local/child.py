"""What a forked child does: become the user's program, or serve the store of one attempt."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.environment import adopt, identify, num_threads
from shardwise.launcher.local.processes import die_with_parent
from shardwise.launcher.local.target import become, execute
from shardwise.recorder import start_record
from shardwise.recorder.start import listener_variables
from shardwise.runs import RunDirectory
from shardwise.runs.directory import make_listener_folder
from shardwise.runs.failure import describe_failure, write_failure

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import ModuleType

    from shardwise.launcher.local.orders import StartRank, StartStore


def rank_work(order: StartRank, parent: int) -> Callable[[], None]:
    """Set this fresh fork up as a rank, and return what runs its target."""
    os.setpgid(0, 0)
    die_with_parent(parent)
    for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_IGN if order.ignore_hangup else signal.SIG_DFL)
    _redirect(order)
    if order.fresh:
        argv = order.target.argv()
        environ = dict(order.environ)
        if order.record:
            with contextlib.suppress(OSError):  # a full disk, which the fork parent did not get one from either
                environ |= listener_variables(make_listener_folder())
        os.execvpe(argv[0], argv, environ)  # noqa: S606 - the program the user named
    adopt(order.environ)
    _settle_libraries(order.environ)
    if order.record:
        start_record(RunDirectory(Path(order.record)), order.rank, identify().world_size)
    return partial(_run, order)


def _redirect(order: StartRank) -> None:
    for path, stream, descriptor in ((order.stdout, sys.stdout, 1), (order.stderr, sys.stderr, 2)):
        if path is not None:
            with Path(path).open("ab") as file:
                os.dup2(file.fileno(), descriptor)
        # What a rank says is seen when it says it, as on a terminal, though it may go to a file.
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    null = os.open(os.devnull, os.O_RDONLY)
    if order.stdout is not None:
        os.dup2(null, 0)
    os.close(null)


def _settle_libraries(environ: Mapping[str, str]) -> None:
    """Bring what libraries read at import in line with this rank: threads, debug level, random state."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(num_threads() or torch.get_num_threads())
        if torch.distributed.is_available():
            torch.distributed.set_debug_level_from_env()
        torch.default_generator.seed()  # a fresh interpreter draws its own: ranks that do not seed differ
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()  # likewise; Python's `random` does so after a fork by itself
        if "OPENBLAS_NUM_THREADS" not in environ:
            _settle_blas(numpy)


def _settle_blas(numpy: ModuleType) -> None:
    """Give numpy's OpenBLAS, which counted its threads when it was loaded, the number that this rank is to have."""
    threads = num_threads()
    for path in Path(str(numpy.__file__)).parents[1].glob("numpy.libs/*openblas*"):
        blas = ctypes.CDLL(str(path))
        with contextlib.suppress(AttributeError):  # a build with other names keeps what it has
            if threads and blas.scipy_openblas_get_num_threads64_() > threads:
                blas.scipy_openblas_set_num_threads64_(threads)


def _run(order: StartRank) -> None:
    try:
        execute(become(order.target))  # type: ignore[arg-type]  # programs are always fresh
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - written down for the supervisor, then shown as Python shows it
        own = error.__traceback__
        while own is not None and Path(own.tb_frame.f_code.co_filename).parent == Path(__file__).parent:
            own = own.tb_next  # our frames say nothing to the user
        error = error.with_traceback(own)
        with contextlib.suppress(OSError):  # a full disk: the terminal may still show it
            write_failure(Path(order.failure), describe_failure(error, order.rank))
        sys.last_value = error  # as Python leaves it after an exception that nobody caught
        sys.excepthook(type(error), error, own)  # torch's own puts the rank before each line
        sys.exit(130 if isinstance(error, KeyboardInterrupt) else 1)


def store_work(order: StartStore, descriptor: int | None, parent: int | None = None) -> Callable[[], None]:
    """Return what serves one attempt's store on a socket the supervisor has bound, until the parent is gone."""
    if parent is not None:
        die_with_parent(parent)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # it ends with its attempt, not before

    def serve() -> None:
        import torch.distributed as dist

        # The port is the supervisor's own socket: bound to one interface, where TCPStore itself would take all.
        store = dist.TCPStore(  # type: ignore[attr-defined]
            order.host,
            order.port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=60),
            master_listen_fd=descriptor,
        )
        while store is not None:
            signal.pause()

    return serve
