"""Two ways to start ranks: forked from one warm parent, or each as a fresh process."""

from __future__ import annotations

import array
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

import msgspec

from shardwise.errors import LaunchError
from shardwise.launch.orders import STORE, Ended, Ready, Report, Started, StartRank, StartStore
from shardwise.launch.processes import RankProcess, start_program

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path
    from types import TracebackType

    from shardwise.launch.target import Target

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


@dataclass(frozen=True, kw_only=True)
class Output:
    """Where a rank's output goes; None is the terminal."""

    stdout: Path | None
    stderr: Path | None


class PlainStarter:
    """Every rank is a process started from here: for systems other than Linux, which lack what forking needs."""

    def start_rank(
        self, rank: int, target: Target, environ: Mapping[str, str], *, output: Output, failure: Path
    ) -> RankProcess:
        """Start one rank as its own process."""
        extra = {"TORCHELASTIC_ERROR_FILE": str(failure.with_suffix(".record.json"))}
        return start_program(rank, target.argv(), {**environ, **extra}, stdout=output.stdout, stderr=output.stderr)

    def start_store(self, listener: socket.socket) -> RankProcess:
        """Start a process that serves the store; it imports torch while the ranks do."""
        descriptor = listener.fileno()
        argv = [sys.executable, "-m", "shardwise.launch.store_process", str(descriptor), str(os.getpid())]
        popen = subprocess.Popen(argv, pass_fds=[descriptor], process_group=0)
        return RankProcess(STORE, popen.pid, popen)


class ForkStarter:
    """Ranks are forks of one process that has imported torch: N ranks cost one import, a restart costs none."""

    def __init__(self, environ: Mapping[str, str], preload: Sequence[str], *, fresh: bool = False) -> None:
        """Start the fork parent; it imports while this process goes on. `fresh` ranks are only started by it."""
        self._channel, theirs = socket.socketpair()
        descriptor = theirs.fileno()
        argv = [sys.executable, "-m", "shardwise.launch.fork_parent", str(descriptor), *preload]
        self._parent = subprocess.Popen(argv, env=dict(environ), pass_fds=[descriptor], process_group=0)
        theirs.close()
        self._buffer = b""
        self._fresh = fresh
        self._decoder = msgspec.json.Decoder(Report)
        self._ended: dict[int, int] = {}
        self._started: dict[int, int] = {}
        self._refusal: str | None = None

    def wait_until_ready(self) -> str:
        """Wait for the imports; return why forking is not safe here, empty when it is."""
        while self._refusal is None:
            self._pump(_READY_S)
        return self._refusal

    def start_rank(
        self, rank: int, target: Target, environ: Mapping[str, str], *, output: Output, failure: Path
    ) -> RankProcess:
        """Order one rank."""
        stdout, stderr = (None if path is None else str(path) for path in (output.stdout, output.stderr))
        extra = {"TORCHELASTIC_ERROR_FILE": str(failure.with_suffix(".record.json"))} if self._fresh else {}
        order = StartRank(rank, target, {**environ, **extra}, stdout, stderr, str(failure), self._fresh)
        return self._order(rank, order)

    def start_store(self, listener: socket.socket) -> RankProcess:
        """Order the server of one attempt's store."""
        return self._order(STORE, StartStore(listener.getsockname()[1]), listener.fileno())

    def returncode(self, pid: int) -> int | None:
        """Return how a child of the fork parent ended, None while it runs."""
        while self._pump(0):
            pass
        if self._parent.poll() is not None:
            return self._ended.get(pid, -signal.SIGKILL)  # it took its children with it
        return self._ended.get(pid)

    def close(self) -> None:
        """End the fork parent, and with it everything it started."""
        self._channel.close()
        try:
            self._parent.wait(_END_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._parent.pid, signal.SIGKILL)
            self._parent.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _order(self, rank: int, order: StartRank | StartStore, descriptor: int | None = None) -> RankProcess:
        data = msgspec.json.encode(order) + b"\n"
        rights = (
            [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))] if descriptor is not None else []
        )
        self._started.pop(rank, None)
        sent = self._channel.sendmsg([data], rights)
        self._channel.sendall(data[sent:])
        while rank not in self._started:
            self._pump(_READY_S)
        return _ForkedProcess(rank, self._started[rank], self)

    def _pump(self, timeout_s: float) -> bool:
        """Take in reports; return whether there were any within the time."""
        self._channel.settimeout(timeout_s)
        try:
            data = self._channel.recv(1 << 20)
        except (BlockingIOError, TimeoutError):
            if timeout_s:
                raise LaunchError("the fork parent does not answer", fix="try --start-method spawn") from None
            return False
        except ConnectionError:
            data = b""
        if not data:
            if timeout_s:
                raise LaunchError(
                    f"the fork parent ended with {self._parent.wait()}",
                    fix="see its words above, or --start-method spawn",
                )
            return False
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            match self._decoder.decode(line):
                case Ready(refusal):
                    self._refusal = refusal
                case Started(rank, pid):
                    self._started[rank] = pid
                case Ended(pid, returncode):
                    self._ended[pid] = returncode
        return True


class _ForkedProcess(RankProcess):
    """A child of the fork parent, which reaps it and reports."""

    def __init__(self, rank: int, pid: int, starter: ForkStarter) -> None:
        super().__init__(rank, pid)
        self._starter = starter

    def poll(self) -> int | None:
        """Return the exit code once the fork parent reported it."""
        return self._starter.returncode(self.pid)
