"""Commands in forks of the tests, and watching processes from outside: what they do, and which of them are left."""

import contextlib
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from fork_parents import import_for_ranks, start_by_fork
from shardwise.cli.main import main
from shardwise.launcher.local.starters import ForkStarter

EXAMPLES = str(Path(__file__).resolve().parents[2] / "examples")


class Command:
    """A `shardwise` command in a fork of this process, and so is its fork parent: neither imports torch (3 s)."""

    def __init__(self, folder, *arguments, environ=None, program="shardwise"):
        """Start it in `folder`; `environ` are its variables, those of this process unless given.

        `program` may also be "python", whose arguments are a script and its own, or "-c" and code.
        """
        self._arguments = (program, *arguments)
        self._output = tempfile.TemporaryDirectory()
        files = [Path(self._output.name, name) for name in ("stdout", "stderr")]
        for file in files:
            file.touch()
        self._files = files
        import_for_ranks()
        start = multiprocessing.get_context("fork").Process
        self._process = start(target=_run, args=(folder, program, arguments, environ, files))
        self._process.start()

    def send_signal(self, number):
        """Send it a signal."""
        os.kill(self._process.pid, number)

    def is_running(self):
        """Return whether it has not ended yet."""
        return self._process.exitcode is None

    def output(self):
        """Return its stdout and stderr so far."""
        return "".join(file.read_text() for file in self._files)

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


def shardwise(folder, *arguments, timeout_s=200, **environ):
    """Run a `shardwise` command to its end; `environ` are variables beside those of this process."""
    return Command(folder, *arguments, environ={**os.environ, **environ}).finish(timeout_s)


def _run(folder, program, arguments, environ, files):
    os.chdir(folder)
    for number, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), number)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
    if environ is not None:
        os.environ.clear()
        os.environ.update(environ)
    _forget_examples()
    {"shardwise": _run_shardwise, "python": _run_python}[program](arguments)


def _forget_examples():
    """Remove modules of the gallery that tests of this process imported: chapters have modules of equal names."""
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(EXAMPLES):
            del sys.modules[name]


def _run_shardwise(arguments):
    ForkStarter.start = start_by_fork
    sys.argv = ["shardwise", *arguments]
    sys.exit(main())


def _run_python(arguments):
    """Run a script, or code after -c, as a new interpreter does: PYTHONPATH hides modules that were imported before."""
    first, *others = arguments
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    for name in {file.stem for path in paths for file in Path(path).glob("*.py")}:
        for module in [module for module in sys.modules if module.partition(".")[0] == name]:
            del sys.modules[module]
    sys.argv = ["-c", *others[1:]] if first == "-c" else [first, *others]
    sys.path[:0] = ["" if first == "-c" else str(Path(first).resolve().parent), *paths]
    if first == "-c":
        exec(others[0], {"__name__": "__main__"})
    else:
        runpy.run_path(first, run_name="__main__")


def wait_for(condition, seconds=30, what=lambda: "waited too long"):
    """Return what `condition` finds, as soon as it finds something; fail with `what` after so many seconds."""
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
