"""What a plan knows of the hardware: devices, links, nodes and clusters as frozen values."""

from __future__ import annotations

import math
from collections.abc import Mapping  # noqa: TC003 - read at run time by msgspec
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from shardwise.errors import HardwareError
from shardwise.units import GIB

DTYPES = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8")
_FALLBACK = {"fp8": "bf16", "bf16": "fp32", "fp16": "fp32", "tf32": "fp32", "fp64": "fp32"}
"""What a chip computes in when it has no units for a dtype: storage saves memory, arithmetic gains nothing."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator, or the share of a host's CPU that one rank gets."""

    name: str
    kind: Literal["cuda", "rocm", "cpu"]
    memory_bytes: int
    """What the driver lets one process allocate, as the total of `torch.cuda.mem_get_info()`."""
    memory_bandwidth: float
    """Bytes per second, reading and writing together."""
    flops: Mapping[str, float]
    """dtype -> dense peak FLOP/s; absent where the chip has no units for it."""
    matmul: Mapping[str, float] = field(default_factory=dict)
    """dtype -> FLOP/s that large matrix products reach, where it was measured."""
    node: str = ""
    """Name of its usual node."""
    capability: tuple[int, ...] = ()
    """CUDA compute capability, empty elsewhere."""
    aliases: tuple[str, ...] = ()
    driver_names: tuple[str, ...] = ()
    """What drivers call it; several memory sizes may share one."""
    assumed: bool = False
    """Nobody listed this device: its rates are those of a relative."""
    source: str

    def __post_init__(self) -> None:
        _check_positive(f"device {self.name}", memory_bytes=self.memory_bytes, memory_bandwidth=self.memory_bandwidth)
        for table in (self.flops, self.matmul):
            _check_positive(f"device {self.name}", **table)
        if "fp32" not in self.flops:
            raise HardwareError(
                f"device {self.name} has no fp32 rate",
                code="hardware.device-no-fp32-rate",
                fix="write fp32 among its flops",
            )

    @property
    def has_bf16(self) -> bool:
        """Whether bf16 runs in hardware."""
        return "bf16" in self.flops

    def peak(self, dtype: str) -> float:
        """Return the dense peak FLOP/s for a dtype, of the next wider one where the chip has no units for it."""
        while dtype not in self.flops:
            dtype = _FALLBACK[dtype]
        return self.flops[dtype]

    def sustained(self, dtype: str) -> float:
        """Return the sustained matmul FLOP/s of a dtype: listed, else its peak times the fraction of another dtype."""
        while dtype not in self.flops:
            dtype = _FALLBACK[dtype]
        if dtype in self.matmul:
            return self.matmul[dtype]
        fractions = [rate / self.flops[known] for known, rate in self.matmul.items()]
        return self.flops[dtype] * min(fractions, default=_USUAL_FRACTION)


_USUAL_FRACTION = 0.75
"""Of the peak in large matrix products: A100 0.87, H100 0.80, MI300X 0.54 (stas00/ml-engineering, MAMF table)."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """One kind of wire, as one device sees it."""

    name: str
    bandwidth: float
    """Bytes per second, each direction, on the label."""
    efficiency: float
    """Bus bandwidth that collectives reach on large tensors, as a fraction of the label."""
    latency_s: float
    """Seconds per hop of a small message (NCCL's LL protocol)."""
    bulk_latency_s: float
    """Seconds per hop of a large one, whose protocol trades latency for bandwidth (LL128 or Simple)."""
    multicast: bool = False
    """The switch adds and copies on the way (NVLink SHARP)."""
    source: str

    def __post_init__(self) -> None:
        numbers = {name: getattr(self, name) for name in ("bandwidth", "efficiency", "latency_s", "bulk_latency_s")}
        _check_positive(f"link {self.name}", **numbers)
        if self.efficiency > 1:
            raise HardwareError(
                f"link {self.name} has efficiency {self.efficiency}",
                code="hardware.link-efficiency-invalid",
                fix="use a fraction up to 1",
            )

    @property
    def reached(self) -> float:
        """Bus bandwidth of large collectives, bytes per second."""
        return self.bandwidth * self.efficiency


@dataclass(frozen=True, kw_only=True)
class NodeType:
    """One machine: its devices, the links between them and to other machines, its host."""

    name: str
    device: Device
    num_devices: int
    inside: Link
    """Between devices of the node."""
    nic: Link
    """One network card."""
    nics: int
    host_link: Link
    """Between a device and host memory."""
    host_memory_bytes: int
    host_cores: int
    aliases: tuple[str, ...] = ()
    source: str

    def __post_init__(self) -> None:
        names = ("num_devices", "nics", "host_memory_bytes", "host_cores")
        _check_positive(f"node {self.name}", **{name: getattr(self, name) for name in names})

    @cached_property
    def outside(self) -> Link:
        """The way to other nodes, as the share of one device when all send at once."""
        return replace(self.nic, bandwidth=self.outside_bandwidth / self.num_devices)

    @property
    def outside_bandwidth(self) -> float:
        """Bytes per second and direction of all network cards together."""
        return self.nic.bandwidth * self.nics

    def with_devices(self, num_devices: int) -> NodeType:
        """Return this node with another number of devices: cards of their own come with them, shared ones stay."""
        own = self.nics >= self.num_devices
        nics = max(1, self.nics * num_devices // self.num_devices) if own else self.nics
        return replace(self, num_devices=num_devices, nics=nics)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Equal nodes, all full, or a part of one."""

    node: NodeType
    num_devices: int

    def __post_init__(self) -> None:
        full, size = self.node.num_devices, self.num_devices
        if size < 1:
            raise HardwareError(
                f"a cluster of {size} devices is none", code="hardware.cluster-without-devices", fix="use at least 1"
            )
        if size > full and size % full:
            down, up = size // full * full, -(-size // full) * full
            raise HardwareError(
                f"{size} {self.device.name} leave a node of {full} partly empty",
                code="hardware.cluster-partial-node",
                fix=f"use {down} or {up}, or give the shape as NODESxDEVICESx{self.device.name}",
            )

    @property
    def device(self) -> Device:
        """The device, of which all are equal."""
        return self.node.device

    @property
    def devices_per_node(self) -> int:
        """Devices in use on each node."""
        return min(self.num_devices, self.node.num_devices)

    @property
    def num_nodes(self) -> int:
        """Nodes in use."""
        return self.num_devices // self.devices_per_node

    def describe(self) -> str:
        """Say in one line what it is: devices, memory, nodes, links."""
        device, node = self.device, self.node
        parts = [f"{self.num_devices} x {device.name} ({device.memory_bytes / GIB:.1f} GiB)"]
        if self.num_nodes > 1:
            network = f"{node.nics} x {node.nic.name}" if node.nics > 1 else node.nic.name
            parts.append(f"{self.num_nodes} nodes {node.name} of {self.devices_per_node}")
            parts.append(f"{node.inside.name} inside, {network} between")
        elif self.num_devices > 1:
            part = "" if self.num_devices == node.num_devices else f" of {node.num_devices}"
            parts.append(f"one node {node.name}{part}")
            parts.append(f"{node.inside.name} inside")
        return " · ".join([*parts, *(["rates assumed"] if device.assumed else [])])


def _check_positive(owner: str, **numbers: float) -> None:
    for name, value in numbers.items():
        if not value > 0 or not math.isfinite(value):
            raise HardwareError(
                f"{owner} has {name} {value:g}", code="hardware.not-positive", fix="use a number above 0"
            )
