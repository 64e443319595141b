"""What the kernel says of a process: the walls around it, and the limits it lives under (Linux)."""

from __future__ import annotations

import contextlib
import os
import re
import resource
from pathlib import Path

_NAMESPACES = ("user", "pid", "net", "mnt", "uts", "ipc", "cgroup", "time")
_RIGHTS = ("Uid", "Gid", "Groups", "NoNewPrivs", "Seccomp", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")


def walls(pid: int) -> dict[str, object]:
    """Return what confines a process and cannot be handed on: namespaces, root, cgroup, rights; OSError if unseen."""
    proc = Path(f"/proc/{pid}")
    found: dict[str, object] = {
        f"{name} namespace": (proc / "ns" / name).readlink()
        for name in _NAMESPACES
        if Path(f"/proc/self/ns/{name}").exists()
    }
    root = (proc / "root").stat()
    found["root folder"] = (root.st_dev, root.st_ino)
    found["cgroup"] = (proc / "cgroup").read_text()
    status = _status(pid)
    found.update({f"{name} of /proc/PID/status": status.get(name) for name in _RIGHTS})
    with contextlib.suppress(OSError):  # no security module
        found["security label"] = (proc / "attr" / "current").read_text()
    return found


def other_wall(pid: int) -> str:
    """Return which wall around process `pid` is not around this one; empty when they live in the same place."""
    try:
        theirs = walls(pid)
    except OSError as error:
        return f"sight ({error.strerror})"
    ours = walls(os.getpid())
    return next((name for name in ours if ours[name] != theirs.get(name)), "")


def live_as(pid: int) -> None:
    """Take over what a child of process `pid` would have got from it: folder, umask, limits, cores, priority."""
    for name, number in vars(resource).items():
        if name.startswith("RLIMIT_"):
            resource.setrlimit(number, resource.prlimit(pid, number))
    os.sched_setaffinity(0, os.sched_getaffinity(pid))
    os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, pid))
    Path("/proc/self/oom_score_adj").write_text(Path(f"/proc/{pid}/oom_score_adj").read_text())
    os.umask(int(_status(pid)["Umask"], 8))
    os.chdir(f"/proc/{pid}/cwd")


def _status(pid: int) -> dict[str, str]:
    return dict(re.findall(r"^(\w+):[ \t]*(.*)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE))
