"""Processes of the ranks of one host, and the messages between their supervisor and the fork parent."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import struct
import subprocess
import sys
import time
import traceback
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from shardwise.environment import cache_directory
from shardwise.launcher.local.target import (
    Module,  # noqa: TC001 - read at run time by msgspec
    Program,  # noqa: TC001 - read at run time by msgspec
    Script,  # noqa: TC001 - read at run time by msgspec
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36


class RankProcess:
    """The process of one rank, which leads a Unix process group, and its exit code."""

    def __init__(self, rank: int, pid: int, popen: subprocess.Popen[bytes] | None = None) -> None:
        self.rank = rank
        self.pid = pid
        self._popen = popen
        self._returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the process runs."""
        if self._popen is not None:
            return self._popen.poll()
        if self._returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._returncode = os.waitstatus_to_exitcode(status)
        return self._returncode

    def end(self) -> None:
        """Kill the rank and its process group, and wait until it has exited."""
        self.signal(signal.SIGKILL)
        while self.poll() is None:
            time.sleep(0.001)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the rank and its process group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)


def start_program(
    rank: int, argv: Sequence[str], environ: Mapping[str, str], *, stdout: Path | None, stderr: Path | None
) -> RankProcess:
    """Start a program as one rank in a new Unix process group; append output to files, or use the terminal if None."""
    with contextlib.ExitStack() as files:
        out, err = (None if path is None else files.enter_context(path.open("ab")) for path in (stdout, stderr))
        popen = subprocess.Popen(
            list(argv),
            env=dict(environ),
            stdin=None if out is None else subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            process_group=0,
            preexec_fn=partial(die_with_parent, os.getpid()),  # noqa: PLW1509 - the supervisor has one thread
        )
    return RankProcess(rank, popen.pid, popen)


def start_fork(rank: int, body: Callable[[], int]) -> RankProcess:
    """Fork this process; the child runs `body()` and exits with the code that it returns."""
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        with contextlib.suppress(PermissionError, ProcessLookupError):
            os.setpgid(pid, pid)  # in parent and child, because either may run first
        return RankProcess(rank, pid)
    code = 1
    try:
        os.setpgid(0, 0)
        die_with_parent(parent)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        if not ignores_hangup():
            signal.signal(signal.SIGHUP, signal.SIG_DFL)
        code = body()
    except BaseException:  # noqa: BLE001 - the child must not return to the caller's stack
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def ignores_hangup() -> bool:
    """Return whether this process ignores SIGHUP, as under nohup; child processes inherit this setting."""
    return signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def ignore_stop_signals() -> None:
    """Ignore stop signals, which SLURM sends to every process of a step; the supervisor handles them."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])


def die_with_parent(parent_pid: int) -> None:
    """Request that the kernel kill this process when its parent exits (Linux only)."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # the parent exited before prctl
        os._exit(1)


def set_title(name: str, rank: int) -> None:
    """Show this process as `NAME [rank N]` in ps, py-spy and nvidia-smi, and as `rankN NAME` in top (Linux only).

    ps reads a command line from the memory of the process's arguments, which this function overwrites.
    """
    if not sys.platform.startswith("linux"):
        return
    title = f"{name} [rank {rank}]".encode(errors="replace")
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end in proc(5); 0 if not permitted
        if start and len(Path("/proc/self/cmdline").read_bytes()) == end - start > len(title):
            ctypes.memmove(start, title.ljust(end - start, b"\0"), end - start)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_NAME, f"rank{rank} {name}".encode(errors="replace")[:15])


def become_reaper() -> None:
    """Make this process the subreaper of its descendants, so that it can find and kill orphans (Linux only)."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def kill_descendants() -> None:
    """Kill all descendants of this process, repeatedly until none remains (Linux only)."""
    if not sys.platform.startswith("linux"):
        return
    quiet = 0
    while quiet < 2:  # two scans without a process, because one may change its parent during a scan
        pids = _descendants(os.getpid())
        quiet = 0 if pids else quiet + 1
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.005)


def _descendants(pid: int) -> list[int]:
    """Return the pids of running descendants from /proc, without zombies."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            state, parent, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
            if state != "Z":
                children.setdefault(int(parent), []).append(int(entry.name))
    found, waiting = [], [pid]
    while waiting:
        mine = children.get(waiting.pop(), [])
        found += mine
        waiting += mine
    return found


# The compile cache, so that the second run of a job compiles nothing.


CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
"""Variable with torch's cache directory of compiled graphs and kernels, which all ranks of a host share. The default is
in /tmp, which is cleared at a reboot and on some clusters."""
_ELF = struct.Struct("<4s36xQ10xHH2x")
"""The ELF magic, and the offset, entry size and number of entries of the section table at the end of the file."""
_LINKED_S = 60.0
"""Seconds after the last modification of a library during which a linker may still be writing it."""


def compile_cache(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variable that sets torch's compile cache to a folder in the user's cache directory.

    Empty if the user has set it or the folder is not writable. Truncated libraries, left by a run that was killed
    while it linked them, are removed: torch would load them, and every later run would fail with "file too short".
    """
    folder = cache_directory(environ) / "compiled"
    existing = next(path for path in (folder, *folder.parents) if os.path.exists(path))  # noqa: PTH110 - Path.exists raises if a parent is not accessible
    if CACHE_VARIABLE in environ or not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        return {}
    for library in folder.glob("*/*.so") if sys.platform == "linux" else ():
        with contextlib.suppress(OSError):  # a different process removed it
            if _is_truncated(library):
                library.unlink()
    return {CACHE_VARIABLE: str(folder)}


def _is_truncated(library: Path) -> bool:
    """Return whether a library ends before its section table and was not modified within _LINKED_S seconds."""
    about = library.stat()
    if time.time() - about.st_mtime < _LINKED_S:
        return False
    with library.open("rb") as file:
        head = file.read(_ELF.size)
    if len(head) < _ELF.size:
        return True
    magic, offset, entry_bytes, entries = _ELF.unpack(head)
    return bool(magic != b"\x7fELF" or about.st_size < offset + entry_bytes * entries)


class StartRank(msgspec.Struct, frozen=True, tag="start"):
    """Request to fork one rank."""

    rank: int
    target: Script | Module | Program
    environ: dict[str, str]
    stdout: str | None
    """File to append to; None for the terminal."""
    stderr: str | None
    failure: str
    """File to which the rank writes its uncaught exception."""
    record: str = ""
    """Run directory in which the rank records its collectives; empty if it does not record."""
    fresh: bool = False
    """Whether the fork executes a new interpreter or program."""
    ignore_hangup: bool = False
    """Whether the rank ignores SIGHUP, as the launcher does under nohup."""


class StartStore(msgspec.Struct, frozen=True, tag="store"):
    """Request to fork the server of one attempt's store; its listening socket is sent with the request."""

    port: int
    host: str = "127.0.0.1"


class StartRendezvous(msgspec.Struct, frozen=True, tag="rendezvous"):
    """Request to fork a process that joins torch's rendezvous and reports on the socket sent with the request."""

    host: str
    """Host of the round's store."""
    port: int
    run_id: str
    node: int
    """Number of this node; ranks are assigned in the order of node numbers."""
    nproc: int
    least: int
    most: int
    join_s: float
    last_call_s: float
    environ: dict[str, str]
    key: str = ""
    """Key with which the nodes sign the rendezvous state."""


class Started(msgspec.Struct, frozen=True, tag="started"):
    """The report that a child was started: a rank, the store (rank -1) or a rendezvous (rank -2)."""

    rank: int
    pid: int
    listener_folder: str = ""
    """For a rank, the directory of multiprocessing's listener sockets; removed after all ranks have exited."""


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """The report that a child exited."""

    pid: int
    returncode: int
    """The exit code, or the negated number of the signal that terminated the child."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The report that the imports are done; `refusal` is the reason why forking is not safe, or empty."""

    refusal: str = ""


Order = StartRank | StartStore | StartRendezvous
Report = Started | Ended | Ready

STORE = -1
"""Rank number that represents the process of the store."""
STORE_ARGUMENT = "store"
"""First argument of `fork_parent` if it serves one attempt's store in a process that is not forked."""
KEY_VARIABLE = "SHARDWISE_RENDEZVOUS_KEY"
"""Environment variable that passes the rendezvous key to a process that is not forked."""
RENDEZVOUS = -2
"""Rank number that represents the process of a rendezvous."""


class RendezvousResult(msgspec.Struct, frozen=True, tag="result"):
    """The result of a rendezvous: the nodes that joined, in the order of their ranks, or the reason for its failure."""

    nodes: tuple[int, ...] = ()
    nprocs: tuple[int, ...] = ()
    num_local: int = 0
    """Number of ranks, of any node, that share the CPU cores of this node; more than its own with several launchers."""
    refusal: str = ""
