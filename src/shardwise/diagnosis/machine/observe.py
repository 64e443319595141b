"""Collects facts about this machine: the driver through NVML, torch in a subprocess, the rest from /proc and /sys."""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import pynvml

from shardwise.diagnosis.machine.checks import check_machine
from shardwise.diagnosis.machine.facts import (
    Clock,
    Cpu,
    Disk,
    Driver,
    GpuFacts,
    HostMemory,
    Interface,
    Machine,
    Network,
    ProcessLimits,
    RdmaDevice,
    Torch,
)
from shardwise.diagnosis.verdicts import VerdictReport
from shardwise.environment import variables, visible_cuda_devices
from shardwise.hardware import available_memory
from shardwise.hardware.probe import cgroup_quota, select_visible
from shardwise.launcher.nodes.network import own_addresses
from shardwise.spec import Spec, spec_function

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


_TORCH_TIMEOUT_S = 120.0
"""Time limit of `import torch`, which may take a minute from a cold disk."""
_PROBE_BYTES = 4 << 20
_TIME_ERROR = 5
"""Return value of adjtimex if the clock is not synchronized."""
_TORCH_PROBE = """
import json, warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import torch, torch.distributed as dist
    usable = torch.cuda.is_available()
nccl = torch.cuda.nccl.version() if dist.is_available() and dist.is_nccl_available() else ()
print(json.dumps({
    "version": torch.__version__, "cuda": torch.version.cuda or "", "nccl": ".".join(map(str, nccl)),
    "gloo": dist.is_available() and dist.is_gloo_available(),
    "num_gpus": torch.cuda.device_count() if usable else 0,
    "cuda_error": next((str(w.message).splitlines()[0] for w in caught if "CUDA" in str(w.message)), ""),
}))
"""


class MachineSpec(Spec, frozen=True, kw_only=True):
    """The request of `shardwise doctor`, which has no options."""


class MachineReport(VerdictReport, frozen=True, kw_only=True):
    """The report of `shardwise doctor`."""

    facts: Machine


@spec_function(MachineSpec)
def doctor(_spec: MachineSpec) -> MachineReport:
    """Check this machine: GPUs, torch, NCCL, interfaces, memory, limits, cores, disk, clock."""
    facts = observe_machine()
    return MachineReport(facts=facts, verdicts=tuple(check_machine(facts)))


def observe_machine() -> Machine:
    """Return the facts about this machine. Starts a process that imports torch, and writes a small file."""
    driver, gpus, hidden = observe_gpus()
    directory = Path.cwd()
    return Machine(
        gpus=gpus,
        hidden_gpus=hidden,
        driver=driver,
        torch=observe_torch(),
        network=observe_network(),
        limits=observe_limits(),
        memory=observe_memory(),
        cpu=observe_cpu(),
        disk=observe_disk(directory),
        clock=observe_clock(directory),
    )


def observe_gpus() -> tuple[Driver, tuple[GpuFacts, ...], int]:
    """Return the driver, the visible GPUs, and the number of hidden GPUs, without initializing CUDA."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        if isinstance(error, pynvml.NVMLError_LibraryNotFound | pynvml.NVMLError_DriverNotLoaded):
            return Driver(), (), 0
        return Driver(error=str(error)), (), 0
    try:
        cuda = pynvml.nvmlSystemGetCudaDriverVersion_v2()
        driver = Driver(version=_text(pynvml.nvmlSystemGetDriverVersion()), cuda=(cuda // 1000, cuda % 1000 // 10))
        handles = list(map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount())))
        uuids = tuple(_text(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles)
        visible = select_visible(uuids, visible_cuda_devices())
        return driver, tuple(_gpu(handles[index]) for index in visible), len(handles) - len(visible)
    except pynvml.NVMLError as error:
        return Driver(error=str(error)), (), 0
    finally:
        pynvml.nvmlShutdown()


def _gpu(handle: Any) -> GpuFacts:
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return GpuFacts(
        name=_text(pynvml.nvmlDeviceGetName(handle)), total_bytes=int(memory.total), used_bytes=int(memory.used)
    )


def _text(given: str | bytes) -> str:
    return given.decode() if isinstance(given, bytes) else given


def observe_torch() -> Torch:
    """Return the versions of torch, CUDA and NCCL from a subprocess that imports torch; the import may crash."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _TORCH_PROBE], capture_output=True, text=True, timeout=_TORCH_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return Torch(error=f"the import took more than {_TORCH_TIMEOUT_S:.0f} s")
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        return Torch(error=lines[-1] if lines else f"the import exited with {done.returncode}")
    return Torch(**json.loads(done.stdout.splitlines()[-1]))


