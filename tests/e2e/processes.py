"""Commands in forks of the tests, and watching processes from outside: what they do, and which of them are left."""

import contextlib
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from shardwise.cli.main import main


class Command:
    """A `shardwise` command in a fork of this process: without the 3 s in which an interpreter imports torch anew."""

    def __init__(self, folder, *arguments, environ=None):
        """Start it in `folder`; `environ` are its variables, those of this process unless given."""
        self._arguments = arguments
        self._output = tempfile.TemporaryDirectory()
        files = [Path(self._output.name, name) for name in ("stdout", "stderr")]
        self._files = files
        start = multiprocessing.get_context("fork").Process
        self._process = start(target=_run, args=(folder, ["shardwise", *arguments], environ, files))
        self._process.start()

    def send_signal(self, number):
        """Send it a signal."""
        os.kill(self._process.pid, number)

    def finish(self, timeout_s=200):
        """Wait for its end; returns what subprocess.run would."""
        self._process.join(timeout_s)
        try:
            if self._process.exitcode is None:
                raise subprocess.TimeoutExpired(self._arguments, timeout_s)
            stdout, stderr = (file.read_text() for file in self._files)
            return subprocess.CompletedProcess(self._arguments, self._process.exitcode, stdout, stderr)
        finally:
            self._process.kill()
            self._output.cleanup()


def _run(folder, words, environ, files):
    os.chdir(folder)
    for number, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
    if environ is not None:
        os.environ.clear()
        os.environ.update(environ)
    sys.argv = words
    sys.exit(main())


def wait_for(condition, seconds=30, what=lambda: "waited too long"):
    """Return what `condition` finds, as soon as it finds something; say `what` went wrong after so many seconds."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, what()
        time.sleep(0.05)
    return found


def state_and_parent(pid):
    """Return the letter of a process's state, X if it is gone, and its parent's pid."""
    try:
        state, parent, *_ = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "X", 0
    return state, int(parent)


def alive(pid):
    """Whether a process runs; a zombie that nobody reaped yet does not."""
    return state_and_parent(pid)[0] not in "ZX"


def working_in(folder):
    """Every living process whose folder this is: launcher, fork parent, store, ranks, and what ranks started."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and (entry / "cwd").readlink() == folder:
                found.append(int(entry.name))
    return [pid for pid in found if pid != os.getpid() and alive(pid)]
