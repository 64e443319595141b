"""Starters of ranks: by fork from one parent that has imported torch, or each as a new process."""

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
from shardwise.launcher.local.processes import (
    KEY_VARIABLE,
    RENDEZVOUS,
    STORE,
    STORE_ARGUMENT,
    Ended,
    Order,
    RankProcess,
    Ready,
    Report,
    Started,
    StartRank,
    StartRendezvous,
    StartStore,
    ignores_hangup,
    start_program,
)
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
    """The interface that starts the ranks and stores of all attempts of a launch."""

    def start_rank(
        self, rank: int, target: Target, environ: Mapping[str, str], *, output: Output, failure: Path
    ) -> RankProcess:
        """Start one rank."""

    def start_store(self, listener: socket.socket) -> RankProcess:
        """Start the server of one attempt's store on a bound socket."""

    def start_rendezvous(self, order: StartRendezvous, answer: socket.socket) -> RankProcess:
        """Start a process that joins the rendezvous and reports the nodes that joined on `answer`."""

    @property
    def lost(self) -> str:
        """Description of the required process that exited; empty while all run."""


@dataclass(frozen=True, kw_only=True)
class Output:
    """The output files of a rank; None for the terminal."""

    stdout: Path | None
    stderr: Path | None
    record: Path | None = None
    """Run directory in which the rank records its collectives; None if it does not record."""


def _new_process_environment(environ: Mapping[str, str], output: Output, failure: Path) -> dict[str, str]:
    """Return the environment of a rank that is a new interpreter or program, with its settings as variables."""
    record = {} if output.record is None else record_variables(environ, output.record)
    return {**environ, **record, "TORCHELASTIC_ERROR_FILE": str(failure.with_suffix(".record.json"))}


class PlainStarter:
    """Starts every rank as a child process; for systems other than Linux, on which forking is not supported."""

    lost = ""

    def start_rank(
        self, rank: int, target: Target, environ: Mapping[str, str], *, output: Output, failure: Path
    ) -> RankProcess:
        """Start one rank as a child process."""
        environ = _new_process_environment(environ, output, failure)
        return start_program(rank, target.argv(), environ, stdout=output.stdout, stderr=output.stderr)

    def start_store(self, listener: socket.socket) -> RankProcess:
        """Start a process that serves the store; it imports torch at the same time as the ranks."""
        descriptor = listener.fileno()
        arguments = [STORE_ARGUMENT, str(descriptor), str(os.getpid())]
        argv = [sys.executable, "-m", "shardwise.launcher.local.fork_parent", *arguments]
        popen = subprocess.Popen(argv, pass_fds=[descriptor], process_group=0)
        return RankProcess(STORE, popen.pid, popen)

    def start_rendezvous(self, order: StartRendezvous, answer: socket.socket) -> RankProcess:
        """Start a process that imports torch and joins the rendezvous."""
        # The key is passed in the environment, because every user of the host can read command lines.
        bare = msgspec.structs.replace(order, environ={}, key="")
        arguments = [msgspec.json.encode(bare).decode(), str(answer.fileno()), str(os.getpid())]
        argv = [sys.executable, "-m", "shardwise.launcher.nodes.rendezvous", *arguments]
        environ = {**order.environ, KEY_VARIABLE: order.key}
        popen = subprocess.Popen(argv, env=environ, pass_fds=[answer.fileno()], process_group=0)
        return RankProcess(RENDEZVOUS, popen.pid, popen)


