"""Hardware descriptions for planning: devices, links, node types and clusters as frozen values."""

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
"""dtype -> dtype whose rate applies if hardware does not support the first; a narrow dtype then only saves memory."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """An accelerator, or the share of a CPU that a rank uses."""

    name: str
    kind: Literal["cuda", "rocm", "cpu"]
    memory_bytes: int
    """Memory that a process can allocate, as the total of `torch.cuda.mem_get_info()`."""
    memory_bandwidth: float
    """Bytes per second, reads and writes together."""
    flops: Mapping[str, float]
    """dtype -> dense peak FLOP/s; dtypes without hardware support are absent."""
    matmul: Mapping[str, float] = field(default_factory=dict)
    """dtype -> measured FLOP/s of large matrix products."""
    node: str = ""
    """Name of the default node type."""
    capability: tuple[int, ...] = ()
    """CUDA compute capability; empty for other kinds."""
    aliases: tuple[str, ...] = ()
    driver_names: tuple[str, ...] = ()
    """Names that drivers report; devices of different memory sizes may share a name."""
    assumed: bool = False
    """Whether the device is not in the catalogue, so that its rates are those of a similar device."""
    source: str

    def __post_init__(self) -> None:
        _check_positive(f"device {self.name}", memory_bytes=self.memory_bytes, memory_bandwidth=self.memory_bandwidth)
        for table in (self.flops, self.matmul):
            _check_positive(f"device {self.name}", **table)
        if "fp32" not in self.flops:
            raise HardwareError(
                f"device {self.name} has no fp32 rate",
                code="hardware.device-no-fp32-rate",
                fix="add fp32 to its tflops in the catalogue",
            )

    @property
    def has_bf16(self) -> bool:
        """Whether the hardware supports bf16."""
        return "bf16" in self.flops

    def peak(self, dtype: str) -> float:
        """Return the dense peak FLOP/s of a dtype, or of its fallback dtype if the hardware does not support it."""
        while dtype not in self.flops:
            dtype = _FALLBACK[dtype]
        return self.flops[dtype]

    def sustained(self, dtype: str) -> float:
        """Return the sustained matmul FLOP/s of a dtype, estimated from its peak if it was not measured."""
        while dtype not in self.flops:
            dtype = _FALLBACK[dtype]
        if dtype in self.matmul:
            return self.matmul[dtype]
        fractions = [rate / self.flops[known] for known, rate in self.matmul.items()]
        return self.flops[dtype] * min(fractions, default=_USUAL_FRACTION)


_USUAL_FRACTION = 0.75
"""Sustained fraction of the peak in large matmuls: A100 0.87, H100 0.80, MI300X 0.54 (stas00/ml-engineering, MAMF)."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """A type of interconnect; all values are per device."""

    name: str
    bandwidth: float
    """Nominal bandwidth in bytes per second and direction."""
    efficiency: float
    """Bus bandwidth of collectives on large tensors, as a fraction of the nominal bandwidth."""
    latency_s: float
    """Latency in seconds per hop of a small message (NCCL's LL protocol)."""
    bulk_latency_s: float
    """Latency in seconds per hop of a large message (NCCL's LL128 or Simple protocol)."""
    multicast: bool = False
    """Whether the switch reduces and multicasts (NVLink SHARP)."""
    source: str

    def __post_init__(self) -> None:
        numbers = {name: getattr(self, name) for name in ("bandwidth", "efficiency", "latency_s", "bulk_latency_s")}
        _check_positive(f"link {self.name}", **numbers)
        if self.efficiency > 1:
            raise HardwareError(
                f"efficiency of link {self.name} must be at most 1, got {self.efficiency}",
                code="hardware.link-efficiency-invalid",
                fix="use a fraction of the nominal bandwidth, from 0 to 1",
            )

    @property
    def reached(self) -> float:
        """Bus bandwidth of large collectives in bytes per second."""
        return self.bandwidth * self.efficiency


@dataclass(frozen=True, kw_only=True)
class NodeType:
    """A type of node: its devices, the links between them and to other nodes, and its host."""

    name: str
    device: Device
    num_devices: int
    inside: Link
    """Link between the devices of the node."""
    nic: Link
    """Network interface of the node."""
    nics: int
    """Number of network interfaces."""
    host_link: Link
    """Link between a device and host memory."""
    host_memory_bytes: int
    host_cores: int
    aliases: tuple[str, ...] = ()
    source: str

    def __post_init__(self) -> None:
        names = ("num_devices", "nics", "host_memory_bytes", "host_cores")
        _check_positive(f"node {self.name}", **{name: getattr(self, name) for name in names})

    @cached_property
    def outside(self) -> Link:
        """The link to other nodes, with the bandwidth per device when all devices send at once."""
        return replace(self.nic, bandwidth=self.outside_bandwidth / self.num_devices)

    @property
    def outside_bandwidth(self) -> float:
        """Total bandwidth of all network interfaces in bytes per second and direction."""
        return self.nic.bandwidth * self.nics

    def with_devices(self, num_devices: int) -> NodeType:
        """Return this node type with another number of devices.

        The number of network interfaces is scaled if each device has its own, and kept if devices share them.
        """
        nics = self.nics
        if nics >= self.num_devices:
            nics = max(1, nics * num_devices // self.num_devices)
        return replace(self, num_devices=num_devices, nics=nics)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes of the same type with all their devices, or some devices of a single node."""

    node: NodeType
    num_devices: int

    def __post_init__(self) -> None:
        full, size = self.node.num_devices, self.num_devices
        if size < 1:
            raise HardwareError(
                f"number of devices must be positive, got {size}",
                code="hardware.cluster-without-devices",
                fix="use at least 1 device",
            )
        if size > full and size % full:
            down, up = size // full * full, -(-size // full) * full
            raise HardwareError(
                f"{size} {self.device.name} devices do not fill whole nodes of {full} devices",
                code="hardware.cluster-partial-node",
                fix=f"use {down} or {up}, or specify the node size as NODESxDEVICESx{self.device.name}",
            )

    @property
    def device(self) -> Device:
        """The type of all devices."""
        return self.node.device

    @property
    def devices_per_node(self) -> int:
        """Number of devices used on each node."""
        return min(self.num_devices, self.node.num_devices)

    @property
    def num_nodes(self) -> int:
        """Number of nodes used."""
        return self.num_devices // self.devices_per_node

    def describe(self) -> str:
        """Return a one-line summary: devices, memory, nodes and links."""
        device, node = self.device, self.node
        parts = [f"{self.num_devices:,} x {device.name} ({device.memory_bytes / GIB:.1f} GiB)"]
        if self.num_nodes > 1:
            network = f"{node.nics} x {node.nic.name}" if node.nics > 1 else node.nic.name
            parts.append(f"{self.num_nodes:,} nodes {node.name} of {self.devices_per_node}")
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
                f"{name} of {owner} must be positive, got {value:g}",
                code="hardware.not-positive",
                fix="use a number above 0",
            )
