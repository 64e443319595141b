"""The fork parent: imports torch once, stays single-threaded, forks ranks and the store of an attempt, reaps them.

A forked rank runs the user's program as the real `__main__` on the stack of this module: nothing of ours stays open
but the lines at the end of the file.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import selectors
import signal
import socket
import sys
import threading
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.environment import adopt, identify, num_threads
from shardwise.launcher.local.orders import (
    RENDEZVOUS,
    STORE,
    Ended,
    Order,
    Ready,
    Started,
    StartRank,
    StartRendezvous,
)
from shardwise.launcher.local.processes import become_reaper, die_with_parent, ignore_stop_signals, kill_descendants
from shardwise.launcher.local.target import become
from shardwise.launcher.nodes.rendezvous import rendezvous_work
from shardwise.launcher.transport import MessageStream
from shardwise.recorder import start_record
from shardwise.recorder.start import listener_variables
from shardwise.runs import RunDirectory
from shardwise.runs.directory import make_listener_folder, remove_listener_folder
from shardwise.runs.failure import describe_failure, write_failure
from shardwise.torch_private.runtime import was_cuda_used

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import ModuleType

    from shardwise.launcher.local.orders import StartStore


class ForkParent:
    """Serves one supervisor over one socket until that closes; then leaves nothing running."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel: MessageStream[Order] = MessageStream(channel, Order)
        self._children: set[int] = set()
        self._listener_folder = ""

    def serve(self, refusal: str) -> Callable[[], None]:
        """Fork and reap until the supervisor goes away, then end this process; in a child, return what it is to do.

        `refusal` is why forking is not safe here, for the supervisor to act upon; empty when it is.
        """
        wake_reader, wake_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        ignore_stop_signals()
        self._channel.send(Ready(refusal))
        with selectors.DefaultSelector() as selector:
            selector.register(self._channel, selectors.EVENT_READ)
            selector.register(wake_reader, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is not self._channel:
                        with contextlib.suppress(BlockingIOError):
                            os.read(wake_reader, 4096)
                        self._reap()
                        continue
                    orders = self._channel.receive()
                    if orders is None:
                        kill_descendants()
                        if self._listener_folder:
                            remove_listener_folder(self._listener_folder)
                        os._exit(0)  # nothing of ours is to be flushed, and unloading torch takes 0.1 s
                    for order in orders:
                        child = self._fork(order)
                        if child is not None:
                            os.close(wake_reader)
                            os.close(wake_writer)
                            return child

    def _fork(self, order: Order) -> Callable[[], None] | None:
        """Fork for one order; returns the child's work in the child, None in the parent."""
        if isinstance(order, StartRank) and not self._listener_folder:
            with contextlib.suppress(OSError):  # a full disk: ranks that need a folder report it themselves
                self._listener_folder = make_listener_folder()
        descriptor = None if isinstance(order, StartRank) else self._channel.take_descriptor()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            self._channel.close()
            return _work_of(order, descriptor, parent)
        if descriptor is not None:
            os.close(descriptor)
        with contextlib.suppress(PermissionError, ProcessLookupError):
            os.setpgid(pid, pid)
        self._children.add(pid)
        if isinstance(order, StartRank):
            self._channel.send(Started(order.rank, pid, self._listener_folder))
        else:
            self._channel.send(Started(RENDEZVOUS if isinstance(order, StartRendezvous) else STORE, pid))
        return None

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._children:  # others are orphans of ranks, adopted because we are their reaper
                self._children.discard(pid)
                self._channel.send(Ended(pid, os.waitstatus_to_exitcode(status)))


def _work_of(order: Order, descriptor: int | None, parent: int) -> Callable[[], None]:
    """Set this fresh fork up for its order, and return what it is to do."""
    if isinstance(order, StartRendezvous):
        return rendezvous_work(order, descriptor, parent)
    return rank_work(order, parent) if isinstance(order, StartRank) else store_work(order, descriptor, parent)


def preload(names: Sequence[str]) -> str:
    """Import modules that ranks will want; return why ranks must then not be forked from here, empty if they may."""
    gc.disable()  # a fifth of the time of importing torch with dynamo goes to collections that find nothing
    for name in names:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()  # ranks would only copy these pages to find that nothing in them is garbage
    gc.enable()
    # numpy's OpenBLAS starts its threads at import, ends them before a fork and starts them anew when it needs them:
    # after a fork for nothing, whatever thread is left is one that a fork would break.
    pid = os.fork()
    if pid == 0:
        os._exit(was_cuda_used())
    _, status = os.waitpid(pid, 0)
    if threading.active_count() > 1 or len(list(Path("/proc/self/task").iterdir())) > 1:
        return "importing torch started threads"
    return "importing torch touched CUDA" if status else ""


def main() -> Callable[[], None]:
    """Import what was asked for, then serve the socket whose descriptor is the first argument."""
    ignore_stop_signals()
    channel = socket.socket(fileno=int(sys.argv[1]))
    become_reaper()
    return ForkParent(channel).serve(preload(sys.argv[2:]))


# What a forked child does: become the user's program, or serve the store of one attempt.


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
        # The output of a rank is seen when it is written, as on a terminal, though it may go to a file.
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
        code = become(order.target)  # type: ignore[arg-type]  # programs are always fresh
        exec(code, sys.modules["__main__"].__dict__)  # noqa: S102 - running the user's script is the job
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - written down for the supervisor, then shown as Python shows it
        own = error.__traceback__
        while own is not None and Path(own.tb_frame.f_code.co_filename).parent == Path(__file__).parent:
            own = own.tb_next  # our frames tell the user nothing
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
    ignore_stop_signals()  # it ends with its attempt, not before

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


if __name__ == "__main__":
    # A child comes back with its work and does it here, at the top of the interpreter, so that
    # the interpreter then ends as it always does: atexit handlers, threads joined, buffers flushed.
    main()()
