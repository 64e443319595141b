"""Calibrations: measured rates of a machine, or catalogue values without a measurement, and their files on disk."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping  # noqa: TC003 - read at run time by msgspec
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

import msgspec

from shardwise.environment import cache_directory
from shardwise.errors import HardwareError
from shardwise.hardware.machine import Device  # noqa: TC001 - read at run time by msgspec
from shardwise.units import ELEMENT_BYTES

if TYPE_CHECKING:
    from pathlib import Path

    from shardwise.hardware.machine import NodeType


Origin = Literal["measured", "catalogue"]

_ALIGNED = 16
"""Alignment of matrix rows, in bytes, that the fast matmul kernels of GPUs require."""
_NEIGHBOURS = 4
"""Number of nearest measured points from which the rate of a shape is interpolated."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A value with its uncertainty and origin."""

    value: float
    uncertainty: float
    """Uncertainty as a fraction of the value, in both directions."""
    origin: Origin


def measured(value: float, uncertainty: float = 0.05) -> Figure:
    """Return a figure that was measured on this machine."""
    return Figure(value=value, uncertainty=uncertainty, origin="measured")


def listed(value: float, uncertainty: float) -> Figure:
    """Return a figure from the catalogue."""
    return Figure(value=value, uncertainty=uncertainty, origin="catalogue")


def is_aligned(size: int, dtype: str) -> bool:
    """Whether rows of `size` elements are aligned to 16 bytes."""
    return size * ELEMENT_BYTES[dtype] % _ALIGNED == 0


@dataclass(frozen=True, kw_only=True)
class MatmulPoint:
    """Measured rate of a matrix product (m, k) @ (k, n)."""

    m: int
    n: int
    k: int
    dtype: str
    flops: float
    """Achieved FLOP/s, counting 2mnk per product."""

    @property
    def aligned(self) -> bool:
        """Whether the rows of all three matrices are aligned to 16 bytes."""
        return all(is_aligned(size, self.dtype) for size in (self.m, self.n, self.k))


@dataclass(frozen=True, kw_only=True)
class GroupedPoint:
    """Measured rate of grouped matrix products: `groups` products (m / groups, k) @ (k, n), as of experts."""

    groups: int
    m: int
    """Rows of all groups together."""
    n: int
    k: int
    dtype: str
    flops: float
    """Achieved FLOP/s, counting 2mnk for all groups together."""


@dataclass(frozen=True, kw_only=True)
class AttentionPoint:
    """Measured rate of causal attention."""

    length: int
    head_dim: int
    dtype: str
    forward: float
    """Achieved FLOP/s, counting half of 4 x batch x heads x length^2 x head_dim because of the causal mask."""
    backward: float
    """Achieved FLOP/s, counting half of 10 x batch x heads x length^2 x head_dim."""


