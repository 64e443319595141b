"""Watching processes from outside: waiting for what they do, and finding those that are left."""

import contextlib
import os
import time
from pathlib import Path


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
