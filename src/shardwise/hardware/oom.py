"""How often the kernel has killed a process of this cgroup because memory ran out."""

from __future__ import annotations

import re
from pathlib import Path


def oom_kills() -> int | None:
    """Return the kernel's count for the cgroup of this process (v2 or v1), None where it keeps none."""
    for path in _counters(Path("/proc/self/cgroup").read_text() if Path("/proc/self/cgroup").exists() else ""):
        try:
            match = re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE)
        except OSError:
            continue
        if match is not None:
            return int(match[1])
    return None


def _counters(memberships: str) -> list[Path]:
    """Where the count may be: lines are ID:CONTROLLERS:PATH, the controllers empty in v2."""
    root, found = Path("/sys/fs/cgroup"), []
    for line in memberships.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            found += [root / path.lstrip("/") / "memory.events", root / "unified" / path.lstrip("/") / "memory.events"]
        elif "memory" in controllers.split(","):
            found.append(root / "memory" / path.lstrip("/") / "memory.oom_control")
    return found
