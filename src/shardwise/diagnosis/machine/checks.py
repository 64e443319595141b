"""Checks of a machine: each returns a verdict from observed facts; pure functions."""

from __future__ import annotations

import datetime as dt
import ipaddress
import re
from collections import Counter
from typing import TYPE_CHECKING

from shardwise.diagnosis.verdicts import Verdict, fail, ok, warn
from shardwise.units import GIB, MIB, format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from shardwise.diagnosis.machine.facts import Interface, Machine, Network


# The network interfaces that gloo and NCCL select by default.


_NCCL_ORDER = ("ib", "^docker,lo,virbr", "docker", "lo", "virbr")
"""Patterns that NCCL tries in this order if NCCL_SOCKET_IFNAME is not set (src/misc/socket.cc)."""


def nccl_matches(pattern: str, names: Iterable[str]) -> list[str]:
    """Return the interfaces selected by NCCL_SOCKET_IFNAME: prefixes, `=` for exact names, `^` to exclude."""
    is_excluding = pattern.startswith("^")
    pattern = pattern.removeprefix("^")
    is_exact = pattern.startswith("=")
    prefixes = tuple(filter(None, pattern.removeprefix("=").split(",")))
    found = []
    for name in names:
        is_match = name in prefixes if is_exact else name.startswith(prefixes)
        if is_match != is_excluding:
            found.append(name)
    return found


def nccl_choice(interfaces: Iterable[Interface]) -> list[str]:
    """Return the interfaces that NCCL selects by default."""
    names = [interface.name for interface in _usable(interfaces)]
    for pattern in _NCCL_ORDER:
        found = nccl_matches(pattern, names)
        if found:
            return found
    return []


def _usable(interfaces: Iterable[Interface]) -> list[Interface]:
    return [interface for interface in interfaces if interface.up and interface.addresses]


def gloo_choice(network: Network) -> str:
    """Return the interface that gloo selects by default: that of the host name's address, otherwise loopback."""
    for address in network.addresses:
        for interface in network.interfaces:
            if address in interface.addresses:
                return interface.name
    for interface in network.interfaces:
        if interface.loopback:
            return interface.name
    return ""


# Checks of the network.


_EFA = "efa"


def check_interfaces(machine: Machine) -> Verdict:
    """Check that an interface is usable, and report which interfaces gloo and NCCL select."""
    usable = _usable(machine.network.interfaces)
    shown = ", ".join(f"{interface.name} {interface.addresses[0]}" for interface in usable)
    if not any(interface.loopback for interface in usable):
        return fail("interfaces", shown or "no interface is up", "bring loopback up: ip link set lo up")
    selected = f"gloo uses {gloo_choice(machine.network)}, NCCL {', '.join(nccl_choice(usable))}"
    if len(usable) == 1:
        fix = "for training on several machines, bring up an interface with an address"
        return warn("interfaces", f"{shown} only; {selected}", fix)
    return ok("interfaces", f"{shown}; {selected}")


def check_host_name(machine: Machine) -> Verdict:
    """Check that the host name resolves to an address of this machine, and that address back to the host name."""
    network = machine.network
    local: set[str] = set()
    for interface in network.interfaces:
        if not interface.loopback:
            local.update(interface.addresses)
    fix = "only needed on several machines: use --local-addr or GLOO_SOCKET_IFNAME, or correct /etc/hosts"
    if not network.addresses:
        return warn("host name", f"{network.hostname} does not resolve to an address", fix)
    shown = f"{network.hostname} is {', '.join(network.addresses)}"
    if all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in network.addresses):
        return warn("host name", f"{shown}, which other machines cannot reach", fix)
    if local.isdisjoint(network.addresses):
        return fail("host name", f"{shown}, which is not an address of this machine", "correct /etc/hosts or DNS")
    back = network.back_name
    if back.partition(".")[0] != network.hostname.partition(".")[0]:
        name = back or "no name"
        return warn("host name", f"{shown}, but that address resolves to {name}", "correct /etc/hosts or reverse DNS")
    return ok("host name", f"{shown}, which resolves back to the name")