def observe_limits() -> ProcessLimits:
    """Return the soft limits of this process."""

    def soft(which: int) -> int | None:
        value = resource.getrlimit(which)[0]
        return None if value == resource.RLIM_INFINITY else value

    return ProcessLimits(
        nofile=soft(resource.RLIMIT_NOFILE),
        memlock_bytes=soft(resource.RLIMIT_MEMLOCK),
        nproc=soft(resource.RLIMIT_NPROC),
    )


def observe_memory(shm: Path = Path("/dev/shm")) -> HostMemory:  # noqa: S108 - read, not written
    """Return the host memory and the shared memory, which is 0 without /dev/shm."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    usage = shutil.disk_usage(shm) if shm.is_dir() else (0, 0, 0)
    return HostMemory(
        total_bytes=total,
        available_bytes=min(total, available_memory()),
        shm_total_bytes=usage[0],
        shm_free_bytes=usage[2],
    )


def observe_cpu() -> Cpu:
    """Return the cores, the CPU affinity, the cgroup quota and the NUMA nodes."""
    membership = Path("/proc/self/cgroup")
    nodes = sorted(Path("/sys/devices/system/node").glob("node[0-9]*/cpulist"), key=lambda path: path.parts[-2])
    cores = os.cpu_count() or 1
    allowed = set(range(cores))
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        allowed = os.sched_getaffinity(0)
    return Cpu(
        cores=cores,
        allowed=tuple(sorted(allowed)),
        quota=cgroup_quota(Path("/sys/fs/cgroup"), membership.read_text() if membership.exists() else ""),
        nodes=tuple(read_cpulist(path.read_text()) for path in nodes),
    )


def read_cpulist(text: str) -> tuple[int, ...]:
    """Parse a list of cores in the kernel's format, such as 0-3,8."""
    cores: list[int] = []
    for low, high in re.findall(r"(\d+)(?:-(\d+))?", text):
        cores += range(int(low), int(high or low) + 1)
    return tuple(cores)


