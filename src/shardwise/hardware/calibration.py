"""Measured rates of one machine, catalogue values where nothing was measured, and their file in the user's cache."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from shardwise.environment import cache_directory
from shardwise.errors import HardwareError
from shardwise.hardware.machine import Device  # noqa: TC001 - read at run time by msgspec
from shardwise.units import ELEMENT_BYTES

if TYPE_CHECKING:
    from pathlib import Path

    from shardwise.hardware.machine import NodeType


Origin = Literal["measured", "catalogue"]

_ALIGNED = 16
"""Bytes that a GPU's fast matrix kernels read at once."""
_NEIGHBOURS = 4
"""Measured points that speak for a shape between them."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A number that knows how sure it is, and why."""

    value: float
    uncertainty: float
    """Fraction of the value, either way."""
    origin: Origin


def measured(value: float, uncertainty: float = 0.05) -> Figure:
    """Return a figure that was measured on the machine at hand."""
    return Figure(value=value, uncertainty=uncertainty, origin="measured")


def listed(value: float, uncertainty: float) -> Figure:
    """Return a figure from the catalogue."""
    return Figure(value=value, uncertainty=uncertainty, origin="catalogue")


def is_aligned(size: int, dtype: str) -> bool:
    """Whether rows of so many numbers begin on 16 bytes each."""
    return size * ELEMENT_BYTES[dtype] % _ALIGNED == 0


@dataclass(frozen=True, kw_only=True)
class MatmulPoint:
    """One measured matrix product, (m, k) @ (k, n)."""

    m: int
    n: int
    k: int
    dtype: str
    flops: float
    """FLOP/s reached, 2mnk to the product."""

    @property
    def is_even(self) -> bool:
        """Whether rows of all its matrices begin on 16 bytes."""
        return all(is_aligned(size, self.dtype) for size in (self.m, self.n, self.k))


@dataclass(frozen=True, kw_only=True)
class AttentionPoint:
    """One measured causal attention."""

    length: int
    head_dim: int
    dtype: str
    forward: float
    """FLOP/s reached, counting half of 4 x batch x heads x length^2 x head_dim, since the mask leaves half."""
    backward: float
    """FLOP/s reached, counting half of 10 x the same product."""


@dataclass(frozen=True, kw_only=True)
class CollectivePoints:
    """Measured seconds of one collective on one group, by size."""

    name: str
    """all_reduce, all_gather, reduce_scatter, broadcast, all_to_all or send."""
    ranks: int
    nodes: int
    points: tuple[tuple[int, float], ...]
    """(bytes, seconds), ascending; bytes of the whole tensor: gathered output, input of a scatter, one rank's input."""

    def seconds(self, num_bytes: float) -> float:
        """Return seconds for any size: linear between points, level below them, by the last slope above."""
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
    """Rates of one device and its surroundings; tables are empty where nothing was measured."""

    version: int = 1
    device: Device
    machine: str = ""
    """Host name, empty for the catalogue."""
    date: str = ""
    torch: str = ""
    memory_bandwidth: Figure
    """Bytes read and written per second by a large elementwise operator."""
    operator_s: Figure
    """Host seconds to issue one operator eagerly."""
    kernel_s: Figure
    """Device seconds of the smallest kernel."""
    optimizer_bandwidth: Figure
    """Bytes of parameters, gradients and states read and written per second of a fused AdamW step."""
    host_optimizer_bandwidth: Figure
    """The same on the host, for one rank among those of its node."""
    to_host: Figure
    """Bytes per second of a pinned copy, each device."""
    from_host: Figure
    context_bytes: Figure
    """Device memory that context and libraries use outside the allocator."""
    matmuls: tuple[MatmulPoint, ...] = ()
    attentions: tuple[AttentionPoint, ...] = ()
    collectives: tuple[CollectivePoints, ...] = ()

    def matmul(self, m: int, n: int, k: int, dtype: str, *, is_even: bool = True) -> Figure:
        """Return FLOP/s of (m, k) @ (k, n), `is_even` where rows of all matrices begin on 16 bytes.

        Where they do not, as with GPT-2's vocabulary of 50,257, GPUs take kernels of less than half the speed.
        """
        base = _matmul_rate(self.device, self.memory_bandwidth.value, (m, n, k), dtype)
        known = [point for point in self.matmuls if point.dtype == dtype]
        alike = [point for point in known if point.is_even == is_even] or known
        near = [(_octaves((p.m, p.n, p.k), (m, n, k)), p.flops / self._base(p)) for p in alike]
        return _corrected(base, near, self._doubt)

    def attention(self, length: int, head_dim: int, dtype: str, *, backward: bool = False) -> Figure:
        """Return FLOP/s of causal attention, counted as `AttentionPoint` counts."""
        base = _attention_rate(self.device, length, head_dim, dtype, backward=backward)
        near = [
            (
                _octaves((p.length, p.head_dim), (length, head_dim)),
                (p.backward if backward else p.forward)
                / _attention_rate(self.device, p.length, p.head_dim, dtype, backward=backward),
            )
            for p in self.attentions
            if p.dtype == dtype
        ]
        return _corrected(base, near, self._doubt)

    def collective(self, name: str, ranks: int, nodes: int) -> CollectivePoints | None:
        """Return what was measured for exactly this collective and group."""
        found = (p for p in self.collectives if (p.name, p.ranks, p.nodes) == (name, ranks, nodes))
        return next(found, None)

    def _base(self, point: MatmulPoint) -> float:
        shape = (point.m, point.n, point.k)
        return _matmul_rate(self.device, self.memory_bandwidth.value, shape, point.dtype)

    @property
    def _doubt(self) -> float:
        return 0.35 if self.device.assumed else 0.2


