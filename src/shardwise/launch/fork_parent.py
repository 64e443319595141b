"""The fork parent: imports torch once, stays single-threaded, forks ranks on order and reaps them."""

from __future__ import annotations

import array
import contextlib
import importlib
import os
import selectors
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from shardwise.launch.orders import STORE, Ended, Order, Ready, Report, Started, StartRank
from shardwise.launch.processes import become_reaper, kill_descendants

if TYPE_CHECKING:
    from collections.abc import Callable

_MOST_BYTES = 1 << 22


class ForkParent:
    """Serves one supervisor over one socket until that closes; then leaves nothing running."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._buffer = b""
        self._descriptors: list[int] = []
        self._decoder = msgspec.json.Decoder(Order)
        self._children: set[int] = set()

    def serve(self) -> Callable[[], None] | None:
        """Fork and reap until the supervisor goes away; in a child, return what that child is to do."""
        wake_reader, wake_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)  # the supervisor decides what a signal means
        self._send(Ready(_why_not_to_fork()))
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
                    orders = self._receive()
                    if orders is None:
                        kill_descendants()
                        return None
                    for order in orders:
                        child = self._fork(order)
                        if child is not None:
                            os.close(wake_reader)
                            os.close(wake_writer)
                            return child

    def _fork(self, order: Order) -> Callable[[], None] | None:
        """Fork for one order; returns the child's work in the child, None in the parent."""
        descriptor = self._descriptors.pop(0) if not isinstance(order, StartRank) else None
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            self._channel.close()
            from shardwise.launch.child import rank_work, store_work

            return rank_work(order, parent) if isinstance(order, StartRank) else store_work(order, descriptor, parent)
        if descriptor is not None:
            os.close(descriptor)
        with contextlib.suppress(PermissionError, ProcessLookupError):
            os.setpgid(pid, pid)
        self._children.add(pid)
        self._send(Started(order.rank if isinstance(order, StartRank) else STORE, pid))
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

    def _receive(self) -> list[Order] | None:
        """Return the orders that came in, with their descriptors queued; None when the supervisor is gone."""
        size = array.array("i").itemsize
        try:
            data, ancillary, _, _ = self._channel.recvmsg(_MOST_BYTES, socket.CMSG_SPACE(size))
        except ConnectionError:
            return None
        if not data:
            return None
        for _, _, content in ancillary:
            self._descriptors.extend(array.array("i", content[: len(content) - len(content) % size]))
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return [self._decoder.decode(line) for line in lines]

    def _send(self, report: Report) -> None:
        with contextlib.suppress(ConnectionError):
            self._channel.sendall(msgspec.json.encode(report) + b"\n")


def _why_not_to_fork() -> str:
    """Return why ranks must not be forked from this process; empty when they may."""
    # numpy's OpenBLAS starts its threads at import, ends them before a fork and starts them anew when it needs them:
    # after a fork for nothing, whatever thread is left is one that a fork would break.
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    if threading.active_count() > 1 or len(list(Path("/proc/self/task").iterdir())) > 1:
        return "importing torch started threads"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "importing torch initialised CUDA"
    return ""


def main() -> Callable[[], None] | None:
    """Import what was asked for, then serve the socket whose descriptor is the first argument."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    become_reaper()
    for name in sys.argv[2:]:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    return ForkParent(channel).serve()


if __name__ == "__main__":
    # A child comes back from serve() with its work and does it here, at the top of the interpreter, so that
    # the interpreter then ends as it always does: atexit handlers, threads joined, buffers flushed.
    work = main()
    if work is not None:
        work()
