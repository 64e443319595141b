"""How much host memory this process may still take: the kernel's estimate, and its cgroup's limit."""

from __future__ import annotations

import re
from pathlib import Path

_PAIRS = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
"""Limit and use, in cgroup v2 and v1."""


def available_memory(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Return bytes that can be allocated before something is swapped out or killed."""
    match = re.search(r"^MemAvailable:\s+(\d+) kB$", _read(Path("/proc/meminfo")), re.MULTILINE)
    free = [int(match[1]) * 1024] if match else []
    for line in _read(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        for base in (root, root / "memory"):
            if controllers in {"", "memory"}:
                free += [room for folder in _upward(base, path) for room in _room(folder)]
    return min(free, default=1 << 62)


def _upward(base: Path, path: str) -> list[Path]:
    """Return the folder of a group and of all above it, whose limits hold too."""
    folder = base / path.lstrip("/")
    return [folder, *(parent for parent in folder.parents if parent.is_relative_to(base))]


def _room(folder: Path) -> list[int]:
    """Return what is left below the limit in one folder, if it has one."""
    pairs = [(_read(folder / limit).strip(), _read(folder / used).strip()) for limit, used in _PAIRS]
    return [int(limit) - int(used) for limit, used in pairs if limit.isdigit() and used.isdigit()]


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