def observe_disk(folder: Path) -> Disk:
    """Return the capacity and the write rate of a directory, measured with a temporary file."""
    usage = shutil.disk_usage(folder)
    disk = Disk(path=str(folder), total_bytes=usage.total, free_bytes=usage.free)
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".shardwise-doctor-") as file:
            start = time.perf_counter()
            file.write(os.urandom(_PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
            rate = _PROBE_BYTES / (time.perf_counter() - start)
    except OSError as error:
        return msgspec.structs.replace(disk, error=error.strerror or str(error))
    return msgspec.structs.replace(disk, write_bytes_s=rate)


def observe_clock(folder: Path) -> Clock:
    """Return the time, whether the clock is synchronized, and the timestamp skew of a new file in `folder`."""
    skew = 0.0
    with contextlib.suppress(OSError), tempfile.NamedTemporaryFile(dir=folder, prefix=".shardwise-doctor-") as file:
        skew = Path(file.name).stat().st_mtime - time.time()
    return Clock(
        now=time.time(),
        newest_file=max(path.stat().st_mtime for path in Path(__file__).parent.iterdir()),
        synchronised=_is_synchronised(),
        disk_skew_s=skew,
    )


def _is_synchronised() -> bool | None:
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(512)  # struct timex has 208 bytes; zero modes only query
    state = library.adjtimex(buffer)
    return None if state < 0 else state != _TIME_ERROR


# Facts about the network: interfaces, RDMA devices, NCCL plugins, name resolution in both directions.


T = TypeVar("T")

_UP, _LOOPBACK = 0x1, 0x8
"""Flags of an interface (net/if.h)."""
_LOOKUP_TIMEOUT_S = 5.0
"""Time limit of a query to the resolver."""
_PLUGIN_FOLDERS = ("/opt/amazon/ofi-nccl/lib", "/opt/amazon/ofi-nccl/lib64", "/opt/aws-ofi-nccl/lib", "/usr/lib")


def observe_network() -> Network:
    """Return the interfaces of this machine and the addresses of its name. Queries the resolver."""
    name = socket.gethostname()
    unresolved: tuple[str, ...] = ()
    addresses = _resolve(lambda: _addresses_of(name), unresolved)
    back = _resolve(lambda: socket.gethostbyaddr(addresses[0])[0], "") if addresses else ""
    return Network(
        interfaces=observe_interfaces(),
        rdma=tuple(observe_rdma()),
        net_plugins=tuple(_plugins()),
        hostname=name,
        addresses=addresses,
        back_name=back,
    )


def observe_interfaces(root: Path = Path("/sys/class/net")) -> tuple[Interface, ...]:
    """Return all network interfaces with their state and addresses."""
    ipv4, ipv6 = own_addresses(), _ipv6_addresses()
    interfaces = []
    for _, name in socket.if_nameindex():
        flags = int(_read(root / name / "flags") or "0", 16)
        addresses = ipv6.get(name, ())
        if name in ipv4:
            addresses = (ipv4[name], *addresses)
        mtu = int(_read(root / name / "mtu") or "0")
        interfaces.append(
            Interface(name=name, up=bool(flags & _UP), loopback=bool(flags & _LOOPBACK), mtu=mtu, addresses=addresses)
        )
    return tuple(interfaces)


def observe_rdma(root: Path = Path("/sys/class/infiniband")) -> Iterator[RdmaDevice]:
    """Yield all RDMA devices: InfiniBand and RoCE cards, and AWS EFA."""
    if not root.is_dir():
        return
    for device in sorted(root.iterdir()):
        states = map(_read, device.glob("ports/*/state"))
        driver = device / "device" / "driver"
        yield RdmaDevice(
            name=device.name,
            driver=driver.resolve().name if driver.exists() else "",
            active=any("ACTIVE" in state for state in states),
        )


def _plugins() -> Iterator[str]:
    """Yield the network plugins that NCCL can load, from LD_LIBRARY_PATH and the directories that AWS uses."""
    named = variables("LD_LIBRARY_PATH").get("LD_LIBRARY_PATH", "").split(":")
    for folder in dict.fromkeys([*filter(None, named), *_PLUGIN_FOLDERS]):
        with contextlib.suppress(OSError):
            yield from map(str, sorted(Path(folder).glob("libnccl-net*.so")))


def _ipv6_addresses() -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for line in _read(Path("/proc/net/if_inet6")).splitlines():
        digits, *_, name = line.split()
        address = ipaddress.IPv6Address(int(digits, 16))
        if not address.is_link_local:
            found[name] = (*found.get(name, ()), str(address))
    return found


def _addresses_of(name: str) -> tuple[str, ...]:
    entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in entries))


def _resolve(query: Callable[[], T], default: T) -> T:
    """Return the result of a resolver query, or `default` if it fails or exceeds the time limit."""
    results: list[T] = []

    def run() -> None:
        with contextlib.suppress(OSError, UnicodeError):
            results.append(query())

    thread = threading.Thread(target=run, daemon=True)  # a query that never returns must not block the exit
    thread.start()
    thread.join(_LOOKUP_TIMEOUT_S)
    return results[0] if results else default


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
