"""Queries this machine's GPUs (through NVML, without initializing CUDA), cores, host memory and package versions."""

from __future__ import annotations

import importlib.util
import os
import re
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pynvml

from shardwise.environment import visible_cuda_devices

if TYPE_CHECKING:
    from collections.abc import Iterator

_CGROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


BF16_CAPABILITY = (8, 0)
"""CUDA compute capability of the first GPUs with bf16 products (Ampere)."""
FLOAT8_CAPABILITY = (8, 9)
"""CUDA compute capability of the first GPUs with float8 products (Ada, Hopper)."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU as reported by the driver."""

    index: int
    """NVML index, which is in PCI bus order and independent of CUDA_VISIBLE_DEVICES."""
    name: str
    memory_bytes: int
    compute_capability: tuple[int, int]

    @property
    def has_bf16(self) -> bool:
        """Whether the hardware supports bf16 (Ampere and newer)."""
        return self.compute_capability >= BF16_CAPABILITY


def probe_gpus() -> tuple[Gpu, ...]:
    """Return the GPUs visible to CUDA in its order, without initializing CUDA; empty without a driver.

    MIG devices are not included.
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


def driver_version() -> str:
    """Return the version of the NVIDIA driver, without initializing CUDA; empty without a driver."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ""
    try:
        return str(pynvml.nvmlSystemGetDriverVersion())
    finally:
        pynvml.nvmlShutdown()


def gpu_utilization(device: int) -> int:
    """Return the percentage of the last second in which kernels ran on a GPU, by its number in CUDA; 0 if unknown."""
    try:
        index = probe_gpus()[device].index
        pynvml.nvmlInit()
    except (pynvml.NVMLError, IndexError):
        return 0
    try:
        return int(pynvml.nvmlDeviceGetUtilizationRates(pynvml.nvmlDeviceGetHandleByIndex(index)).gpu)
    except pynvml.NVMLError:  # a MIG device has no such counter
        return 0
    finally:
        pynvml.nvmlShutdown()


def select_visible(uuids: tuple[str, ...], visible: tuple[str, ...] | None) -> tuple[int, ...]:
    """Return the indices of `uuids` that CUDA_VISIBLE_DEVICES selects by index or by UUID prefix, in its order."""
    if visible is None:
        return tuple(range(len(uuids)))
    chosen = []
    for entry in visible:
        if entry.isdecimal():
            matches = [int(entry)] if int(entry) < len(uuids) else []
        else:
            matches = [index for index, uuid in enumerate(uuids) if uuid.startswith(entry)]
        if len(matches) != 1:
            break  # like CUDA, ignore all entries from the first invalid one
        chosen.append(matches[0])
    return tuple(chosen)


def usable_cores() -> int:
    """Return the number of cores that this process may use, by CPU affinity and cgroup quota; at least 1."""
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # not available on macOS
        cores = len(os.sched_getaffinity(0))
    membership = _MEMBERSHIP.read_text() if _MEMBERSHIP.exists() else ""
    quota = cgroup_quota(_CGROUPS, membership)
    if quota is None:
        return cores
    return max(1, min(cores, int(quota)))


def cgroup_quota(root: Path, membership: str) -> float | None:
    """Return the smallest CPU quota, in cores, of the cgroup of this process and its ancestors; None without a quota.

    `membership` is the content of /proc/self/cgroup. Both cgroup v1 and v2 are supported.
    """
    quotas = [quota for folder in _cgroup_folders(root, membership) for quota in _quotas(folder)]
    return min(quotas, default=None)


def _cgroup_folders(root: Path, membership: str) -> Iterator[Path]:
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = root / controllers if controllers else root
        # In a container, the mounted root is its own cgroup while the path may be the host's, so some of these
        # directories do not exist.
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


# Host memory that this process can still allocate: the kernel's estimate and the cgroup's limit.


_PAIRS = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
"""Files of the limit and the usage, in cgroup v2 and v1."""


def available_memory(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the host memory in bytes that this process can allocate without swapping or an out-of-memory kill."""
    match = re.search(r"^MemAvailable:\s+(\d+) kB$", _read_limit(Path("/proc/meminfo")), re.MULTILINE)
    free = [int(match[1]) * 1024] if match else []
    for line in _read_limit(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in {"", "memory"}:
            continue
        for base in (root, root / "memory"):
            for folder in _with_ancestors(base, path):
                free += _available(folder)
    return min(free, default=1 << 62)


def _with_ancestors(base: Path, path: str) -> list[Path]:
    """Return the directories of a cgroup and of its ancestors, whose limits apply as well."""
    folder = base / path.lstrip("/")
    return [folder, *(parent for parent in folder.parents if parent.is_relative_to(base))]


def _available(folder: Path) -> list[int]:
    """Return the bytes left below the limit of a cgroup, for each cgroup version with a limit."""
    pairs = [(_read_limit(folder / limit).strip(), _read_limit(folder / used).strip()) for limit, used in _PAIRS]
    return [int(limit) - int(used) for limit, used in pairs if limit.isdigit() and used.isdigit()]


def _read_limit(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


# Out-of-memory kills, as counted by the kernel.


def oom_kills() -> int | None:
    """Return the number of out-of-memory kills in the cgroup of this process (v2 or v1); None if it is unknown."""
    for path in _counters(_MEMBERSHIP.read_text() if _MEMBERSHIP.exists() else ""):
        try:
            match = re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE)
        except OSError:
            continue
        if match is not None:
            return int(match[1])
    return None


def _counters(memberships: str) -> list[Path]:
    """Return the files that may count kills; `memberships` has lines ID:CONTROLLERS:PATH, without controllers in v2."""
    root, found = Path("/sys/fs/cgroup"), []
    for line in memberships.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            found += [root / path.lstrip("/") / "memory.events", root / "unified" / path.lstrip("/") / "memory.events"]
        elif "memory" in controllers.split(","):
            found.append(root / "memory" / path.lstrip("/") / "memory.oom_control")
    return found


UNKNOWN = "unknown"
_PYPROJECT = Path(__file__).parents[3] / "pyproject.toml"
"""pyproject.toml of a source tree; it does not exist for an installed package."""


def package_version(name: str) -> str:
    """Return the version of a package, or "unknown", without importing the package.

    A source tree on PYTHONPATH has no metadata. Then the version of shardwise is read from pyproject.toml, and that of
    another package from its version.py, which torch has.
    """
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return _version_in_sources(name)


def _version_in_sources(name: str) -> str:
    if name == "shardwise":
        return _find(_PYPROJECT, r'^name = "shardwise"\nversion = "([^"]+)"')
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        return UNKNOWN
    return _find(Path(spec.origin).with_name("version.py"), r"^__version__ = ['\"]([^'\"]+)['\"]")


def _find(path: Path, pattern: str) -> str:
    try:
        found = re.search(pattern, path.read_text(), re.MULTILINE)
    except OSError:
        return UNKNOWN
    return found[1] if found else UNKNOWN
