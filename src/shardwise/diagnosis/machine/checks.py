"""What the facts of a machine and its network interfaces mean for a job; pure."""

from __future__ import annotations

import datetime as dt
import ipaddress
import re
from typing import TYPE_CHECKING

from shardwise.diagnosis.verdicts import Verdict, fail, ok, warn
from shardwise.units import GIB, MIB, format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from shardwise.diagnosis.machine.facts import Interface, Machine, Network


# Which interfaces gloo and NCCL take, by their own rules; pure.


_NCCL_ORDER = ("ib", "^docker,lo,virbr", "docker", "lo", "virbr")
"""What NCCL tries in turn where no interface is named (src/misc/socket.cc)."""


def nccl_matches(pattern: str, names: Iterable[str]) -> list[str]:
    """Return the interfaces that NCCL_SOCKET_IFNAME means: prefixes, = for exact names, ^ for all others."""
    excluded = pattern.startswith("^")
    rest = pattern.removeprefix("^")
    exact = rest.startswith("=")
    wanted = [prefix for prefix in rest.removeprefix("=").split(",") if prefix]
    found = []
    for name in names:
        hit = any(name == prefix if exact else name.startswith(prefix) for prefix in wanted)
        if hit != excluded:
            found.append(name)
    return found


def nccl_choice(interfaces: Iterable[Interface]) -> list[str]:
    """Return the interfaces that NCCL takes by itself."""
    names = [one.name for one in interfaces if one.up and one.addresses]
    return next((found for pattern in _NCCL_ORDER if (found := nccl_matches(pattern, names))), [])


def gloo_choice(network: Network) -> str:
    """Return the interface that gloo takes by itself: that of the host name's address, else loopback."""
    for address in network.addresses:
        for interface in network.interfaces:
            if address in interface.addresses:
                return interface.name
    return next((interface.name for interface in network.interfaces if interface.loopback), "")


# What the interfaces and names of a machine mean for a job; pure.


_EFA = "efa"


def check_interfaces(machine: Machine) -> Verdict:
    """Interfaces with an address, and which of them gloo and NCCL would take."""
    usable = [one for one in machine.network.interfaces if one.up and one.addresses]
    shown = ", ".join(f"{one.name} {one.addresses[0]}" for one in usable)
    if not any(one.loopback for one in usable):
        return fail("interfaces", shown or "none is up", "bring loopback up: ip link set lo up")
    taken = f"gloo takes {gloo_choice(machine.network)}, NCCL {', '.join(nccl_choice(usable))}"
    if len(usable) == 1:
        fix = "one machine alone needs no other; for several, bring an interface up and give it an address"
        return warn("interfaces", f"{shown} only; {taken}", fix)
    return ok("interfaces", f"{shown}; {taken}")


def check_host_name(machine: Machine) -> Verdict:
    """A host name that other machines could use: it means an address of this one, and that address means the name."""
    network = machine.network
    interfaces = [one for one in network.interfaces if not one.loopback]
    own = {address for one in interfaces for address in one.addresses}
    one_machine = "matters only for several machines: use --local-addr or GLOO_SOCKET_IFNAME, or correct /etc/hosts"
    if not network.addresses:
        return warn("host name", f"{network.hostname} means no address", one_machine)
    shown = f"{network.hostname} is {', '.join(network.addresses)}"
    if all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in network.addresses):
        return warn("host name", f"{shown}, which other machines cannot reach", one_machine)
    if not own & set(network.addresses):
        return fail("host name", f"{shown}, which is not an address of this machine", "correct /etc/hosts or DNS")
    back = network.back_name
    if back.partition(".")[0] != network.hostname.partition(".")[0]:
        called = f"called {back}" if back else "without a name"
        return warn("host name", f"{shown}, and that address is {called}", "correct /etc/hosts or the reverse zone")
    return ok("host name", f"{shown}, and back")


