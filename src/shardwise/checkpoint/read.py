"""Checkpoint loading with resharding: all checksums are verified before bytes are read into the target tensors."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shardwise.checkpoint.disk import (
    CheckpointError,
    DamagedError,
    MismatchError,
    no_results,
    run_collectively,
    size_of,
)
from shardwise.checkpoint.manifest import CODES, local_data, overlaps, read_manifest
from shardwise.checkpoint.shard import ShardReader, byte_view, find_damage, in_threads, layouts_of
from shardwise.errors import some_of
from shardwise.runs.console import counted
from shardwise.units import format_bytes_si

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch.distributed as dist
    from torch import Tensor

    from shardwise.checkpoint.manifest import Manifest, Piece
    from shardwise.checkpoint.shard import ShardLayout


@dataclass(frozen=True)
class RankComparison:
    """The differences between the tensors that ranks requested and the tensors of a checkpoint; equal on all ranks."""

    restored: tuple[str, ...]
    missing: tuple[str, ...]
    """Requested tensors that the checkpoint does not contain."""
    unexpected: tuple[str, ...]
    """Tensors of the checkpoint that no rank requested."""
    differing: tuple[str, ...]
    """Tensors with a different shape or dtype, each with both values."""

    @property
    def is_equal(self) -> bool:
        """Whether the checkpoint contains exactly the requested tensors."""
        return not (self.missing or self.unexpected or self.differing)

    def __str__(self) -> str:
        parts = []
        for label, names in (("missing", self.missing), ("unexpected", self.unexpected), ("differ", self.differing)):
            if names:
                parts.append(f"{len(names)} {label} ({some_of(names)})")
        return "; ".join(parts) or f"all {len(self.restored)} tensors match"


@dataclass(frozen=True)
class LoadReport:
    """The result of loading a checkpoint."""

    path: Path
    step: int
    facts: dict[str, Any]
    comparison: RankComparison
    bytes_read: int
    """Number of bytes that this rank read into its tensors."""
    host_peak_bytes: int
    """Peak host memory of the read buffers on this rank, in bytes."""
    seconds: float
    skipped: tuple[str, ...] = ()
    """The damage of each newer checkpoint that was skipped."""


def load(
    path: Path | str,
    tensors: Mapping[str, Tensor],
    *,
    group: dist.ProcessGroup | None,
    strict: bool = True,
    announce: Callable[[Forecast], None] | None = None,
) -> LoadReport:
    """Load the checkpoint at `path` into `tensors` in place. Communicates over `group`; call on every rank.

    The checkpoint may have been saved on any layout: each rank reads the bytes of its own shards. All ranks first
    verify the checksums of the bytes they need, so that a damaged checkpoint modifies no tensor. With `strict`,
    different names, shapes or dtypes raise a MismatchError; otherwise only the matching tensors are loaded.
    `announce` receives a Forecast on every rank before reading starts. `group` is None in a world of one rank.
    """
    start = time.perf_counter()
    path, operation = Path(path), f"loading {path}"
    read: dict[str, Manifest] = {}

    def compare() -> _RankTensors:
        read["manifest"] = read_manifest(path)
        return _compare(read["manifest"], tensors)

    comparison = run_collectively(group, operation, compare, lambda ranks: [_merge(path, ranks)] * size_of(group))
    if strict and not comparison.is_equal:
        raise MismatchError(
            f"the tensors in {path} do not match the requested tensors: {comparison}",
            code="checkpoint.tensors-mismatch",
            fix="load with strict=False",
        )
    manifest = read["manifest"]
    loader = TensorLoader(path, manifest, {name: tensors[name] for name in comparison.restored if name in tensors})

    def check() -> None:
        forecast = loader.plan()
        if announce is not None:
            announce(forecast)
        loader.check()

    run_collectively(group, operation, check, no_results)
    run_collectively(group, operation, loader.fill, no_results)
    seconds = time.perf_counter() - start
    forecast = loader.forecast
    return LoadReport(
        path, manifest.step, manifest.facts, comparison, forecast.num_bytes, forecast.host_peak_bytes, seconds
    )


@dataclass(frozen=True)
class _RankTensors:
    """The tensors that one rank requested, compared with the manifest that it read."""

    saved_at: float
    saved: frozenset[str]
    requested: tuple[str, ...]
    differing: dict[str, str]


def _compare(manifest: Manifest, tensors: Mapping[str, Tensor]) -> _RankTensors:
    differing = {}
    for name, tensor in tensors.items():
        entry = manifest.tensors.get(name)
        dtype, shape = CODES.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape)
        if entry is not None and (entry.dtype, entry.shape) != (dtype, shape):
            differing[name] = f"{name}: saved {entry.dtype} {list(entry.shape)}, requested {dtype} {list(shape)}"
    return _RankTensors(manifest.saved_at, frozenset(manifest.tensors), tuple(tensors), differing)


def _merge(path: Path, ranks: list[_RankTensors]) -> RankComparison:
    if len({rank.saved_at for rank in ranks}) > 1:
        raise CheckpointError(
            f"ranks read different manifests of {path}",
            code="checkpoint.manifests-differ",
            fix="load from a file system shared by all nodes",
        )
    saved = ranks[0].saved
    requested: dict[str, None] = {}
    differing: dict[str, str] = {}
    for rank in ranks:
        requested |= dict.fromkeys(rank.requested)
        differing |= rank.differing
    comparison = RankComparison(
        restored=tuple(name for name in requested if name in saved and name not in differing),
        missing=tuple(name for name in requested if name not in saved),
        unexpected=tuple(sorted(saved - requested.keys())),
        differing=tuple(differing.values()),
    )
    if not comparison.is_equal:  # a damaged checkpoint is the more likely cause
        for damage in find_damage(path, deep=False):
            raise DamagedError(damage.reason, code=damage.code)
    return comparison


BUFFER = 64 << 20
"""Maximum size of the host read buffer in bytes, unless a single row is larger."""


@dataclass(frozen=True)
class Forecast:
    """The amount of data that a load will read on this rank."""

    num_bytes: int
    """Number of bytes to read into tensors."""
    num_files: int
    host_peak_bytes: int
    """Size of the host read buffer in bytes; 0 if all bytes are read directly into the tensors."""

    def __str__(self) -> str:
        text = f"{format_bytes_si(self.num_bytes)} from {counted(self.num_files, 'file')}"
        if not self.host_peak_bytes:
            return text
        return f"{text}, with a read buffer of {format_bytes_si(self.host_peak_bytes)} in host memory"


@dataclass(frozen=True)
class _Region:
    """The overlap of a saved piece with a local shard, and the memory of the shard to read it into."""

    name: str
    piece: Piece
    offsets: tuple[int, ...]
    """Offsets in the piece. Like `rows`, they have at least one dimension."""
    rows: tuple[int, ...]
    """Shape of the piece."""
    target: Tensor

    @property
    def width(self) -> int:
        """Size of one row of the piece in bytes."""
        return math.prod(self.rows[1:]) * self.target.element_size()

    @property
    def is_direct(self) -> bool:
        """Whether the bytes can be read into the target memory without a buffer."""
        target = self.target
        return target.device.type == "cpu" and target.is_contiguous() and target.shape[1:] == self.rows[1:]

    @property
    def buffer_bytes(self) -> int:
        if self.is_direct:
            return 0
        return min(len(self.target) * self.width, max(BUFFER, self.width))


class TensorLoader:
    """Reads the local shards of tensors from a checkpoint, without communication."""

    def __init__(self, path: Path, manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
        self._path = path
        self._manifest = manifest
        self._tensors = tensors
        self._regions: dict[str, list[_Region]] = {}
        self._layouts: dict[str, ShardLayout] = {}
        self.forecast = Forecast(0, 0, 0)

    def plan(self) -> Forecast:
        """Compute the byte ranges to read, without opening a shard file."""
        num_bytes = host_peak_bytes = 0
        for name, tensor in self._tensors.items():
            for region in self._regions_of(name, tensor):
                self._regions.setdefault(region.piece.file, []).append(region)
                num_bytes += region.target.nbytes
                host_peak_bytes = max(host_peak_bytes, region.buffer_bytes)
        self._layouts = layouts_of(self._path, self._manifest, self._regions)
        self.forecast = Forecast(num_bytes, len(self._regions), host_peak_bytes)
        return self.forecast

    def check(self) -> None:
        """Verify the checksum of every required piece; raise a DamagedError for the first mismatch."""
        for file, regions in self._regions.items():
            with ShardReader(self._path / file, self._layouts[file]) as reader:
                reader.check({region.name: region.piece.checksum for region in regions})

    @torch.no_grad()
    def fill(self) -> None:
        """Read the required pieces into the tensors."""
        on_device = any(local_data(tensor).is_cuda for tensor in self._tensors.values())
        buffer = torch.empty(self.forecast.host_peak_bytes, dtype=torch.uint8, pin_memory=on_device)
        for file, regions in self._regions.items():
            with ShardReader(self._path / file, self._layouts[file]) as reader:
                in_threads(partial(_read_direct, reader), [region for region in regions if region.is_direct])
                for region in regions:
                    if not region.is_direct:
                        _read_buffered(reader, region, buffer)

    def _regions_of(self, name: str, tensor: Tensor) -> list[_Region]:
        entry, data = self._manifest.tensors[name], local_data(tensor)
        regions = []
        for overlap in overlaps(name, tensor, entry):
            target = data
            for dim, (first, length) in enumerate(zip(overlap.box_offsets, overlap.shape, strict=True)):
                target = target.narrow(dim, first, length)
            if tensor.ndim == 0:
                regions.append(_Region(name, overlap.piece, (0,), (1,), target.view(1)))
            else:
                regions.append(_Region(name, overlap.piece, overlap.piece_offsets, overlap.piece.shape, target))
        return regions


def _read_direct(reader: ShardReader, region: _Region) -> None:
    reader.read(region.name, region.offsets[0] * region.width, byte_view(region.target))


def _read_buffered(reader: ShardReader, region: _Region, buffer: Tensor) -> None:
    """Read full rows of the piece into the buffer, as many as fit, and copy the required columns to the target."""
    num_rows = max(1, len(buffer) // region.width)
    for first in range(0, len(region.target), num_rows):
        target = region.target.narrow(0, first, min(num_rows, len(region.target) - first))
        part = buffer[: len(target) * region.width]
        reader.read(region.name, (region.offsets[0] + first) * region.width, byte_view(part))
        block = part.view(target.dtype).view(len(target), *region.rows[1:])
        for dim in range(1, target.ndim):
            block = block.narrow(dim, region.offsets[dim], target.shape[dim])
        target.copy_(block)
