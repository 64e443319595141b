"""Sessions with the guards of many machines: started over OpenSSH, read all at once, and never left behind."""

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
"""Index of the second stream."""
NO_FOLDER, NO_PYTHON = 91, 92
"""Exit codes of the shell line on a host, before there is a guard."""
_SSH = (
    *("ssh", "-T", "-a", "-x", "-S", "none"),  # no terminal, no agent, no X11, no connection shared with others
    *("-o", "BatchMode=yes", "-o", "ConnectTimeout=5", "-o", "LogLevel=ERROR"),
    *("-o", "ServerAliveInterval=2", "-o", "ServerAliveCountMax=3"),  # a lost link ends the client in 8 s
    *("-o", "ClearAllForwardings=yes", "-o", "RemoteCommand=none"),  # whatever the user's file says for shells
)
_CLOSE_S = 2.0
_LOOK_S = 0.1


def ssh_argv(host: HostSpec) -> list[str]:
    """Return the argv of the ssh client up to the command: never a prompt, no forwarding, dead links noticed."""
    user = ["-l", host.user] if host.user else []
    port = ["-p", str(host.port)] if host.port else []
    return [*_SSH, *user, *port, host.name]


def guard_command(folder: Path) -> str:
    """Return the shell line that becomes the guard in this folder, under the Python of this process."""
    python = shlex.quote(sys.executable)
    line = (
        f"cd {shlex.quote(str(folder))} || exit {NO_FOLDER}; test -x {python} || exit {NO_PYTHON}; "
        f"exec {python} -P -m shardwise.launcher.ssh.remote"
    )
    return f"exec /bin/sh -c {shlex.quote(line)}"


class Session:
    """One guard: the lines it and its node write, and how it ended."""

    def __init__(self, host: HostSpec, *, is_here: bool, command: str = "") -> None:
        """Start a guard, or another shell `command`, on `host`: over ssh, or directly on this machine."""
        self.host = host
        self.is_here = is_here
        command = command or guard_command(Path.cwd())
        self.process = subprocess.Popen(
            ["/bin/sh", "-c", command] if is_here else [*ssh_argv(host), command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is ours to pass on, and ssh finds no terminal to ask on
            # A guard of this machine lives on for as long as its node takes to stop; ssh has nothing to wait for.
            preexec_fn=None if is_here else partial(die_with_parent, os.getpid()),  # noqa: PLW1509 - one thread
        )
        self._orders: MessageStream[Order] = MessageStream(cast("IO[bytes]", self.process.stdin), Order)
        self._turn = threading.Lock()
        self.stderr_tail: deque[str] = deque(maxlen=20)
        """The last lines of its stderr."""
        self._rests = [b"", b""]

    @property
    def name(self) -> str:
        """Name that users gave the host."""
        return self.host.name

    @property
    def streams(self) -> tuple[IO[bytes], IO[bytes]]:
        """Its stdout and stderr."""
        return cast("IO[bytes]", self.process.stdout), cast("IO[bytes]", self.process.stderr)

    def send(self, order: Any) -> None:
        """Send an order, from any thread; one that is gone is noticed elsewhere."""
        with self._turn, contextlib.suppress(ValueError):  # we hung up
            self._orders.send(order)

    def close_stdin(self) -> None:
        """Close the guard's stdin, which has it stop its node."""
        with self._turn, contextlib.suppress(OSError):
            self._orders.close()

    def read(self, stream: int) -> list[bytes] | None:
        """Return the new lines of a stream; None at its end."""
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
    """All sessions of one launch; leaving the context ends them.

    Within it, beats and signals go out from a thread of their own: whoever shows the output may have to wait for a
    pager or a terminal that is stopped, and guards would take that for the launcher's death.
    """

    def __init__(self, sessions: Iterable[Session]) -> None:
        self.all = list(sessions)
        self._selector = selectors.DefaultSelector()
        self.signals: list[int] = []
        """Signals that came; each is taken from here and passed on to every guard."""
        self.was_asked = False
        """Whether a signal was passed on."""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._send_beats, name="beats", daemon=True)
        for session in self.all:
            for number, stream in enumerate(session.streams):
                self._selector.register(stream, selectors.EVENT_READ, (session, number))

    @property
    def running(self) -> list[Session]:
        """Sessions of which more may come."""
        open_ = [key.data[0] for key in self._selector.get_map().values()]
        return [session for session in self.all if session in open_ or session.process.poll() is None]

    def receive(self, timeout_s: float) -> list[tuple[Session, int, bytes]]:
        """Return (session, stream, line) of what came, waiting up to `timeout_s`."""
        received = []
        for key, _ in self._selector.select(timeout_s):
            session, stream = key.data
            lines = session.read(stream)
            if lines is None:
                self._selector.unregister(key.fileobj)
            received += [(session, stream, line) for line in lines or ()]
        if not self._selector.get_map():  # all streams are closed: what is left is to be reaped
            time.sleep(0.01)
        return received

    def ask(self, orders: Sequence[tuple[Session, Order]], timeout_s: float) -> dict[Session, Reply]:
        """Send orders and return the replies of all that gave one in time, before they ended."""
        for session, order in orders:
            session.send(order)
        asked = {session for session, _ in orders}
        replies: dict[Session, Reply] = {}
        deadline = time.monotonic() + timeout_s
        while asked - set(replies) and time.monotonic() < deadline:
            for session, stream, line in self.receive(0.1):
                if stream != STDERR and line.startswith(MARK):
                    replies[session] = decode_line(line.removeprefix(MARK), Reply)
            asked &= set(self.running) | set(replies)
        return replies

    def _send_beats(self) -> None:
        next_beat = 0.0
        while not self._closing.is_set():
            orders: list[Order] = []
            while self.signals:
                self.was_asked = True
                orders.append(Signal(self.signals.pop(0)))
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + BEAT_S
                orders.append(SessionBeat())
            for session in self.all:
                for order in orders:
                    session.send(order)
            self._closing.wait(_LOOK_S)

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