def check_rdma(machine: Machine) -> Verdict:
    """InfiniBand, RoCE or EFA that NCCL can use."""
    devices = machine.network.rdma
    if not devices:
        return ok("rdma", "no InfiniBand, RoCE or EFA: between machines NCCL uses sockets")
    idle = [device.name for device in devices if not device.active]
    shown = ", ".join(f"{device.name} ({device.driver or 'unknown driver'})" for device in devices)
    if idle:
        fact = f"{shown}; no active port on {', '.join(idle)}"
        return warn("rdma", fact, "see ibstat; leave dead ones out with NCCL_IB_HCA=^" + ",".join(idle))
    if any(device.driver == _EFA for device in devices) and not machine.network.net_plugins:
        fix = "install aws-ofi-nccl and put its folder into LD_LIBRARY_PATH: NCCL falls back to sockets without it"
        return warn("rdma", f"{shown}, and no libnccl-net.so was found", fix)
    return ok("rdma", shown)


_OLDEST_TORCH = (2, 11)
_IDLE_GPU_BYTES = GIB
"""What a driver and a desktop may hold of a GPU before it counts as in use."""
_CONTAINER_SHM = 64 * MIB
"""What Docker and Kubernetes give a container that does not ask."""
_SMALL_SHM = GIB
_SMALL_MEMORY, _LITTLE_MEMORY = GIB, 4 * GIB
"""A rank needs about half a GiB before its first tensor."""
_FEW_FILES, _SOME_FILES = 512, 4096
"""Ranks, data loaders and sockets of one launch together."""
_FEW_PROCESSES = 1024
_SMALL_DISK, _LITTLE_DISK = GIB, 20 * GIB
_SLOW_DISK = 20e6
_FAR_CLOCK_S = 2.0


def check_gpus(machine: Machine) -> Verdict:
    """GPUs that processes see."""
    if machine.driver.error:
        fact = f"the NVIDIA driver does not answer ({machine.driver.error})"
        return fail("gpus", fact, "reboot, or reload the driver; in a container, start it with --gpus all")
    if machine.hidden_gpus and not machine.gpus:
        fact = f"CUDA_VISIBLE_DEVICES hides all {machine.hidden_gpus} GPUs"
        return warn("gpus", fact, "unset CUDA_VISIBLE_DEVICES, unless ranks are meant for the CPU")
    if not machine.gpus:
        return ok("gpus", "none: ranks run on the CPU with gloo")
    names = [gpu.name for gpu in machine.gpus]
    shown = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    hidden = f"; CUDA_VISIBLE_DEVICES hides {machine.hidden_gpus} more" if machine.hidden_gpus else ""
    if len(set(names)) > 1:
        return warn("gpus", f"{shown}{hidden}: the slowest sets the pace", "choose equal ones by CUDA_VISIBLE_DEVICES")
    return ok("gpus", shown + hidden)


def check_gpu_memory(machine: Machine) -> Verdict:
    """GPUs that somebody else fills."""
    used = [index for index, gpu in enumerate(machine.gpus) if gpu.used_bytes > _IDLE_GPU_BYTES]
    if used:
        most = max(machine.gpus[index].used_bytes for index in used) / GIB
        fact = f"GPU {', '.join(map(str, used))} in use already, up to {most:.1f} GiB"
        return warn("gpu memory", fact, "see who with nvidia-smi; processes left by a crash can be ended")
    return ok("gpu memory", "free" if machine.gpus else "no GPU")


def check_driver(machine: Machine) -> Verdict:
    """A driver that is new enough for torch's CUDA."""
    driver, built = machine.driver, machine.torch.cuda
    if not driver.version:
        return ok("driver", "none")
    newest = ".".join(map(str, driver.cuda))
    shown = f"{driver.version}, up to CUDA {newest}"
    if built and int(built.partition(".")[0]) > driver.cuda[0]:
        fact = f"{shown}, and torch is built for CUDA {built}"
        return fail("driver", fact, f"install a newer driver, or a torch for CUDA {driver.cuda[0]}")
    return ok("driver", shown)