class ForkStarter:
    """Forks ranks from one process that has imported torch: N ranks need one import, and a restart needs none."""

    def __init__(self, channel: socket.socket, parent: subprocess.Popen[bytes], *, fresh: bool = False) -> None:
        """Use the fork parent connected to `channel`; if `fresh`, it starts ranks as new interpreters."""
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
        """Start a fork parent, which imports `preload` in the background."""
        ours, theirs = socket.socketpair()
        with theirs:
            descriptor = theirs.fileno()
            argv = [sys.executable, "-m", "shardwise.launcher.local.fork_parent", str(descriptor), *preload]
            # SIGUSR1 is blocked until the fork parent ignores it, so that it is not killed during its start.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
            try:
                parent = subprocess.Popen(argv, env=dict(environ), pass_fds=[descriptor], process_group=0)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return cls(ours, parent, fresh=fresh)

    def wait_until_ready(self) -> str:
        """Wait for the imports; return the reason why forking is not safe, empty if forking is safe."""
        while self._refusal is None:
            self._wait()
        return self._refusal

    def start_rank(
        self, rank: int, target: Target, environ: Mapping[str, str], *, output: Output, failure: Path
    ) -> RankProcess:
        """Fork one rank."""
        stdout, stderr = (None if path is None else str(path) for path in (output.stdout, output.stderr))
        if self._fresh:
            environ = _new_process_environment(environ, output, failure)
        record = "" if output.record is None else str(output.record)
        order = StartRank(
            rank, target, dict(environ), stdout, stderr, str(failure), record, self._fresh, ignores_hangup()
        )
        return self._request(rank, order)

    def start_store(self, listener: socket.socket) -> RankProcess:
        """Fork the server of one attempt's store."""
        host, port = listener.getsockname()[:2]
        return self._request(STORE, StartStore(port, host), [listener.fileno()])

    def start_rendezvous(self, order: StartRendezvous, answer: socket.socket) -> RankProcess:
        """Fork a process that joins the rendezvous."""
        return self._request(RENDEZVOUS, order, [answer.fileno()])

    def returncode(self, pid: int) -> int | None:
        """Return the exit code of a child of the fork parent; None while it runs."""
        self._read_reports()
        return self._ended.get(pid, -signal.SIGKILL if self._gone else None)  # its children die with it

    @property
    def lost(self) -> str:
        """Description of how the fork parent, and with it all ranks, exited; empty while it runs."""
        self._read_reports()
        if not self._gone:
            return ""
        return f"the fork parent of the ranks (pid {self._parent.pid}) ended with {describe_exit(self._parent.wait())}"

    def close(self) -> None:
        """Terminate the fork parent and all processes that it started."""
        deadline = time.monotonic() + _END_S
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        while not self._gone and time.monotonic() < deadline:  # it disconnects after its children have exited
            self._pump(deadline - time.monotonic())
        if not self._gone:
            self._parent.kill()
        self._channel.close()
        self._parent.wait()
        if self._listener_folder:
            remove_listener_folder(self._listener_folder)  # not done by a fork parent that was killed

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _request(self, rank: int, order: Order, descriptors: Sequence[int] = ()) -> RankProcess:
        self._started.pop(rank, None)
        self._channel.send(order, descriptors)
        while rank not in self._started:
            self._wait()
        return _ForkedProcess(rank, self._started[rank], self)

    def _wait(self) -> None:
        """Wait for the next report; raise LaunchError if none arrives or the fork parent exited."""
        if not self._pump(_READY_S):
            raise LaunchError(
                f"the fork parent did not respond within {_READY_S} s",
                code="launch.fork-parent-timeout",
                fix="pass --start-method spawn",
            )
        if self._gone:
            raise LaunchError(
                self.lost, code="launch.fork-parent-lost", fix="check its output above, or pass --start-method spawn"
            )

    def _read_reports(self) -> None:
        """Process the reports that have arrived."""
        if not self._gone:
            self._pump(0)

    def _pump(self, timeout_s: float) -> bool:
        """Wait for reports or the exit of the fork parent and process them; return False after the timeout."""
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
    """A child of the fork parent, which reports its exit code."""

    def __init__(self, rank: int, pid: int, starter: ForkStarter) -> None:
        super().__init__(rank, pid)
        self._starter = starter

    def poll(self) -> int | None:
        """Return the exit code that the fork parent reported; None while the process runs."""
        return self._starter.returncode(self.pid)
