"""Facts about this machine, observed once and read by the checks."""

from __future__ import annotations

import msgspec


class GpuFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU as reported by the driver."""

    name: str
    total_bytes: int
    used_bytes: int
    """Memory in use by any process, before a job starts."""


class Driver(msgspec.Struct, frozen=True, kw_only=True):
    """The NVIDIA driver."""

    version: str = ""
    """Version of the driver; empty if none is installed."""
    cuda: tuple[int, int] = (0, 0)
    """Newest CUDA version that the driver supports."""
    error: str = ""
    """Error of an installed driver that does not respond."""


class Torch(msgspec.Struct, frozen=True, kw_only=True):
    """The installed torch, as reported by a process that imports it."""

    version: str = ""
    cuda: str = ""
    """CUDA version that torch was built for; empty for a CPU build."""
    nccl: str = ""
    """Version of NCCL; empty if torch was built without NCCL."""
    gloo: bool = False
    num_gpus: int = 0
    """Number of GPUs that torch detects."""
    cuda_error: str = ""
    """Warning of torch if CUDA cannot be used."""
    error: str = ""
    """Error of `import torch`; empty if it succeeded."""


class Interface(msgspec.Struct, frozen=True, kw_only=True):
    """A network interface."""

    name: str
    up: bool
    loopback: bool = False
    mtu: int = 1500
    addresses: tuple[str, ...] = ()


class RdmaDevice(msgspec.Struct, frozen=True, kw_only=True):
    """An InfiniBand, RoCE or EFA device."""

    name: str
    driver: str
    active: bool
    """Whether a port of the device is active."""


class Network(msgspec.Struct, frozen=True, kw_only=True):
    """Network interfaces, RDMA devices and the host name of this machine."""

    interfaces: tuple[Interface, ...] = ()
    rdma: tuple[RdmaDevice, ...] = ()
    net_plugins: tuple[str, ...] = ()
    """Libraries that NCCL could load as network plugins."""
    hostname: str = ""
    addresses: tuple[str, ...] = ()
    """Addresses that the host name resolves to; empty if it does not resolve."""
    back_name: str = ""
    """Name that the first of these addresses resolves to."""


class ProcessLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Soft limits of this process; None if unlimited."""

    nofile: int | None
    memlock_bytes: int | None
    nproc: int | None


class HostMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Host memory and shared memory, in bytes."""

    total_bytes: int
    available_bytes: int
    """Memory available within the limits of the machine and the cgroup."""
    shm_total_bytes: int
    shm_free_bytes: int


class Cpu(msgspec.Struct, frozen=True, kw_only=True):
    """CPU cores and NUMA nodes."""

    cores: int
    """Number of cores of the machine."""
    allowed: tuple[int, ...]
    """Cores that this process may run on."""
    quota: float | None = None
    """CPU quota of the cgroup in cores; None if unlimited."""
    nodes: tuple[tuple[int, ...], ...] = ()
    """Cores of each NUMA node."""


class Disk(msgspec.Struct, frozen=True, kw_only=True):
    """The disk of the current directory."""

    path: str
    total_bytes: int
    free_bytes: int
    write_bytes_s: float = 0.0
    """Write rate of a few MiB with fsync; 0 if the disk is not writable."""
    error: str = ""


class Clock(msgspec.Struct, frozen=True, kw_only=True):
    """The machine's clock."""

    now: float
    """Seconds since the epoch."""
    newest_file: float
    """Modification time of the newest file of this installation; a correct clock is not earlier."""
    synchronised: bool | None = None
    """Whether the kernel reports a synchronized clock; None if unknown."""
    disk_skew_s: float = 0.0
    """Timestamp of a new file minus the clock: the skew of a file server's clock."""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """All facts about this machine."""

    gpus: tuple[GpuFacts, ...]
    hidden_gpus: int
    """Number of GPUs hidden by CUDA_VISIBLE_DEVICES."""
    driver: Driver
    torch: Torch
    network: Network
    limits: ProcessLimits
    memory: HostMemory
    cpu: Cpu
    disk: Disk
    clock: Clock
