"""The fork parent: imports torch once, stays single-threaded, forks ranks on order and reaps them."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import selectors
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.launcher.local.orders import (
    MEETING,
    STORE,
    Channel,
    Ended,
    Order,
    Ready,
    Report,
    Started,
    StartMeeting,
    StartRank,
)
from shardwise.launcher.local.processes import become_reaper, kill_descendants
from shardwise.runs.directory import make_listener_folder, remove_listener_folder
from shardwise.torch_private.runtime import was_cuda_used

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class ForkParent:
    """Serves one supervisor over one socket until that closes; then leaves nothing running."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel: Channel[Order] = Channel(channel, Order)
        self._children: set[int] = set()
        self._listener_folder = ""

    def serve(self, refusal: str) -> Callable[[], None]:
        """Fork and reap until the supervisor goes away, then end this process; in a child, return what it is to do.

        `refusal` says why forking is not safe here, and is for the supervisor to act upon; empty when it is.
        """
        wake_reader, wake_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        ignore_stop_requests()
        self._send(Ready(refusal))
        with selectors.DefaultSelector() as selector:
            selector.register(self._channel.socket, selectors.EVENT_READ)
            selector.register(wake_reader, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is not self._channel.socket:
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
        descriptor = None if isinstance(order, StartRank) else self._channel.take_descriptors(1)[0]
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
            self._send(Started(order.rank, pid, self._listener_folder))
        else:
            self._send(Started(MEETING if isinstance(order, StartMeeting) else STORE, pid))
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
                self._send(Ended(pid, os.waitstatus_to_exitcode(status)))

    def _send(self, report: Report) -> None:
        with contextlib.suppress(ConnectionError):
            self._channel.send(report)


def _work_of(order: Order, descriptor: int | None, parent: int) -> Callable[[], None]:
    """Set this fresh fork up for its order, and return what it is to do."""
    if isinstance(order, StartMeeting):
        from shardwise.launcher.nodes.meeting import meeting_work

        return meeting_work(order, descriptor, parent)
    from shardwise.launcher.local.child import rank_work, store_work

    return rank_work(order, parent) if isinstance(order, StartRank) else store_work(order, descriptor, parent)


def ignore_stop_requests() -> None:
    """Leave it to the supervisor what a signal means; SLURM sends its own to every process of a step."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])


def preload(names: Sequence[str]) -> str:
    """Import modules that ranks will want; return why ranks must then not be forked from here, empty if they may."""
    gc.disable()  # a fifth of the time of importing torch with dynamo goes to collections that find nothing
    for name in (*names, "shardwise.launcher.local.child"):
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
    ignore_stop_requests()
    channel = socket.socket(fileno=int(sys.argv[1]))
    become_reaper()
    return ForkParent(channel).serve(preload(sys.argv[2:]))


if __name__ == "__main__":
    # A child comes back with its work and does it here, at the top of the interpreter, so that
    # the interpreter then ends as it always does: atexit handlers, threads joined, buffers flushed.
    main()()