def check_torch(machine: Machine) -> Verdict:
    """A torch that can be imported and is new enough."""
    torch = machine.torch
    if torch.error:
        return fail("torch", f"cannot be imported: {torch.error}", "install it again: pip install torch")
    found = re.match(r"(\d+)\.(\d+)", torch.version)
    if found is None or (int(found[1]), int(found[2])) < _OLDEST_TORCH:
        oldest = ".".join(map(str, _OLDEST_TORCH))
        return fail("torch", f"{torch.version} is too old", f"pip install 'torch>={oldest}'")
    return ok("torch", f"{torch.version}, " + (f"for CUDA {torch.cuda}" if torch.cuda else "a CPU build"))


def check_cuda(machine: Machine) -> Verdict:
    """A torch that sees the GPUs which the driver shows."""
    torch, num_gpus = machine.torch, len(machine.gpus)
    if torch.error or not num_gpus:
        return ok("cuda", "no GPU to use" if not num_gpus else "not asked: torch cannot be imported")
    if not torch.cuda:
        fact = f"{num_gpus} GPUs, and torch is a CPU build"
        return warn("cuda", fact, "pip install a CUDA build of torch, unless ranks are meant for the CPU")
    if torch.num_gpus != num_gpus:
        why = f" ({torch.cuda_error})" if torch.cuda_error else ""
        fact = f"the driver shows {num_gpus} GPUs and torch sees {torch.num_gpus}{why}"
        return fail("cuda", fact, "check CUDA_VISIBLE_DEVICES and that driver and torch fit each other")
    return ok("cuda", f"torch sees {num_gpus}")


def check_nccl(machine: Machine) -> Verdict:
    """NCCL, where there are GPUs to connect."""
    torch, num_gpus = machine.torch, len(machine.gpus)
    if torch.error:
        return ok("nccl", "not asked: torch cannot be imported")
    if torch.nccl:
        return ok("nccl", f"{torch.nccl}, built into torch")
    if num_gpus > 1:
        return fail(
            "nccl", f"torch is built without NCCL, and there are {num_gpus} GPUs", "install a CUDA build of torch"
        )
    return ok("nccl", "torch is built without NCCL; gloo connects ranks")


def check_shared_memory(machine: Machine) -> Verdict:
    """Capacity of /dev/shm for data loaders and NCCL."""
    total, free = machine.memory.shm_total_bytes, machine.memory.shm_free_bytes
    shown = f"{format_bytes(free, 3)} of {format_bytes(total, 3)} free in /dev/shm"
    fix = "docker run --shm-size=16g (or --ipc=host); in Kubernetes an emptyDir with medium: Memory at /dev/shm"
    if total <= _CONTAINER_SHM:
        return fail("shared memory", shown, fix)
    if free < _SMALL_SHM:
        return warn("shared memory", shown, f"remove files that a crash left there, or {fix}")
    return ok("shared memory", shown)


def check_memory(machine: Machine) -> Verdict:
    """Host memory that is still there."""
    memory = machine.memory
    shown = f"{format_bytes(memory.available_bytes, 3)} of {format_bytes(memory.total_bytes, 3)} available"
    if memory.available_bytes < _LITTLE_MEMORY:
        judge = fail if memory.available_bytes < _SMALL_MEMORY else warn
        return judge("memory", shown, "end other processes, or raise the memory limit of the container or job")
    return ok("memory", shown)


