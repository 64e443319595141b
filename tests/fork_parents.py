"""Launchers whose fork parent is a fork of the test process: it has imported torch, which takes a fresh one 3 s of CPU.

The tests of `launch` in `e2e/test_launch.py` start launchers as programs, so the fork parent that users get runs there.
"""

import atexit
import contextlib
import importlib
import logging
import os
import signal
import socket
import sys
import threading

from shardwise.launcher.local import fork_parent
from shardwise.launcher.local.starters import ForkStarter
from shardwise.runner.local import PRELOAD


class ForkedProcess:
    """A fork of this process with the methods of subprocess.Popen that ForkStarter calls."""

    def __init__(self, pid):
        self.pid = pid
        self._returncode = None

    def wait(self):
        """Wait for its end and return its exit code."""
        if self._returncode is None:
            self._returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._returncode

    def kill(self):
        """Send it SIGKILL unless its end has been waited for."""
        if self._returncode is None:
            os.kill(self.pid, signal.SIGKILL)


def import_for_ranks():
    """Import what a fork parent and its ranks otherwise import in every launch."""
    for name in (*PRELOAD, "shardwise.worker", "shardwise.runner.train", "shardwise.training.loop"):
        importlib.import_module(name)


def start_by_fork(environ, preload, *, fresh=False):
    """Start the fork parent of a launch as a fork of this process; the signature is that of ForkStarter.start."""
    ours, theirs = socket.socketpair()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])  # as ForkStarter.start does
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _run_fork_parent(theirs.fileno(), environ, preload)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    theirs.close()
    with contextlib.suppress(PermissionError, ProcessLookupError):
        os.setpgid(pid, pid)  # the child does it too: whichever comes first
    return ForkStarter(ours, ForkedProcess(pid), fresh=fresh)


def _remove_log_handlers():
    """Remove pytest's handlers: their log file is closed, and the next file that is opened has its descriptor."""
    loggers = [logging.root, *(each for each in logging.root.manager.loggerDict.values() if hasattr(each, "handlers"))]
    for logger in loggers:
        logger.handlers = [each for each in logger.handlers if not type(each).__module__.startswith("_pytest")]


def _run_fork_parent(descriptor, environ, preload):
    """Serve as a fork parent until the launcher ends, or, in a fork of it, as one of its ranks; never return."""
    code = 1
    try:
        os.setpgid(0, 0)
        os.closerange(3, descriptor)  # the launcher's end of the socket, above all: its closing is the end
        os.closerange(descriptor + 1, os.sysconf("SC_OPEN_MAX"))
        atexit._clear()  # handlers of the test process
        _remove_log_handlers()
        os.environ.clear()
        os.environ.update(environ)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))  # not pytest's
        sys.argv = [fork_parent.__file__, str(descriptor), *preload]
        fork_parent.main()()
        code = 0
    except SystemExit as end:
        code = _exit_code(end)
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _exit_code(end):
    """Return the exit code of an interpreter that ends by this SystemExit, and print its message as Python does."""
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code & 0xFF
    sys.stderr.write(f"{end.code}\n")
    return 1
