"""Sessions with the guards on remote hosts: started over OpenSSH, read with one selector, and closed together."""

from __future__ import annotations

import contextlib
import os
import selectors
import shlex
import subprocess
import sys
import threading
import time
from collections import deque
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self, cast

import msgspec

from shardwise.launcher.local.processes import die_with_parent
from shardwise.launcher.local.target import (
    Module,  # noqa: TC001 - read when messages are decoded
    Program,  # noqa: TC001 - read when messages are decoded
    Script,  # noqa: TC001 - read when messages are decoded
)
from shardwise.launcher.transport import MessageStream, decode_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from types import TracebackType

    from shardwise.launcher.ssh.run import HostSpec


STDERR = 1
"""Index of the stderr stream."""
NO_FOLDER, NO_PYTHON = 91, 92
"""Exit codes of the shell command on a host that cannot start the guard."""
_SSH = (
    *("ssh", "-T", "-a", "-x", "-S", "none"),  # no terminal, no agent, no X11, no shared connection
    *("-o", "BatchMode=yes", "-o", "ConnectTimeout=5", "-o", "LogLevel=ERROR"),
    *("-o", "ServerAliveInterval=2", "-o", "ServerAliveCountMax=3"),  # the client exits 8 s after a link is lost
    *("-o", "ClearAllForwardings=yes", "-o", "RemoteCommand=none"),  # override the user's settings for shells
)
_CLOSE_S = 2.0
_POLL_S = 0.1


def ssh_argv(host: HostSpec) -> list[str]:
    """Return the ssh command line up to the remote command: without prompts and forwarding, with keep-alive."""
    user = ["-l", host.user] if host.user else []
    port = ["-p", str(host.port)] if host.port else []
    return [*_SSH, *user, *port, host.name]


def guard_command(folder: Path) -> str:
    """Return the shell command that executes the guard in this directory with the Python of this process."""
    python = shlex.quote(sys.executable)
    line = (
        f"cd {shlex.quote(str(folder))} || exit {NO_FOLDER}; test -x {python} || exit {NO_PYTHON}; "
        f"exec {python} -P -m shardwise.launcher.ssh.remote"
    )
    return f"exec /bin/sh -c {shlex.quote(line)}"


class Session:
    """A guard on one host: its process, its requests, and the output of the guard and its node."""

    def __init__(self, host: HostSpec, *, is_here: bool, command: str = "") -> None:
        """Start the guard, or a shell `command`, on `host`: over ssh, or directly if it is this machine."""
        self.host = host
        self.is_here = is_here
        command = command or guard_command(Path.cwd())
        self.process = subprocess.Popen(
            ["/bin/sh", "-c", command] if is_here else [*ssh_argv(host), command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # this process forwards Ctrl-C, and ssh has no terminal to prompt on
            # A local guard must outlive this process until its node has stopped; the ssh client need not.
            preexec_fn=None if is_here else partial(die_with_parent, os.getpid()),  # noqa: PLW1509 - one thread
        )
        self._orders: MessageStream[Order] = MessageStream(cast("IO[bytes]", self.process.stdin), Order)
        self._lock = threading.Lock()
        self.stderr_tail: deque[str] = deque(maxlen=20)
        """The last lines of stderr."""
        self._rests = [b"", b""]

    @property
    def name(self) -> str:
        """Name of the host in --hosts."""
        return self.host.name

    @property
    def streams(self) -> tuple[IO[bytes], IO[bytes]]:
        """The guard's stdout and stderr."""
        return cast("IO[bytes]", self.process.stdout), cast("IO[bytes]", self.process.stderr)

    def send(self, order: Any) -> None:
        """Send a request from any thread; has no effect after the guard has exited."""
        with self._lock, contextlib.suppress(ValueError):  # stdin is closed
            self._orders.send(order)

    def close_stdin(self) -> None:
        """Close the guard's stdin, after which it stops its node."""
        with self._lock, contextlib.suppress(OSError):
            self._orders.close()

    def read(self, stream: int) -> list[bytes] | None:
        """Return the new lines of a stream; None at end of file."""
        data = os.read(self.streams[stream].fileno(), 1 << 16)
        *lines, self._rests[stream] = (self._rests[stream] + data).split(b"\n")
        if not data and self._rests[stream]:
            lines, self._rests[stream] = [self._rests[stream]], b""
        elif not data:
            return None
        if stream == STDERR:
            self.stderr_tail.extend(line.decode(errors="replace").strip() for line in lines if line.strip())
        return lines


class Sessions:
    """All sessions of one launch, as a context manager that closes them.

    A separate thread sends heartbeats and signals, because displaying output may block on a pager or a stopped
    terminal, and the guards would treat the silence as the exit of the launcher.
    """

    def __init__(self, sessions: Iterable[Session]) -> None:
        self.all = list(sessions)
        self._selector = selectors.DefaultSelector()
        self.signals: list[int] = []
        """Received stop signals, which are removed as they are forwarded to every guard."""
        self.is_interrupted = False
        """Whether a stop signal was forwarded."""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._send_beats, name="beats", daemon=True)
        for session in self.all:
            for number, stream in enumerate(session.streams):
                self._selector.register(stream, selectors.EVENT_READ, (session, number))

    @property
    def running(self) -> list[Session]:
        """Sessions that are running or have unread output."""
        open_ = [key.data[0] for key in self._selector.get_map().values()]
        return [session for session in self.all if session in open_ or session.process.poll() is None]

    def receive(self, timeout_s: float) -> list[tuple[Session, int, bytes]]:
        """Return the (session, stream, line) triples that arrive within `timeout_s`."""
        received = []
        for key, _ in self._selector.select(timeout_s):
            session, stream = key.data
            lines = session.read(stream)
            if lines is None:
                self._selector.unregister(key.fileobj)
            received += [(session, stream, line) for line in lines or ()]
        if not self._selector.get_map():  # all streams are closed, and the processes are about to exit
            time.sleep(0.01)
        return received

    def query(self, orders: Sequence[tuple[Session, Order]], timeout_s: float) -> dict[Session, Reply]:
        """Send requests and return the replies that arrive within `timeout_s`."""
        for session, order in orders:
            session.send(order)
        queried = {session for session, _ in orders}
        replies: dict[Session, Reply] = {}
        deadline = time.monotonic() + timeout_s
        while queried - set(replies) and time.monotonic() < deadline:
            for session, stream, line in self.receive(0.1):
                if stream != STDERR and line.startswith(MARK):
                    replies[session] = decode_line(line.removeprefix(MARK), Reply)
            queried &= set(self.running) | set(replies)
        return replies

    def _send_beats(self) -> None:
        next_beat = 0.0
        while not self._closing.is_set():
            orders: list[Order] = []
            while self.signals:
                self.is_interrupted = True
                orders.append(Signal(self.signals.pop(0)))
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + BEAT_S
                orders.append(SessionBeat())
            for session in self.all:
                for order in orders:
                    session.send(order)
            self._closing.wait(_POLL_S)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._closing.set()
        self._thread.join(_CLOSE_S)
        for session in self.all:
            session.close_stdin()
        deadline = time.monotonic() + _CLOSE_S
        while self.running and time.monotonic() < deadline:
            self.receive(0.05)
        for session in self.all:
            session.process.kill()
            session.process.wait()
            for stream in session.streams:
                stream.close()
        self._selector.close()


