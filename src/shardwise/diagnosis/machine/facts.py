"""What is known of this machine: plain facts, each observed once, for checks to judge."""

from __future__ import annotations

import msgspec


class GpuFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU as the driver describes it."""

    name: str
    total_bytes: int
    used_bytes: int
    """By anybody, before a job of ours starts."""


class Driver(msgspec.Struct, frozen=True, kw_only=True):
    """The NVIDIA driver."""

    version: str = ""
    """Empty: there is none."""
    cuda: tuple[int, int] = (0, 0)
    """Newest CUDA that it runs."""
    error: str = ""
    """Why it does not answer although it is there."""


class Torch(msgspec.Struct, frozen=True, kw_only=True):
    """The installed torch, as reported by a process that imports it."""

    version: str = ""
    cuda: str = ""
    """CUDA that it was built for; empty for CPU builds."""
    nccl: str = ""
    """Version of NCCL; empty: built without."""
    gloo: bool = False
    num_gpus: int = 0
    """That CUDA shows it."""
    cuda_error: str = ""
    """Its message when CUDA cannot be used."""
    error: str = ""
    """Why it cannot be imported."""


class Interface(msgspec.Struct, frozen=True, kw_only=True):
    """One network interface."""

    name: str
    up: bool
    loopback: bool = False
    mtu: int = 1500
    addresses: tuple[str, ...] = ()


class RdmaDevice(msgspec.Struct, frozen=True, kw_only=True):
    """One InfiniBand, RoCE or EFA device."""

    name: str
    driver: str
    active: bool
    """Whether one of its ports is."""


class Network(msgspec.Struct, frozen=True, kw_only=True):
    """Interfaces, and who this machine is on the network."""

    interfaces: tuple[Interface, ...] = ()
    rdma: tuple[RdmaDevice, ...] = ()
    net_plugins: tuple[str, ...] = ()
    """Libraries that NCCL could load as network plugins."""
    hostname: str = ""
    addresses: tuple[str, ...] = ()
    """What the host name means here; empty: nothing."""
    back_name: str = ""
    """What the first of these addresses is called."""


class ProcessLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Soft limits of this process; None is unlimited."""

    nofile: int | None
    memlock_bytes: int | None
    nproc: int | None


class HostMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Host memory and shared memory, in bytes."""

    total_bytes: int
    available_bytes: int
    """What the kernel and the cgroup still give."""
    shm_total_bytes: int
    shm_free_bytes: int


class Cpu(msgspec.Struct, frozen=True, kw_only=True):
    """Cores and NUMA nodes."""

    cores: int
    """Of the machine."""
    allowed: tuple[int, ...]
    """Cores that this process may run on."""
    quota: float | None = None
    """Cores' worth of time that the cgroup gives; None: no limit."""
    nodes: tuple[tuple[int, ...], ...] = ()
    """Cores of each NUMA node."""


class Disk(msgspec.Struct, frozen=True, kw_only=True):
    """The disk under the current folder."""

    path: str
    total_bytes: int
    free_bytes: int
    write_bytes_s: float = 0.0
    """Of a few MiB with fsync; 0: it could not be written."""
    error: str = ""


class Clock(msgspec.Struct, frozen=True, kw_only=True):
    """The machine's clock."""

    now: float
    """Seconds since the epoch."""
    newest_file: float
    """When the newest of our own files was installed: the clock cannot be behind it."""
    synchronised: bool | None = None
    """Whether the kernel reports so; None: unknown."""
    disk_skew_s: float = 0.0
    """How far a file written now is ahead of the clock: another machine's clock on a shared disk."""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """All of it."""

    gpus: tuple[GpuFacts, ...]
    hidden_gpus: int
    """That CUDA_VISIBLE_DEVICES hides."""
    driver: Driver
    torch: Torch
    network: Network
    limits: ProcessLimits
    memory: HostMemory
    cpu: Cpu
    disk: Disk
    clock: Clock