def default_calibration(node: NodeType) -> Calibration:
    """Return the catalogue's figures of a node's devices, before anything was measured."""
    device, gpu = node.device, node.device.kind != "cpu"
    doubt = 0.35 if device.assumed else 0.2
    # One H200: an elementwise copy reaches 4.2 of 4.8 TB/s, a pinned copy 55 of 63 GB/s.
    copy = listed(0.87 * node.host_link.bandwidth, doubt)
    return Calibration(
        device=device,
        memory_bandwidth=listed(0.87 * device.memory_bandwidth, doubt / 2),
        operator_s=listed(8e-6 if gpu else 5e-6, 0.5),
        kernel_s=listed(3e-6 if gpu else 1e-6, 0.5),
        optimizer_bandwidth=listed(0.8 * device.memory_bandwidth, doubt),
        # Two sockets of eight DDR4 or DDR5 channels move about 200 GB/s, which the ranks of a node share.
        host_optimizer_bandwidth=listed(200e9 / node.num_devices if gpu else 0.8 * device.memory_bandwidth, 0.4),
        to_host=copy,
        from_host=copy,
        context_bytes=listed(600 * 2**20 if gpu else 0, 0.3),
    )


def _matmul_rate(device: Device, memory_bandwidth: float, shape: tuple[int, int, int], dtype: str) -> float:
    """Return FLOP/s by a roofline whose flat part sinks for thin and small products.

    The two constants of GPUs: on one H200 K = 768 reaches 0.78 and K = 2048 0.94 to 1.0 of what K = 8192 does, and an
    output of 2048 x 2048 reaches 0.86 to 0.95 of a large one on an H100. Those of a CPU: on one core an output of
    64 x 64 reaches 0.7 of a large one at K = 64.
    """
    m, n, k = shape
    thin, small = (15, 1000) if device.kind == "cpu" else (180, 250_000)
    flat = device.sustained(dtype) * k / (k + thin) * (m * n) / (m * n + small)
    intensity = 2 * m * n * k / (ELEMENT_BYTES[dtype] * (m * k + k * n + m * n))
    return min(flat, intensity * memory_bandwidth)


def _attention_rate(device: Device, length: int, head_dim: int, dtype: str, *, backward: bool) -> float:
    """Return FLOP/s of fused causal attention.

    Shape from one H200 (cuDNN, bf16, forward and backward together): 391 TFLOP/s at length 2048, 473 at 4096, 532 at
    8192 with heads of 128; 230 at 1024 with heads of 64.
    """
    flat = 0.72 * device.sustained(dtype) * length / (length + 900) * min(1.0, math.pow(head_dim / 128, 0.4))
    return flat * (0.94 if backward else 1.2)


def _octaves(a: tuple[int, ...], b: tuple[int, ...]) -> float:
    return math.dist([math.log2(x) for x in a], [math.log2(x) for x in b])


def _corrected(base: float, near: list[tuple[float, float]], doubt: float) -> Figure:
    """Scale `base` by what measured neighbours (distance in octaves, measured / base) did to it.

    Only the nearest count, and by the logarithm of their ratios: of small products `base` may be wrong by a factor of
    ten, which says nothing of large ones.
    """
    if not near:
        return listed(base, doubt)
    nearest = sorted(near)[:_NEIGHBOURS]
    weights = [1 / (distance**2 + 1e-6) for distance, _ in nearest]
    logs = [math.log(ratio) for _, ratio in nearest]
    ratio = math.exp(sum(w * log for w, log in zip(weights, logs, strict=True)) / sum(weights))
    return measured(base * ratio, min(doubt, 0.04 + 0.04 * nearest[0][0]))


# Calibrations on disk: one JSON file per device in the user's cache directory.


def calibration_for(node: NodeType, folder: Path | None = None) -> Calibration:
    """Return what was measured for a node's device on this machine, else the catalogue's figures."""
    return read_calibration(node.device, folder) or default_calibration(node)


def calibration_path(device: Device, folder: Path | None = None) -> Path:
    """Return the file of a device, which may not exist."""
    folder = folder or cache_directory() / "calibration"
    return folder / f"{re.sub(r'[^a-z0-9.]+', '-', device.name.lower())}.json"


def read_calibration(device: Device, folder: Path | None = None) -> Calibration | None:
    """Return what was measured for a device, None where nothing was; a file that cannot be read is refused."""
    import msgspec

    path = calibration_path(device, folder)
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Calibration)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise HardwareError(
            f"calibration {path} cannot be read ({error})",
            code="hardware.calibration-read-failed",
            fix="remove it, and measure again",
        ) from None
    if found.version != Calibration.version:
        raise HardwareError(
            f"calibration {path} has version {found.version}",
            code="hardware.calibration-version",
            fix="remove it, and measure again",
        )
    return found


def write_calibration(calibration: Calibration, folder: Path | None = None) -> Path:
    """Keep a calibration for later plans, in place of an older one; return its file."""
    import msgspec

    path = calibration_path(calibration.device, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_bytes(msgspec.json.format(msgspec.json.encode(calibration)))
    part.replace(path)
    return path
