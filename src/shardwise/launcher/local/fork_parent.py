"""The fork parent: a single-threaded process that imports torch once, then forks and reaps ranks and stores.

A forked rank runs the user's program as `__main__`. It returns from all functions of this module first, so that only
the lines at the end of this file remain on its stack.
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
from shardwise.errors import InputError
from shardwise.launcher.local.processes import (
    RENDEZVOUS,
    STORE,
    STORE_ARGUMENT,
    Ended,
    Order,
    Ready,
    Started,
    StartRank,
    StartRendezvous,
    StartStore,
    become_reaper,
    die_with_parent,
    ignore_stop_signals,
    kill_descendants,
    set_title,
)
from shardwise.launcher.local.target import Module, set_main
from shardwise.launcher.nodes.rendezvous import rendezvous_work
from shardwise.launcher.transport import MessageStream
from shardwise.recorder import start_record
from shardwise.recorder.start import listener_variables
from shardwise.runs import RunDirectory
from shardwise.runs.directory import make_listener_folder, remove_listener_folder
from shardwise.runs.failure import describe_failure, write_failure
from shardwise.torch_private.distributed import was_cuda_used

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import ModuleType


class ForkParent:
    """Forks processes for one supervisor; when the supervisor closes the socket, kills all of them."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel: MessageStream[Order] = MessageStream(channel, Order)
        self._children: set[int] = set()
        self._listener_folder = ""

    def serve(self, refusal: str) -> Callable[[], None]:
        """Fork and reap until the supervisor disconnects, then exit; in a forked child, return the function to run.

        `refusal` is sent to the supervisor: the reason why forking is not safe, or empty.
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
                        os._exit(0)  # no buffers to flush, and unloading torch takes 0.1 s
                    for order in orders:
                        child = self._fork(order)
                        if child is not None:
                            os.close(wake_reader)
                            os.close(wake_writer)
                            return child

    def _fork(self, order: Order) -> Callable[[], None] | None:
        """Fork a process for one request; return the function to run in the child and None in the parent."""
        if isinstance(order, StartRank) and not self._listener_folder:
            with contextlib.suppress(OSError):  # a full disk: ranks that need the directory report it
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
            if pid in self._children:  # other pids are orphans of ranks, adopted by this subreaper
                self._children.discard(pid)
                self._channel.send(Ended(pid, os.waitstatus_to_exitcode(status)))


def _work_of(order: Order, descriptor: int | None, parent: int) -> Callable[[], None]:
    """Set up this forked child for its request and return the function that it runs."""
    if isinstance(order, StartRendezvous):
        return rendezvous_work(order, descriptor, parent)
    if isinstance(order, StartRank):
        return rank_work(order, parent)
    return store_work(order, descriptor, parent)


def preload(names: Sequence[str]) -> str:
    """Import modules for the ranks; return why ranks cannot be forked from this process, empty if they can."""
    gc.disable()  # garbage collections take a fifth of the time of importing torch with dynamo, and free nothing
    for name in names:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()  # a collection in a rank would copy these shared pages without freeing anything
    gc.enable()
    # numpy's OpenBLAS starts threads at import and joins them before a fork. Threads that remain
    # after a trial fork do not survive a fork.
    pid = os.fork()
    if pid == 0:
        os._exit(was_cuda_used())
    _, status = os.waitpid(pid, 0)
    if threading.active_count() > 1 or len(list(Path("/proc/self/task").iterdir())) > 1:
        return "importing torch started threads"
    return "importing torch initialized CUDA" if status else ""


def main() -> Callable[[], None]:
    """Import the modules in argv[2:], then serve the socket whose descriptor is argv[1].

    With argv[1] "store", serve one attempt's store instead, for ranks that are not forked: argv[2] is the descriptor of
    its listening socket, argv[3] the process id of the launcher.
    """
    if sys.argv[1] == STORE_ARGUMENT:
        return _store_of_arguments(*map(int, sys.argv[2:4]))
    ignore_stop_signals()
    channel = socket.socket(fileno=int(sys.argv[1]))
    become_reaper()
    return ForkParent(channel).serve(preload(sys.argv[2:]))


def _store_of_arguments(descriptor: int, parent: int) -> Callable[[], None]:
    listener = socket.socket(fileno=descriptor)
    host, port = listener.getsockname()[:2]
    listener.detach()
    return store_work(StartStore(port, host), descriptor, parent)


# The functions of forked children: run the user's program, or serve the store of one attempt.


def rank_work(order: StartRank, parent: int) -> Callable[[], None]:
    """Set up this forked child as a rank and return the function that runs its target."""
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
            with contextlib.suppress(OSError):  # a full disk, on which the fork parent could not create one either
                environ |= listener_variables(make_listener_folder())
        os.execvpe(argv[0], argv, environ)  # noqa: S606 - the program the user named
    set_title(order.target.name if isinstance(order.target, Module) else Path(order.target.typed()[0]).name, order.rank)
    adopt(order.environ)
    _configure_libraries(order.environ)
    if order.record:
        start_record(RunDirectory(Path(order.record)), order.rank, identify().world_size)
    return partial(_run, order)


def _redirect(order: StartRank) -> None:
    for path, stream, descriptor in ((order.stdout, sys.stdout, 1), (order.stderr, sys.stderr, 2)):
        if path is not None:
            with Path(path).open("ab") as file:
                os.dup2(file.fileno(), descriptor)
        # Line buffering also for files, so that the launcher can copy the output as it is written.
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    null = os.open(os.devnull, os.O_RDONLY)
    if order.stdout is not None:
        os.dup2(null, 0)
    os.close(null)


def _configure_libraries(environ: Mapping[str, str]) -> None:
    """Apply this rank's environment to libraries that read it at import: threads, debug level, random seed."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(num_threads() or torch.get_num_threads())
        if torch.distributed.is_available():
            torch.distributed.set_debug_level_from_env()
        torch.default_generator.seed()  # as in a new interpreter: ranks that do not seed have different seeds
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()  # Python's `random` reseeds after a fork without help
        if "OPENBLAS_NUM_THREADS" not in environ:
            _limit_blas_threads(numpy)


