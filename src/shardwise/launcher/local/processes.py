"""Processes of one machine's ranks, which never outlive their launcher, and the compile cache they share."""

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

from shardwise.environment import cache_directory

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


class RankProcess:
    """One running rank: its process group, and how it ended."""

    def __init__(self, rank: int, pid: int, popen: subprocess.Popen[bytes] | None = None) -> None:
        self.rank = rank
        self.pid = pid
        self._popen = popen
        self._returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code once it ended (negative: signal), else None."""
        if self._popen is not None:
            return self._popen.poll()
        if self._returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._returncode = os.waitstatus_to_exitcode(status)
        return self._returncode

    def end(self) -> None:
        """Kill the rank and whatever it started, and wait until it is gone."""
        self.signal(signal.SIGKILL)
        while self.poll() is None:
            time.sleep(0.001)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the rank and to whatever it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)


def start_program(
    rank: int, argv: Sequence[str], environ: Mapping[str, str], *, stdout: Path | None, stderr: Path | None
) -> RankProcess:
    """Start a program as one rank in its own process group, its output appended to files; None is the terminal."""
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
    """Fork this process; the child runs `body` and exits with what it returns."""
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        with contextlib.suppress(PermissionError, ProcessLookupError):
            os.setpgid(pid, pid)  # also done by the child: whichever comes first
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
    except BaseException:  # noqa: BLE001 - the child must end here, whatever happened
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def ignores_hangup() -> bool:
    """Whether this process ignores SIGHUP, as nohup has the programs that it starts do; their children do too."""
    return signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def ignore_stop_signals() -> None:
    """Leave it to the supervisor what a signal means; SLURM sends its own to every process of a step."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent dies (Linux; elsewhere the launcher's stop is all)."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died between our start and the call above
        os._exit(1)


def become_reaper() -> None:
    """Have orphans of our descendants handed to this process, so that it can find and end them (Linux)."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def kill_descendants() -> None:
    """Kill every descendant of this process, again and again until none is left (Linux)."""
    if not sys.platform.startswith("linux"):
        return
    quiet = 0
    while quiet < 2:  # looks in a row that found none: a process may change parents while we look
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
    """Return running descendants from /proc; zombies wait for their own parent."""
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


# Where compiled graphs are kept, so that the second run of a job compiles nothing.


FOLDER = "TORCHINDUCTOR_CACHE_DIR"
"""torch keeps graphs, kernels and what autograd made of them there, for all ranks of a machine; by default in /tmp,
which is emptied by restarts, and by some clusters after every job."""
_ELF = struct.Struct("<4s36xQ10xHH2x")
"""Magic, and where the table of sections is, which is last in a file: its offset, size of an entry, entries."""
_LINKED_S = 60.0
"""A younger library may be one that is being linked."""


def compile_cache(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a rank that keep its compiled graphs with the user's other caches.

    None where the user has named a folder, or where theirs cannot be written. Libraries that a run was killed over
    while it linked them are removed: torch takes a library that is there for a whole one, and every later run would
    end with "file too short".
    """
    folder = cache_directory(environ) / "compiled"
    there = next(path for path in (folder, *folder.parents) if os.path.exists(path))  # noqa: PTH110 - Path.exists raises where a folder above may not be entered
    if FOLDER in environ or not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return {}
    for library in folder.glob("*/*.so") if sys.platform == "linux" else ():
        with contextlib.suppress(OSError):  # somebody else has removed it
            if _is_torn(library):
                library.unlink()
    return {FOLDER: str(folder)}


def _is_torn(library: Path) -> bool:
    """Whether a library ends before its last section, and nobody is writing it."""
    about = library.stat()
    if time.time() - about.st_mtime < _LINKED_S:
        return False
    with library.open("rb") as file:
        head = file.read(_ELF.size)
    if len(head) < _ELF.size:
        return True
    magic, offset, entry_bytes, entries = _ELF.unpack(head)
    return bool(magic != b"\x7fELF" or about.st_size < offset + entry_bytes * entries)