# Messages between the launcher and its guard on a remote host.


BEAT_S = 1.0
"""Seconds between two heartbeats of the launcher."""
SILENCE_S = 8.0
"""Seconds without a heartbeat after which the guard stops its node; longer than between nodes, because ssh takes
longer to recover from a lost packet."""
MARK = b"shardwise-guard "
"""Prefix of every line of a guard, because a login shell may print text before the guard starts."""


class Look(msgspec.Struct, frozen=True, tag="look"):
    """Request to reply with the facts of the host."""

    target: Script | Module | Program


class Listen(msgspec.Struct, frozen=True, tag="listen"):
    """Request to listen on an address and to send `token` to clients; port 0 selects a free port."""

    address: str
    port: int
    token: str


class Reach(msgspec.Struct, frozen=True, tag="reach"):
    """Request to connect to an address and check that it sends `token`."""

    address: str
    port: int
    token: str


class Start(msgspec.Struct, frozen=True, tag="start"):
    """Request to run `shardwise` with these arguments and variables; the guard's output is then that of the node."""

    arguments: list[str]
    variables: dict[str, str]
    grace_s: float
    """Seconds from a stop request, or the exit of the launcher, to SIGKILL."""


class Signal(msgspec.Struct, frozen=True, tag="signal"):
    """Request to send a signal to the node."""

    number: int


class SessionBeat(msgspec.Struct, frozen=True, tag="beat"):
    """A heartbeat of the launcher."""


class Facts(msgspec.Struct, frozen=True, tag="facts"):
    """The facts of a host: versions, addresses, and whether it has the target."""

    versions: dict[str, str]
    """Versions of packages that must be the same on all hosts, by name."""
    addresses: dict[str, str]
    """Addresses by interface, without loopback."""
    own: str = ""
    """Server address of the ssh connection; empty on the launcher's host."""
    launcher: str = ""
    """Client address of the ssh connection; empty on the launcher's host."""
    refusal: str = ""
    fix: str = ""
    code: str = ""
    """Error code if the target cannot be started, with `refusal` and `fix`; all empty if it can."""


class HostAnswer(msgspec.Struct, frozen=True, tag="answer"):
    """The reply to Listen (with the port) and Reach; `refusal` is empty on success."""

    port: int = 0
    refusal: str = ""


Order = Look | Listen | Reach | Start | Signal | SessionBeat
Reply = Facts | HostAnswer