def _limit_blas_threads(numpy: ModuleType) -> None:
    """Set the number of threads of numpy's OpenBLAS, which chose it when the fork parent imported numpy."""
    threads = num_threads()
    for path in Path(str(numpy.__file__)).parents[1].glob("numpy.libs/*openblas*"):
        blas = ctypes.CDLL(str(path))
        with contextlib.suppress(AttributeError):  # a build with different symbol names keeps its number
            if threads and blas.scipy_openblas_get_num_threads64_() > threads:
                blas.scipy_openblas_set_num_threads64_(threads)


def _run(order: StartRank) -> None:
    try:
        code = set_main(order.target)  # type: ignore[arg-type]  # programs are always fresh
        exec(code, sys.modules["__main__"].__dict__)  # noqa: S102 - running the user's script is the job
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - recorded for the supervisor, then printed as Python does
        frames = error.__traceback__
        while frames is not None and Path(frames.tb_frame.f_code.co_filename).parent == Path(__file__).parent:
            frames = frames.tb_next  # hide the launcher's frames from the user
        error = error.with_traceback(frames)
        with contextlib.suppress(OSError):  # a full disk: the terminal still shows the exception
            write_failure(Path(order.failure), describe_failure(error, order.rank))
        sys.last_value = error  # as Python sets it after an uncaught exception
        if not (isinstance(error, InputError) and Path(order.failure).exists()):  # the launcher prints its sentence
            sys.excepthook(type(error), error, frames)  # torch's hook prefixes each line with the rank
        sys.exit(130 if isinstance(error, KeyboardInterrupt) else 1)


def store_work(order: StartStore, descriptor: int | None, parent: int | None = None) -> Callable[[], None]:
    """Return a function that serves one attempt's store on the bound socket `descriptor` until the parent exits."""
    if parent is not None:
        die_with_parent(parent)
    ignore_stop_signals()  # the store ends with its attempt

    def serve() -> None:
        import torch.distributed as dist

        # The supervisor's socket is bound to one interface; TCPStore would bind all of them.
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
    # A forked child returns its function and runs it at the top level, so that the interpreter exits normally:
    # it calls atexit handlers, joins threads and flushes buffers.
    main()()
