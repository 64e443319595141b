"""Two ways to start ranks: forked from one parent that has imported torch, or each as a fresh process."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

import msgspec

from shardwise.errors import LaunchError
from shardwise.launcher.local.orders import (
    KEY_VARIABLE,
    RENDEZVOUS,
    STORE,
    Ended,
    Order,
    Ready,
    Report,
    Started,
    StartRank,
    StartRendezvous,
    StartStore,
)
from shardwise.launcher.local.processes import RankProcess, ignores_hangup, start_program
from shardwise.launcher.transport import MessageStream
from shardwise.recorder.start import record_variables
from shardwise.runs.console import describe_exit
from shardwise.runs.directory import remove_listener_folder

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path
    from types import TracebackType

    from shardwise.launcher.local.target import Target

_READY_S = 120
_END_S = 10


class Starter(Protocol):
    """Starts the ranks and the stores of every attempt of one launch."""

    def start_rank(
        self, rank: int, target: Target, environ: Mapping[str, str], *, output: Output, failure: Path
    ) -> RankProcess:
        """Start one rank."""

    def start_store(self, listener: socket.socket) -> RankProcess:
        """Start the server of one attempt's store on a bound socket."""

    def start_rendezvous(self, order: StartRendezvous, answer: socket.socket) -> RankProcess:
        """Start a process that joins the other nodes and reports on `answer` who joined."""

    @property
    def lost(self) -> str:
        """What ended, and the ranks with it; empty while all is well."""


@dataclass(frozen=True, kw_only=True)
class Output:
    """Where a rank's output goes; None is the terminal."""

    stdout: Path | None
    stderr: Path | None
    record: Path | None = None
    """Run directory in which it records its collectives; None for no record."""


def _of_a_fresh_process(environ: Mapping[str, str], output: Output, failure: Path) -> dict[str, str]:
    """Return the environment of a rank that is a fresh interpreter or program, and so gets no order."""
    record = {} if output.record is None else record_variables(environ, output.record)
    return {**environ, **record, "TORCHELASTIC_ERROR_FILE": str(failure.with_suffix(".record.json"))}


class PlainStarter:
    """Every rank is a process started from here: for systems other than Linux, which lack what forking needs."""

    lost = ""

    def start_rank(
        self, rank: int, target: Target, environ: Mapping[str, str], *, output: Output, failure: Path
    ) -> RankProcess:
        """Start one rank as its own process."""
        environ = _of_a_fresh_process(environ, output, failure)
        return start_program(rank, target.argv(), environ, stdout=output.stdout, stderr=output.stderr)

    def start_store(self, listener: socket.socket) -> RankProcess:
        """Start a process that serves the store; it imports torch while the ranks do."""
        descriptor = listener.fileno()
        argv = [sys.executable, "-m", "shardwise.launcher.local.store_process", str(descriptor), str(os.getpid())]
        popen = subprocess.Popen(argv, pass_fds=[descriptor], process_group=0)
        return RankProcess(STORE, popen.pid, popen)

    def start_rendezvous(self, order: StartRendezvous, answer: socket.socket) -> RankProcess:
        """Start a process that joins the other nodes; it imports torch first."""
        # Environment and key are passed as an environment: command lines can be read by every user of the machine.
        bare = msgspec.structs.replace(order, environ={}, key="")
        arguments = [msgspec.json.encode(bare).decode(), str(answer.fileno()), str(os.getpid())]
        argv = [sys.executable, "-m", "shardwise.launcher.nodes.rendezvous", *arguments]
        environ = {**order.environ, KEY_VARIABLE: order.key}
        popen = subprocess.Popen(argv, env=environ, pass_fds=[answer.fileno()], process_group=0)
        return RankProcess(RENDEZVOUS, popen.pid, popen)