@dataclass(frozen=True, kw_only=True)
class CollectivePoints:
    """Measured time of a collective on a process group, by message size."""

    name: str
    """One of all_reduce, all_gather, reduce_scatter, broadcast, all_to_all and send."""
    ranks: int
    nodes: int
    points: tuple[tuple[int, float], ...]
    """(bytes, seconds) in ascending order; bytes of the full tensor: the output of all_gather, the input otherwise."""

    def seconds(self, num_bytes: float) -> float:
        """Return the time for a size: interpolated linearly, constant below the first point, extrapolated above."""
        first = self.points[0]
        if num_bytes <= first[0]:
            return first[1]
        if len(self.points) == 1:
            return first[1] * num_bytes / first[0]
        low, high = next((pair for pair in pairwise(self.points) if num_bytes <= pair[1][0]), self.points[-2:])
        slope = max(0.0, (high[1] - low[1]) / (high[0] - low[0]))
        return low[1] + slope * (num_bytes - low[0])


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Rates of a device, its host and its links; tables without measurements are empty."""

    version: int = 1
    device: Device
    machine: str = ""
    """Host name; empty for catalogue values."""
    date: str = ""
    torch: str = ""
    memory_bandwidth: Figure
    """Bytes per second that a large elementwise operator reads and writes."""
    operator_s: Figure
    """Host time in seconds to launch an operator eagerly."""
    kernel_s: Figure
    """Device time in seconds of the smallest kernel."""
    optimizer_bandwidth: Figure
    """Bytes of parameters, gradients and states per second that a fused AdamW step reads and writes."""
    host_optimizer_bandwidth: Figure
    """Bytes per second of the same step on the CPU, per rank while all ranks of the node run the optimizer."""
    to_host: Figure
    """Bytes per second of a copy from the device to pinned host memory."""
    from_host: Figure
    context_bytes: Figure
    """Device memory that the CUDA context and libraries allocate outside the caching allocator."""
    matmuls: tuple[MatmulPoint, ...] = ()
    attentions: tuple[AttentionPoint, ...] = ()
    collectives: tuple[CollectivePoints, ...] = ()
    grouped: tuple[GroupedPoint, ...] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)
    """Measurement -> reason why this machine does not support it: float8, grouped."""

    def grouped_matmul(self, groups: int, m: int, n: int, k: int, dtype: str) -> Figure:
        """Return the FLOP/s of `groups` products (m / groups, k) @ (k, n), which one kernel computes together."""
        rows = max(1, m // groups)
        base = self.matmul(rows, n, k, dtype)
        neighbours = []
        for point in self.grouped:
            if point.dtype == dtype:
                alone = self.matmul(max(1, point.m // point.groups), point.n, point.k, dtype).value
                sizes = (point.groups, max(1, point.m // point.groups), point.n, point.k)
                neighbours.append((_octaves(sizes, (groups, rows, n, k)), point.flops / alone))
        if not neighbours:
            return base
        return _corrected(base.value, neighbours, self._uncertainty)

    def matmul(self, m: int, n: int, k: int, dtype: str, *, aligned: bool = True) -> Figure:
        """Return the FLOP/s of (m, k) @ (k, n); `aligned` if the rows of all matrices are aligned to 16 bytes.

        For unaligned matrices, such as GPT-2's vocabulary of 50,257, GPUs use kernels of less than half the speed.
        """
        base = _matmul_rate(self.device, self.memory_bandwidth.value, (m, n, k), dtype)
        same_dtype = [point for point in self.matmuls if point.dtype == dtype]
        similar = [point for point in same_dtype if point.aligned == aligned] or same_dtype
        neighbours = [(_octaves((p.m, p.n, p.k), (m, n, k)), p.flops / self._base(p)) for p in similar]
        return _corrected(base, neighbours, self._uncertainty)

    def attention(self, length: int, head_dim: int, dtype: str, *, backward: bool = False) -> Figure:
        """Return the FLOP/s of causal attention, counted as in `AttentionPoint`."""
        base = _attention_rate(self.device, length, head_dim, dtype, backward=backward)
        neighbours = []
        for point in self.attentions:
            if point.dtype != dtype:
                continue
            rate = point.backward if backward else point.forward
            point_base = _attention_rate(self.device, point.length, point.head_dim, dtype, backward=backward)
            distance = _octaves((point.length, point.head_dim), (length, head_dim))
            neighbours.append((distance, rate / point_base))
        return _corrected(base, neighbours, self._uncertainty)

    def collective(self, name: str, ranks: int, nodes: int) -> CollectivePoints | None:
        """Return the measurements of a collective on a group of this size, or None."""
        found = (p for p in self.collectives if (p.name, p.ranks, p.nodes) == (name, ranks, nodes))
        return next(found, None)

    def _base(self, point: MatmulPoint) -> float:
        shape = (point.m, point.n, point.k)
        return _matmul_rate(self.device, self.memory_bandwidth.value, shape, point.dtype)

    @property
    def _uncertainty(self) -> float:
        return _catalogue_uncertainty(self.device)


def default_calibration(node: NodeType) -> Calibration:
    """Return a calibration from the catalogue values of a node, without measurements."""
    device, gpu = node.device, node.device.kind != "cpu"
    uncertainty = _catalogue_uncertainty(device)
    # On an H200, an elementwise copy achieves 4.2 of 4.8 TB/s and a pinned copy 55 of 63 GB/s.
    copy = listed(0.87 * node.host_link.bandwidth, uncertainty)
    return Calibration(
        device=device,
        memory_bandwidth=listed(0.87 * device.memory_bandwidth, uncertainty / 2),
        operator_s=listed(8e-6 if gpu else 5e-6, 0.5),
        kernel_s=listed(3e-6 if gpu else 1e-6, 0.5),
        optimizer_bandwidth=listed(0.8 * device.memory_bandwidth, uncertainty),
        # Two sockets with eight DDR4 or DDR5 channels achieve about 200 GB/s, which the ranks of a node share.
        host_optimizer_bandwidth=listed(200e9 / node.num_devices if gpu else 0.8 * device.memory_bandwidth, 0.4),
        to_host=copy,
        from_host=copy,
        context_bytes=listed(600 * 2**20 if gpu else 0, 0.3),
    )


def _catalogue_uncertainty(device: Device) -> float:
    return 0.35 if device.assumed else 0.2


def _matmul_rate(device: Device, memory_bandwidth: float, shape: tuple[int, int, int], dtype: str) -> float:
    """Return FLOP/s by a roofline model whose compute bound is lower for small K and for small outputs.

    The constants of GPUs: on an H200, K = 768 achieves 0.78 and K = 2048 0.94 to 1.0 of the rate of K = 8192; on an
    H100, an output of 2048 x 2048 achieves 0.86 to 0.95 of the rate of a large output. The constants of CPUs: on one
    core at K = 64, an output of 64 x 64 achieves 0.7 of the rate of a large output.
    """
    m, n, k = shape
    thin, small = (15, 1000) if device.kind == "cpu" else (180, 250_000)
    flat = device.sustained(dtype) * k / (k + thin) * (m * n) / (m * n + small)
    intensity = 2 * m * n * k / (ELEMENT_BYTES[dtype] * (m * k + k * n + m * n))
    return min(flat, intensity * memory_bandwidth)


def _attention_rate(device: Device, length: int, head_dim: int, dtype: str, *, backward: bool) -> float:
    """Return FLOP/s of fused causal attention.

    The formula is fitted to an H200 (cuDNN, bf16, forward and backward together): with a head dimension of 128,
    391 TFLOP/s at length 2048, 473 at 4096 and 532 at 8192; with a head dimension of 64, 230 at length 1024. On an
    A100, whose matrix units leave more time for the softmax, a head dimension of 64 reaches 0.91 of the rate of 128
    (FlashAttention-2, 171 and 189 TFLOP/s: Dao 2023, figure 4).
    """
    power = 0.14 if device.capability[:1] == (8,) else 0.4
    flat = 0.72 * device.sustained(dtype) * length / (length + 900) * min(1.0, math.pow(head_dim / 128, power))
    return flat * (0.94 if backward else 1.2)


def _octaves(a: tuple[int, ...], b: tuple[int, ...]) -> float:
    return math.dist([math.log2(x) for x in a], [math.log2(x) for x in b])


def _corrected(base: float, neighbours: list[tuple[float, float]], uncertainty: float) -> Figure:
    """Return `base` corrected by measured neighbours, each a pair (distance in octaves, measured / base).

    The correction is the geometric mean of the ratios of the nearest neighbours, weighted by distance. Distant
    neighbours are ignored: the roofline may be wrong by a factor of ten for small products even if it is right for
    large ones.
    """
    if not neighbours:
        return listed(base, uncertainty)
    nearest = sorted(neighbours)[:_NEIGHBOURS]
    weights = [1 / (distance**2 + 1e-6) for distance, _ in nearest]
    logs = [math.log(ratio) for _, ratio in nearest]
    ratio = math.exp(sum(w * log for w, log in zip(weights, logs, strict=True)) / sum(weights))
    return measured(base * ratio, min(uncertainty, 0.04 + 0.04 * nearest[0][0]))


# Calibrations on disk: one JSON file per device in the user's cache directory.


def calibration_for(node: NodeType, folder: Path | None = None) -> Calibration:
    """Return the calibration measured on this machine for the device of a node, else one from catalogue values."""
    return read_calibration(node.device, folder) or default_calibration(node)


def calibration_path(device: Device, folder: Path | None = None) -> Path:
    """Return the path of the calibration of a device; the file need not exist."""
    folder = folder or cache_directory() / "calibration"
    return folder / f"{re.sub(r'[^a-z0-9.]+', '-', device.name.lower())}.json"


def read_calibration(device: Device, folder: Path | None = None) -> Calibration | None:
    """Return the saved calibration of a device, or None if it does not exist; raises HardwareError if it is invalid."""
    path = calibration_path(device, folder)
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Calibration)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise HardwareError(
            f"calibration {path} cannot be read ({error})",
            code="hardware.calibration-read-failed",
            fix="remove the file, and measure again with shardwise plan --calibrate",
        ) from None
    if found.version != Calibration.version:
        raise HardwareError(
            f"calibration {path} has version {found.version}, expected {Calibration.version}",
            code="hardware.calibration-version",
            fix="remove the file, and measure again with shardwise plan --calibrate",
        )
    return found


def write_calibration(calibration: Calibration, folder: Path | None = None) -> Path:
    """Save a calibration for later plans, replacing an older one, and return its path."""
    path = calibration_path(calibration.device, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_bytes(msgspec.json.format(msgspec.json.encode(calibration)))
    part.replace(path)
    return path
