"""Probing this machine: GPUs through NVML without touching CUDA, cores, host memory and out-of-memory kills."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pynvml

from shardwise.environment import visible_cuda_devices

if TYPE_CHECKING:
    from collections.abc import Iterator


_CGROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU as the driver describes it."""

    index: int
    """Its index in NVML, which is that of the PCI bus, whatever CUDA_VISIBLE_DEVICES is."""
    name: str
    memory_bytes: int
    compute_capability: tuple[int, int]

    @property
    def has_bf16(self) -> bool:
        """Whether bf16 runs in hardware: Ampere and newer."""
        return self.compute_capability >= (8, 0)


def probe_gpus() -> tuple[Gpu, ...]:
    """Return the GPUs that CUDA would see, in its order, without starting CUDA; none without a driver.

    Slices of a GPU (MIG) are not listed.
    """
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        count = pynvml.nvmlDeviceGetCount()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
        uuids = tuple(pynvml.nvmlDeviceGetUUID(handle) for handle in handles)
        return tuple(_describe(index, handles[index]) for index in select_visible(uuids, visible_cuda_devices()))
    finally:
        pynvml.nvmlShutdown()


def select_visible(uuids: tuple[str, ...], visible: tuple[str, ...] | None) -> tuple[int, ...]:
    """Return the indices into `uuids` that `visible` names by index or by the start of a UUID, in its order."""
    if visible is None:
        return tuple(range(len(uuids)))
    chosen = []
    for entry in visible:
        if entry.isdecimal():
            matches = [int(entry)] if int(entry) < len(uuids) else []
        else:
            matches = [index for index, uuid in enumerate(uuids) if uuid.startswith(entry)]
        if len(matches) != 1:
            break  # CUDA, too, ignores everything from the first entry that names no single device
        chosen.append(matches[0])
    return tuple(chosen)


def usable_cores() -> int:
    """Return how many cores this process may keep busy: affinity, limited by the cgroup's quota; at least 1."""
    # macOS has no affinity.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    membership = _MEMBERSHIP.read_text() if _MEMBERSHIP.exists() else ""
    quota = cgroup_quota(_CGROUPS, membership)
    return cores if quota is None else max(1, min(cores, int(quota)))


def cgroup_quota(root: Path, membership: str) -> float | None:
    """Return the smallest CPU quota, in cores, on the way from this process's cgroup to the root.

    `membership` is the text of /proc/self/cgroup; both versions of cgroups are read.
    """
    quotas = [quota for folder in _cgroup_folders(root, membership) for quota in _quotas(folder)]
    return min(quotas, default=None)


def _cgroup_folders(root: Path, membership: str) -> Iterator[Path]:
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = root / controllers if controllers else root
        # A container sees its own group as the root, yet may be given the host's path: folders that
        # are not there are passed over.
        here = top / path.lstrip("/")
        yield here
        while here != top:
            here = here.parent
            yield here


def _quotas(folder: Path) -> Iterator[float]:
    fields = _read(folder / "cpu.max").split()
    if len(fields) == 2 and fields[0] != "max":
        yield int(fields[0]) / int(fields[1])
    quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
    if quota and period and int(quota) > 0:
        yield int(quota) / int(period)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _describe(index: int, handle: Any) -> Gpu:
    return Gpu(
        index=index,
        name=pynvml.nvmlDeviceGetName(handle),
        memory_bytes=int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
        compute_capability=tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handle)),
    )


# How much host memory this process may still take: the kernel's estimate, and its cgroup's limit.


_PAIRS = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
"""Limit and use, in cgroup v2 and v1."""


def available_memory(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Return bytes that can be allocated before something is swapped out or killed."""
    match = re.search(r"^MemAvailable:\s+(\d+) kB$", _read_limit(Path("/proc/meminfo")), re.MULTILINE)
    free = [int(match[1]) * 1024] if match else []
    for line in _read_limit(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        for base in (root, root / "memory"):
            if controllers in {"", "memory"}:
                free += [room for folder in _upward(base, path) for room in _available(folder)]
    return min(free, default=1 << 62)


def _upward(base: Path, path: str) -> list[Path]:
    """Return the folder of a group and of all above it, whose limits apply too."""
    folder = base / path.lstrip("/")
    return [folder, *(parent for parent in folder.parents if parent.is_relative_to(base))]


def _available(folder: Path) -> list[int]:
    """Return the memory left below the limit of one cgroup directory, in bytes; empty if it has no limit."""
    pairs = [(_read_limit(folder / limit).strip(), _read_limit(folder / used).strip()) for limit, used in _PAIRS]
    return [int(limit) - int(used) for limit, used in pairs if limit.isdigit() and used.isdigit()]


def _read_limit(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


# How often the kernel has killed a process of this cgroup because memory ran out.


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
