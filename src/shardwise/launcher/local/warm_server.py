"""The warm server: one process per user that has imported torch and lends launchers a fork of itself."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import selectors
import signal
import socket
import struct
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from shardwise.launcher.local.fork_parent import ForkParent, preload
from shardwise.launcher.local.orders import AskStop, Channel, Join, Ready, Request, WarmStatus
from shardwise.launcher.local.processes import become_reaper, kill_strays
from shardwise.launcher.local.warm_place import address, locked, open_place

if TYPE_CHECKING:
    from collections.abc import Callable

_CREDENTIALS = struct.Struct("3i")
_HELLO_S = 5.0
"""A launcher says what it wants at once; only the same user can keep the server waiting."""
_NAMESPACES = ("user", "pid", "net", "mnt", "uts", "ipc", "cgroup", "time")
_RIGHTS = ("Uid", "Gid", "Groups", "NoNewPrivs", "Seccomp", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")


class WarmServer:
    """Forks a fork parent for every launcher that may have one; runs nobody's code itself."""

    def __init__(
        self, listener: socket.socket, key: str, *, idle_s: float, refusal: str, hide: Callable[[], None]
    ) -> None:
        """Lend forks to launchers that know `key`, or tell them the refusal; `hide` takes the socket's file away."""
        self._listener = listener
        self._key = key
        self._idle_s = idle_s
        self._refusal = refusal
        self._hide = hide
        self._born = self._idle_since = time.monotonic()
        self._launches = 0
        self._sessions: set[int] = set()
        self._stopped = False

    def serve(self) -> Callable[[], None] | None:
        """Serve until told to stop or idle for too long; in a rank of a launcher, return what it is to do."""
        wake_reader, wake_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: self._stop())
        with selectors.DefaultSelector() as selector, self._listener:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(wake_reader, selectors.EVENT_READ)
            while not self._stopped and self._idle_left_s() > 0:
                ready = [key.fileobj for key, _ in selector.select(None if self._sessions else self._idle_left_s())]
                if wake_reader in ready:
                    os.read(wake_reader, 4096)
                    self._reap()
                if self._listener in ready and (lent := self._admit()) is not None:
                    os.close(wake_reader)
                    os.close(wake_writer)
                    break
            else:
                self._hide()
                return None
        return lent.serve("")

    def _stop(self) -> None:
        self._stopped = True

    def _idle_left_s(self) -> float:
        return self._idle_s - (0.0 if self._sessions else time.monotonic() - self._idle_since)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while pid := os.waitpid(-1, os.WNOHANG)[0]:
                if pid in self._sessions:
                    self._sessions.discard(pid)
                    self._idle_since = time.monotonic()
        # A fork parent that was killed leaves us its ranks' children. Each that dies wakes us to look for its own.
        kill_strays(self._sessions)

    def _admit(self) -> ForkParent | None:
        """Answer one connection; in a fork that is lent to its launcher, return that fork parent."""
        end, _ = self._listener.accept()
        channel: Channel[Request] = Channel(end, Request)
        pid, uid, _ = _CREDENTIALS.unpack(end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        with contextlib.suppress(OSError, msgspec.DecodeError):  # who hangs up, mumbles or says nothing gets nothing
            if uid != os.geteuid():
                channel.send(Ready(f"it serves user {os.geteuid()} alone"))
            elif (request := _first(channel)) is not None:
                return self._answer(channel, request, pid)
        _close(channel)
        return None

    def _answer(self, channel: Channel[Request], request: Request, peer: int) -> ForkParent | None:
        if not isinstance(request, Join):
            if isinstance(request, AskStop):
                self._stop()
                self._hide()  # before the answer: whoever comes next finds no server
            age_s = time.monotonic() - self._born
            status = WarmStatus(os.getpid(), age_s, self._launches, len(self._sessions), self._idle_left_s())
            channel.send(status)
        elif refusal := self._why_not(request, peer):
            channel.send(Ready(refusal))
        elif session := os.fork():
            self._sessions.add(session)
            self._launches += 1
            self._idle_s = request.idle_s
        else:
            return _become_session(channel, peer)
        _close(channel)
        return None

    def _why_not(self, request: Join, peer: int) -> str:
        """Return why this launcher gets no fork; empty when it does."""
        if request.key != self._key:
            return "it was started with another interpreter, torch or environment"
        if wall := other_wall(peer):
            return f"it lives behind another wall than this launcher: {wall}"
        if len(list(Path("/proc/self/task").iterdir())) > 1:
            return "it has threads, which a fork would break"
        return self._refusal


def _first(channel: Channel[Request]) -> Request | None:
    while (requests := channel.receive(_HELLO_S)) is not None:
        if requests:
            return requests[0]
    return None


def _close(channel: Channel[Request]) -> None:
    for descriptor in channel.take_descriptors(8):
        os.close(descriptor)
    channel.close()


def _become_session(channel: Channel[Request], peer: int) -> ForkParent:
    """Make this fork of the server what a fork parent started by the launcher would be."""
    try:
        signal.set_wakeup_fd(-1)
        os.setsid()
        become_reaper()
        live_as(peer)
        for number, descriptor in enumerate(channel.take_descriptors(3)):
            os.dup2(descriptor, number)
            os.close(descriptor)
    except (OSError, ValueError) as error:
        with contextlib.suppress(OSError):
            channel.send(Ready(f"it cannot take over this launcher's limits ({error})"))
        os._exit(1)
    return ForkParent(channel.socket)


def main() -> Callable[[], None] | None:
    """Leave the launcher that started this, import, and serve the listening socket named by the arguments."""
    descriptor, folder, key, idle_s = sys.argv[1:5]
    if os.fork():
        os._exit(0)  # the launcher waits for this process alone; its child is nobody's, and has no terminal
    become_reaper()
    listener = socket.socket(fileno=int(descriptor))
    with open_place(Path(folder)) as place:
        path = Path(address(place, key))
        mine = path.stat().st_ino

        def hide() -> None:
            with locked(place), contextlib.suppress(FileNotFoundError):
                if path.stat().st_ino == mine:  # else a later server's
                    path.unlink()

        server = WarmServer(listener, key, idle_s=float(idle_s), refusal=preload(sys.argv[5:]), hide=hide)
        return server.serve()


# What the kernel says of a process: the walls around it, and the limits it lives under (Linux).


def walls(pid: int) -> dict[str, object]:
    """Return what confines a process and cannot be handed on: namespaces, root, cgroup, rights; OSError if unseen."""
    proc = Path(f"/proc/{pid}")
    found: dict[str, object] = {
        f"{name} namespace": (proc / "ns" / name).readlink()
        for name in _NAMESPACES
        if Path(f"/proc/self/ns/{name}").exists()
    }
    root = (proc / "root").stat()
    found["root folder"] = (root.st_dev, root.st_ino)
    found["cgroup"] = (proc / "cgroup").read_text()
    status = _status(pid)
    found.update({f"{name} of /proc/PID/status": status.get(name) for name in _RIGHTS})
    with contextlib.suppress(OSError):  # no security module
        found["security label"] = (proc / "attr" / "current").read_text()
    return found


def other_wall(pid: int) -> str:
    """Return which wall around process `pid` is not around this one; empty when they live in the same place."""
    try:
        theirs = walls(pid)
    except OSError as error:
        return f"sight ({error.strerror})"
    ours = walls(os.getpid())
    return next((name for name in ours if ours[name] != theirs.get(name)), "")


def live_as(pid: int) -> None:
    """Take over what a child of process `pid` would have got from it: folder, umask, limits, cores, priority."""
    for name, number in vars(resource).items():
        if name.startswith("RLIMIT_"):
            resource.setrlimit(number, resource.prlimit(pid, number))
    os.sched_setaffinity(0, os.sched_getaffinity(pid))
    os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, pid))
    Path("/proc/self/oom_score_adj").write_text(Path(f"/proc/{pid}/oom_score_adj").read_text())
    os.umask(int(_status(pid)["Umask"], 8))
    os.chdir(f"/proc/{pid}/cwd")


def _status(pid: int) -> dict[str, str]:
    return dict(re.findall(r"^(\w+):[ \t]*(.*)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE))


if __name__ == "__main__":
    rank_work = main()
    if rank_work is None:
        os._exit(0)
    rank_work()  # here, at the top of the interpreter, as in fork_parent