# Messages between the launcher and its guard on another machine.


BEAT_S = 1.0
"""Between two signs of life of the launcher."""
SILENCE_S = 8.0
"""A launcher that is silent for so long is gone: the guard ends what it runs. Over ssh, a lost packet costs more
than between nodes, whose own heartbeats are faster."""
MARK = b"shardwise-guard "
"""Begins every line of a guard, since shells may write something of their own before it starts."""


class Look(msgspec.Struct, frozen=True, tag="look"):
    """Report what is there."""

    target: Script | Module | Program


class Listen(msgspec.Struct, frozen=True, tag="listen"):
    """Listen at this address of yours, port 0 takes a free one, and send `token` to whoever connects."""

    address: str
    port: int
    token: str


class Reach(msgspec.Struct, frozen=True, tag="reach"):
    """Report whether `token` is received there."""

    address: str
    port: int
    token: str


class Start(msgspec.Struct, frozen=True, tag="start"):
    """Run `shardwise` with these arguments and variables; from now on your output is its output."""

    arguments: list[str]
    variables: dict[str, str]
    grace_s: float
    """From a stop request, or the launcher's death, to a kill."""


class Signal(msgspec.Struct, frozen=True, tag="signal"):
    """Pass this signal on."""

    number: int


class SessionBeat(msgspec.Struct, frozen=True, tag="beat"):
    """The launcher is alive."""


class Facts(msgspec.Struct, frozen=True, tag="facts"):
    """What is there."""

    versions: dict[str, str]
    """Of what must be the same on all hosts, by name."""
    addresses: dict[str, str]
    """By interface, loopback left out."""
    own: str = ""
    """Address at which ssh came in; empty on the launcher's own machine."""
    launcher: str = ""
    """Address from which ssh came; empty on the launcher's own machine."""
    refusal: str = ""
    fix: str = ""
    code: str = ""
    """Why the target cannot be started there; empty when it can."""


class HostAnswer(msgspec.Struct, frozen=True, tag="answer"):
    """To Listen (with the port) and Reach: how it went; no refusal is success."""

    port: int = 0
    refusal: str = ""


Order = Look | Listen | Reach | Start | Signal | SessionBeat
Reply = Facts | HostAnswer