class ForkStarter:
    """Ranks are forks of one process that has imported torch: N ranks cost one import, a restart costs none."""

    def __init__(self, channel: socket.socket, parent: subprocess.Popen[bytes], *, fresh: bool = False) -> None:
        """Send orders to the fork parent at the other end of `channel`; `fresh` ranks are new interpreters."""
        self._channel: MessageStream[Report] = MessageStream(channel, Report)
        self._socket = channel
        self._parent = parent
        self._fresh = fresh
        self._gone = False
        self._ended: dict[int, int] = {}
        self._started: dict[int, int] = {}
        self._refusal: str | None = None
        self._listener_folder = ""

    @classmethod
    def start(cls, environ: Mapping[str, str], preload: Sequence[str], *, fresh: bool = False) -> Self:
        """Start a fork parent; it imports while this process continues."""
        ours, theirs = socket.socketpair()
        with theirs:
            descriptor = theirs.fileno()
            argv = [sys.executable, "-m", "shardwise.launcher.local.fork_parent", str(descriptor), *preload]
            # It must not die of a signal that comes before it can ignore it; so it begins with that blocked.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
            try:
                parent = subprocess.Popen(argv, env=dict(environ), pass_fds=[descriptor], process_group=0)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return cls(ours, parent, fresh=fresh)

    def wait_until_ready(self) -> str:
        """Wait for the imports; return why forking is not safe here, empty when it is."""
        while self._refusal is None:
            self._wait()
        return self._refusal

    def start_rank(
        self, rank: int, target: Target, environ: Mapping[str, str], *, output: Output, failure: Path
    ) -> RankProcess:
        """Order one rank."""
        stdout, stderr = (None if path is None else str(path) for path in (output.stdout, output.stderr))
        if self._fresh:
            environ = _of_a_fresh_process(environ, output, failure)
        record = "" if output.record is None else str(output.record)
        order = StartRank(
            rank, target, dict(environ), stdout, stderr, str(failure), record, self._fresh, ignores_hangup()
        )
        return self._order(rank, order)

    def start_store(self, listener: socket.socket) -> RankProcess:
        """Order the server of one attempt's store."""
        host, port = listener.getsockname()[:2]
        return self._order(STORE, StartStore(port, host), [listener.fileno()])

    def start_rendezvous(self, order: StartRendezvous, answer: socket.socket) -> RankProcess:
        """Order a process that joins the other nodes."""
        return self._order(RENDEZVOUS, order, [answer.fileno()])

    def returncode(self, pid: int) -> int | None:
        """Return how a child of the fork parent ended, None while it runs."""
        self._look()
        return self._ended.get(pid, -signal.SIGKILL if self._gone else None)  # it takes its children with it

    @property
    def lost(self) -> str:
        """How the fork parent ended, and its children with it; empty while it lives."""
        self._look()
        if not self._gone:
            return ""
        return f"the fork parent of the ranks (pid {self._parent.pid}) ended with {describe_exit(self._parent.wait())}"

    def close(self) -> None:
        """End the fork parent, and with it everything it started."""
        deadline = time.monotonic() + _END_S
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        while not self._gone and time.monotonic() < deadline:  # its end closes when all that it started is gone
            self._pump(deadline - time.monotonic())
        if not self._gone:
            self._parent.kill()
        self._channel.close()
        self._parent.wait()
        if self._listener_folder:
            remove_listener_folder(self._listener_folder)  # a fork parent that was killed has not

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _order(self, rank: int, order: Order, descriptors: Sequence[int] = ()) -> RankProcess:
        self._started.pop(rank, None)
        self._channel.send(order, descriptors)
        while rank not in self._started:
            self._wait()
        return _ForkedProcess(rank, self._started[rank], self)

    def _wait(self) -> None:
        """Wait for the next report, which must come."""
        if not self._pump(_READY_S):
            raise LaunchError(
                "the fork parent does not answer", code="launch.fork-parent-timeout", fix="try --start-method spawn"
            )
        if self._gone:
            raise LaunchError(
                self.lost, code="launch.fork-parent-lost", fix="see its output above, or try --start-method spawn"
            )

    def _look(self) -> None:
        """Take in what has been reported."""
        if not self._gone:
            self._pump(0)

    def _pump(self, timeout_s: float) -> bool:
        """Take in reports, or learn that the fork parent is gone; False when neither comes in time."""
        reports = self._channel.receive(timeout_s)
        self._gone = reports is None
        for report in reports or ():
            match report:
                case Ready(refusal):
                    self._refusal = refusal
                case Started(rank, pid, listener_folder):
                    self._started[rank] = pid
                    self._listener_folder = listener_folder or self._listener_folder
                case Ended(pid, returncode):
                    self._ended[pid] = returncode
        return reports != []


class _ForkedProcess(RankProcess):
    """A child of the fork parent, which reaps it and reports."""

    def __init__(self, rank: int, pid: int, starter: ForkStarter) -> None:
        super().__init__(rank, pid)
        self._starter = starter

    def poll(self) -> int | None:
        """Return the exit code once the fork parent reported it."""
        return self._starter.returncode(self.pid)