def check_rdma(machine: Machine) -> Verdict:
    """Check the InfiniBand, RoCE and EFA devices that NCCL can use."""
    devices = machine.network.rdma
    if not devices:
        return ok("rdma", "no InfiniBand, RoCE or EFA device: NCCL uses sockets between machines")
    idle = [device.name for device in devices if not device.active]
    shown = ", ".join(f"{device.name} ({device.driver or 'unknown driver'})" for device in devices)
    if idle:
        fact = f"{shown}; {', '.join(idle)} has no active port"
        return warn("rdma", fact, "run ibstat; exclude idle devices with NCCL_IB_HCA=^" + ",".join(idle))
    if any(device.driver == _EFA for device in devices) and not machine.network.net_plugins:
        fix = "install aws-ofi-nccl and add its directory to LD_LIBRARY_PATH; without it NCCL falls back to sockets"
        return warn("rdma", f"{shown}, but libnccl-net.so was not found", fix)
    return ok("rdma", shown)


_OLDEST_TORCH = (2, 11)
_IDLE_GPU_BYTES = GIB
"""GPU memory that the driver and a desktop may use before a GPU counts as in use."""
_CONTAINER_SHM = 64 * MIB
"""Default size of /dev/shm in Docker and Kubernetes."""
_SMALL_SHM = GIB
_SMALL_MEMORY, _LITTLE_MEMORY = GIB, 4 * GIB
"""Host memory below which a check fails or warns; a rank needs about 0.5 GiB before its first tensor."""
_FEW_FILES, _SOME_FILES = 512, 4096
"""Limits on open files below which a check fails or warns; ranks, data loaders and sockets all need open files."""
_FEW_PROCESSES = 1024
_SMALL_DISK, _LITTLE_DISK = GIB, 20 * GIB
_SLOW_DISK = 20e6
_FAR_CLOCK_S = 2.0


def check_gpus(machine: Machine) -> Verdict:
    """Check the visible GPUs."""
    if machine.driver.error:
        fact = f"the NVIDIA driver does not answer ({machine.driver.error})"
        return fail("gpus", fact, "reboot, or reload the driver; in a container, start it with --gpus all")
    if machine.hidden_gpus and not machine.gpus:
        fact = f"CUDA_VISIBLE_DEVICES hides all {machine.hidden_gpus} GPUs"
        return warn("gpus", fact, "unset CUDA_VISIBLE_DEVICES, unless ranks should train on the CPU")
    if not machine.gpus:
        return ok("gpus", "none: ranks run on the CPU with gloo")
    counts = Counter(gpu.name for gpu in machine.gpus)
    shown = ", ".join(f"{count} x {name}" for name, count in counts.items())
    if machine.hidden_gpus:
        shown += f"; CUDA_VISIBLE_DEVICES hides {machine.hidden_gpus} more"
    if len(counts) > 1:
        fact = f"{shown}: the slowest GPU limits the speed"
        return warn("gpus", fact, "select equal GPUs with CUDA_VISIBLE_DEVICES")
    return ok("gpus", shown)


def check_gpu_memory(machine: Machine) -> Verdict:
    """Check that other processes do not use the memory of the GPUs."""
    used = [index for index, gpu in enumerate(machine.gpus) if gpu.used_bytes > _IDLE_GPU_BYTES]
    if used:
        most = max(gpu.used_bytes for gpu in machine.gpus) / GIB
        fact = f"GPU {', '.join(map(str, used))} is already in use, up to {most:.1f} GiB"
        return warn("gpu memory", fact, "find the processes with nvidia-smi; end those left by a crash")
    return ok("gpu memory", "free" if machine.gpus else "no GPU")


def check_driver(machine: Machine) -> Verdict:
    """Check that the driver is new enough for torch's CUDA version."""
    driver, built = machine.driver, machine.torch.cuda
    if not driver.version:
        return ok("driver", "none")
    newest = ".".join(map(str, driver.cuda))
    shown = f"{driver.version}, up to CUDA {newest}"
    if built and int(built.partition(".")[0]) > driver.cuda[0]:
        fact = f"{shown}, but torch is built for CUDA {built}"
        return fail("driver", fact, f"install a newer driver, or a torch for CUDA {driver.cuda[0]}")
    return ok("driver", shown)