def check_limits(machine: Machine) -> Verdict:
    """Limits on files, processes and locked memory."""
    limits = machine.limits
    shown = (
        f"open files {_count(limits.nofile)}, processes {_count(limits.nproc)},"
        f" locked memory {'unlimited' if limits.memlock_bytes is None else format_bytes(limits.memlock_bytes, 3)}"
    )
    if machine.network.rdma and limits.memlock_bytes is not None:
        fix = "ulimit -l unlimited (docker run --ulimit memlock=-1): RDMA cannot register memory otherwise"
        return fail("limits", shown, fix)
    if limits.nofile is not None and limits.nofile < _SOME_FILES:
        return (fail if limits.nofile < _FEW_FILES else warn)("limits", shown, "ulimit -n 65536")
    if limits.nproc is not None and limits.nproc < _FEW_PROCESSES:
        return warn("limits", shown, "ulimit -u unlimited")
    return ok("limits", shown)


def check_cores(machine: Machine) -> Verdict:
    """Cores that ranks may use."""
    cpu, num_gpus = machine.cpu, len(machine.gpus)
    usable = len(cpu.allowed) if cpu.quota is None else min(len(cpu.allowed), cpu.quota)
    shown = f"{usable:g} of {cpu.cores} cores"
    if cpu.quota is not None and cpu.quota < len(cpu.allowed):
        shown += f" (the cgroup gives {cpu.quota:g})"
    if usable < max(1, num_gpus):
        return warn("cores", f"{shown} for {num_gpus or 1} ranks", "ask for more cores, at least one for every GPU")
    return ok("cores", shown)


def check_numa(machine: Machine) -> Verdict:
    """NUMA nodes that this process is kept from."""
    cpu = machine.cpu
    allowed = set(cpu.allowed)
    reached = [index for index, node in enumerate(cpu.nodes) if allowed & set(node)]
    if len(cpu.nodes) < 2:
        return ok("numa", "one node")
    if len(reached) < len(cpu.nodes) and len(machine.gpus) > 1:
        fact = f"bound to node {', '.join(map(str, reached))} of {len(cpu.nodes)}: GPUs of the others are far"
        return warn(
            "numa", fact, "let the launcher have all cores (srun --cpu-bind=none, docker without --cpuset-cpus)"
        )
    return ok("numa", f"{len(cpu.nodes)} nodes, {len(reached)} in reach")


def check_disk(machine: Machine) -> Verdict:
    """Capacity and speed of the disk under the current folder, where run directories go."""
    disk = machine.disk
    shown = f"{format_bytes(disk.free_bytes, 3)} of {format_bytes(disk.total_bytes, 3)} free in {disk.path}"
    if disk.error:
        return fail("disk", f"{disk.path} cannot be written ({disk.error})", "go to another folder, or use --run-dir")
    if disk.free_bytes < _LITTLE_DISK:
        judge = fail if disk.free_bytes < _SMALL_DISK else warn
        return judge("disk", shown, "remove old runs and checkpoints, or use --run-dir on another disk")
    shown += f", {disk.write_bytes_s / 1e6:.0f} MB/s written through"
    if disk.write_bytes_s < _SLOW_DISK:
        return warn("disk", shown, "put checkpoints on a faster disk with --run-dir")
    return ok("disk", shown)


def check_clock(machine: Machine) -> Verdict:
    """A clock that others can agree with."""
    clock = machine.clock
    shown = dt.datetime.fromtimestamp(clock.now, dt.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    if clock.now < clock.newest_file - _FAR_CLOCK_S:
        return fail("clock", f"{shown}, earlier than files of this installation", "set the clock: chronyc makestep")
    if abs(clock.disk_skew_s) > _FAR_CLOCK_S:
        fact = f"{shown}, and a file written now is dated {clock.disk_skew_s:+.1f} s: the file server has another time"
        return warn("clock", fact, "let both follow the same time server")
    if clock.synchronised is False:
        return warn("clock", f"{shown}, not synchronised", "start chrony or ntpd; one machine alone needs none")
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
"""Every check of a machine, in the order of the report."""


def check_machine(machine: Machine) -> list[Verdict]:
    """Return the verdict of every check on `machine`."""
    return [check(machine) for check in CHECKS]


def _count(limit: int | None) -> str:
    return "unlimited" if limit is None else str(limit)