def check_torch(machine: Machine) -> Verdict:
    """Check that torch can be imported and is new enough."""
    torch = machine.torch
    if torch.error:
        return fail("torch", f"cannot be imported: {torch.error}", "reinstall it: pip install torch")
    found = re.match(r"(\d+)\.(\d+)", torch.version)
    if found is None or (int(found[1]), int(found[2])) < _OLDEST_TORCH:
        oldest = ".".join(map(str, _OLDEST_TORCH))
        return fail("torch", f"{torch.version} is too old", f"pip install 'torch>={oldest}'")
    return ok("torch", f"{torch.version}, for CUDA {torch.cuda}" if torch.cuda else f"{torch.version}, a CPU build")


def check_cuda(machine: Machine) -> Verdict:
    """Check that torch can use the GPUs that the driver reports."""
    torch, num_gpus = machine.torch, len(machine.gpus)
    if not num_gpus:
        return ok("cuda", "no GPU")
    if torch.error:
        return ok("cuda", "not checked: torch cannot be imported")
    if not torch.cuda:
        fact = f"the machine has {num_gpus} GPUs, but torch is a CPU build"
        return warn("cuda", fact, "install a CUDA build of torch, unless ranks should train on the CPU")
    if torch.num_gpus != num_gpus:
        fact = f"the driver reports {num_gpus} GPUs, but torch detects {torch.num_gpus}"
        if torch.cuda_error:
            fact += f" ({torch.cuda_error})"
        return fail("cuda", fact, "check CUDA_VISIBLE_DEVICES and that the driver supports torch's CUDA version")
    return ok("cuda", f"torch detects {num_gpus}")


def check_nccl(machine: Machine) -> Verdict:
    """Check that torch has NCCL if the machine has several GPUs."""
    torch, num_gpus = machine.torch, len(machine.gpus)
    if torch.error:
        return ok("nccl", "not checked: torch cannot be imported")
    if torch.nccl:
        return ok("nccl", f"{torch.nccl}, built into torch")
    if num_gpus > 1:
        fact = f"torch is built without NCCL, but the machine has {num_gpus} GPUs"
        return fail("nccl", fact, "install a CUDA build of torch")
    return ok("nccl", "torch is built without NCCL; ranks use gloo")


def check_shared_memory(machine: Machine) -> Verdict:
    """Check the capacity of /dev/shm for data loaders and NCCL."""
    total, free = machine.memory.shm_total_bytes, machine.memory.shm_free_bytes
    shown = f"{format_bytes(free, 3)} of {format_bytes(total, 3)} free in /dev/shm"
    fix = "run docker with --shm-size=16g or --ipc=host; in Kubernetes, mount emptyDir with medium: Memory at /dev/shm"
    if total <= _CONTAINER_SHM:
        return fail("shared memory", shown, fix)
    if free < _SMALL_SHM:
        return warn("shared memory", shown, f"remove files left by a crash, or {fix}")
    return ok("shared memory", shown)


def check_memory(machine: Machine) -> Verdict:
    """Check the available host memory."""
    memory = machine.memory
    shown = f"{format_bytes(memory.available_bytes, 3)} of {format_bytes(memory.total_bytes, 3)} available"
    if memory.available_bytes < _LITTLE_MEMORY:
        judge = fail if memory.available_bytes < _SMALL_MEMORY else warn
        return judge("memory", shown, "end other processes, or raise the memory limit of the container or job")
    return ok("memory", shown)


def check_limits(machine: Machine) -> Verdict:
    """Check the limits on open files, processes and locked memory."""
    limits = machine.limits
    locked = "unlimited" if limits.memlock_bytes is None else format_bytes(limits.memlock_bytes, 3)
    shown = f"open files {_count(limits.nofile)}, processes {_count(limits.nproc)}, locked memory {locked}"
    if machine.network.rdma and limits.memlock_bytes is not None:
        fix = "run ulimit -l unlimited, or docker run --ulimit memlock=-1: RDMA must lock memory"
        return fail("limits", shown, fix)
    if limits.nofile is not None and limits.nofile < _SOME_FILES:
        state = fail if limits.nofile < _FEW_FILES else warn
        return state("limits", shown, "ulimit -n 65536")
    if limits.nproc is not None and limits.nproc < _FEW_PROCESSES:
        return warn("limits", shown, "ulimit -u unlimited")
    return ok("limits", shown)


def check_cores(machine: Machine) -> Verdict:
    """Check that ranks have enough CPU cores."""
    cpu, num_gpus = machine.cpu, len(machine.gpus)
    usable: float = len(cpu.allowed)
    if cpu.quota is not None:
        usable = min(usable, cpu.quota)
    shown = f"{usable:g} of {cpu.cores} cores"
    if usable < len(cpu.allowed):
        shown += f" (limited to {usable:g} by the cgroup)"
    if usable < max(1, num_gpus):
        return warn("cores", f"{shown} for {num_gpus or 1} ranks", "request more cores, at least one per GPU")
    return ok("cores", shown)


def check_numa(machine: Machine) -> Verdict:
    """Check that this process may use all NUMA nodes."""
    cpu = machine.cpu
    reached = [index for index, node in enumerate(cpu.nodes) if not set(node).isdisjoint(cpu.allowed)]
    if len(cpu.nodes) < 2:
        return ok("numa", "one node")
    if len(reached) < len(cpu.nodes) and len(machine.gpus) > 1:
        fact = f"bound to node {', '.join(map(str, reached))} of {len(cpu.nodes)}: GPUs of other nodes are remote"
        fix = "allow the launcher to use all cores (srun --cpu-bind=none, docker without --cpuset-cpus)"
        return warn("numa", fact, fix)
    return ok("numa", f"{len(cpu.nodes)} nodes, {len(reached)} usable")


def check_disk(machine: Machine) -> Verdict:
    """Check the capacity and speed of the disk of the current directory, which contains run directories."""
    disk = machine.disk
    shown = f"{format_bytes(disk.free_bytes, 3)} of {format_bytes(disk.total_bytes, 3)} free in {disk.path}"
    if disk.error:
        fact = f"{disk.path} cannot be written ({disk.error})"
        return fail("disk", fact, "change to a different directory, or use --run-dir")
    if disk.free_bytes < _LITTLE_DISK:
        judge = fail if disk.free_bytes < _SMALL_DISK else warn
        return judge("disk", shown, "remove old runs and checkpoints, or use --run-dir on a different disk")
    shown += f", {disk.write_bytes_s / 1e6:.0f} MB/s with fsync"
    if disk.write_bytes_s < _SLOW_DISK:
        return warn("disk", shown, "put checkpoints on a faster disk with --run-dir")
    return ok("disk", shown)


def check_clock(machine: Machine) -> Verdict:
    """Check that the clock is plausible and synchronized."""
    clock = machine.clock
    shown = dt.datetime.fromtimestamp(clock.now, dt.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    if clock.now < clock.newest_file - _FAR_CLOCK_S:
        return fail("clock", f"{shown}, earlier than files of this installation", "set the clock: chronyc makestep")
    if abs(clock.disk_skew_s) > _FAR_CLOCK_S:
        fact = (
            f"{shown}, but a new file has a timestamp {clock.disk_skew_s:+.1f} s off: the file server's clock differs"
        )
        return warn("clock", fact, "synchronize both with the same time server")
    if clock.synchronised is False:
        return warn("clock", f"{shown}, not synchronized", "start chrony or ntpd; not needed on a single machine")
    return ok("clock", shown)


CHECKS: tuple[Callable[[Machine], Verdict], ...] = (
    check_gpus,
    check_gpu_memory,
    check_driver,
    check_torch,
    check_cuda,
    check_nccl,
    check_interfaces,
    check_host_name,
    check_rdma,
    check_shared_memory,
    check_memory,
    check_limits,
    check_cores,
    check_numa,
    check_disk,
    check_clock,
)
"""All checks of a machine, in the order of the report."""


def check_machine(machine: Machine) -> list[Verdict]:
    """Return the verdicts of all checks of a machine."""
    return [check(machine) for check in CHECKS]


def _count(limit: int | None) -> str:
    return "unlimited" if limit is None else str(limit)
