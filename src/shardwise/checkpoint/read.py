"""Loading: any layout from any layout, every byte checked before one is used, straight into place."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shardwise.checkpoint.errors import CheckpointError, DamagedError, MismatchError, nothing_more, size_of, together
from shardwise.checkpoint.manifest import CODES, read_manifest
from shardwise.checkpoint.pieces import local_data, overlaps
from shardwise.checkpoint.shard import ShardReader, find_damage, in_threads, layouts_of, memory_of
from shardwise.errors import some_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch.distributed as dist
    from torch import Tensor

    from shardwise.checkpoint.manifest import Manifest, Piece
    from shardwise.checkpoint.shard import ShardLayout


@dataclass(frozen=True)
class RankComparison:
    """How the tensors of all ranks and those of a checkpoint differ; the same on every rank."""

    restored: tuple[str, ...]
    missing: tuple[str, ...]
    """Asked for, not saved."""
    unexpected: tuple[str, ...]
    """Saved, asked for by no rank."""
    differing: tuple[str, ...]
    """Of another shape or dtype, each with both."""

    @property
    def is_equal(self) -> bool:
        """Whether everything asked for was saved, and nothing else."""
        return not (self.missing or self.unexpected or self.differing)

    def __str__(self) -> str:
        parts = []
        for count, names in (("missing", self.missing), ("unexpected", self.unexpected), ("differ", self.differing)):
            if names:
                parts.append(f"{len(names)} {count} ({some_of(names)})")
        return "; ".join(parts) or f"all {len(self.restored)} tensors match"


@dataclass(frozen=True)
class LoadReport:
    """What one load did."""

    path: Path
    step: int
    facts: dict[str, Any]
    comparison: RankComparison
    bytes_read: int
    """Bytes this rank put into place."""
    host_peak_bytes: int
    """Host memory this rank took besides its tensors."""
    seconds: float
    skipped: tuple[str, ...] = ()
    """Newer checkpoints that were passed over, each with the damaged file."""


def load(
    path: Path | str,
    tensors: Mapping[str, Tensor],
    *,
    group: dist.ProcessGroup | None,
    strict: bool = True,
    announce: Callable[[Forecast], None] | None = None,
) -> LoadReport:
    """Fill `tensors` in place from the checkpoint at `path`; called on every rank, communicates over `group`.

    Whatever layout saved it, each rank reads what falls into its own pieces. All bytes a rank needs are read and
    compared with their checksums first, on all ranks, so that a damaged checkpoint changes nothing. `strict` refuses
    when names, shapes or dtypes differ; otherwise tensors that match are filled and the rest is left and reported.
    `announce` receives on every rank what will be read, before it is. Without a group this process is the whole world.
    """
    began = time.perf_counter()
    path, doing = Path(path), f"loading {path}"
    known: dict[str, Manifest] = {}

    def look() -> _Findings:
        known["manifest"] = read_manifest(path)
        return _compare(known["manifest"], tensors)

    comparison = together(group, doing, look, lambda findings: [_merge(path, findings)] * size_of(group))
    if strict and not comparison.is_equal:
        raise MismatchError(
            f"{path} holds other tensors than asked for: {comparison}",
            code="checkpoint.tensors-mismatch",
            fix="load with strict=False",
        )
    manifest = known["manifest"]
    restored = set(comparison.restored)
    filling = Filling(path, manifest, {name: tensor for name, tensor in tensors.items() if name in restored})

    def check() -> None:
        forecast = filling.plan()
        if announce is not None:
            announce(forecast)
        filling.check()

    together(group, doing, check, nothing_more)
    together(group, doing, filling.fill, nothing_more)
    seconds = time.perf_counter() - began
    forecast = filling.forecast
    return LoadReport(
        path, manifest.step, manifest.facts, comparison, forecast.num_bytes, forecast.host_peak_bytes, seconds
    )


@dataclass(frozen=True)
class _Findings:
    """What one rank sees of the difference."""

    saved_at: float
    saved: frozenset[str]
    asked: tuple[str, ...]
    differing: dict[str, str]


def _compare(manifest: Manifest, tensors: Mapping[str, Tensor]) -> _Findings:
    differing = {}
    for name, tensor in tensors.items():
        entry = manifest.tensors.get(name)
        here = (CODES.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape))
        if entry is not None and (entry.dtype, entry.shape) != here:
            differing[name] = f"{name}: saved {entry.dtype} {list(entry.shape)}, here {here[0]} {list(here[1])}"
    return _Findings(manifest.saved_at, frozenset(manifest.tensors), tuple(tensors), differing)


def _merge(path: Path, findings: list[_Findings]) -> RankComparison:
    if len({found.saved_at for found in findings}) > 1:
        raise CheckpointError(
            "ranks read different manifests",
            code="checkpoint.manifests-differ",
            fix="load from storage that every node shares",
        )
    saved = findings[0].saved
    asked = dict.fromkeys(name for found in findings for name in found.asked)
    differing = {name: text for found in findings for name, text in found.differing.items()}
    comparison = RankComparison(
        restored=tuple(name for name in asked if name in saved and name not in differing),
        missing=tuple(name for name in asked if name not in saved),
        unexpected=tuple(sorted(saved - asked.keys())),
        differing=tuple(differing.values()),
    )
    if not comparison.is_equal:  # before the job is blamed: does the manifest agree with its own files?
        for damage in find_damage(path, deep=False):
            raise DamagedError(damage.reason, code=damage.code)
    return comparison


# One rank of a load: what to read, whether it is sound, and into which memory it goes.


BUFFER = 64 << 20
"""Most bytes that pass through a host buffer at once, unless a single row is larger."""


@dataclass(frozen=True)
class Forecast:
    """What a load will do on this rank."""

    num_bytes: int
    """Bytes to be put into place."""
    num_files: int
    host_peak_bytes: int
    """Host memory beside the tensors themselves."""

    def __str__(self) -> str:
        return (
            f"{self.num_bytes / 1e9:.3g} GB from {self.num_files} files,"
            f" host peak {self.host_peak_bytes / 1e6:.3g} MB beside the tensors"
        )


@dataclass(frozen=True)
class _Region:
    """A box of a saved piece, and the memory of this rank that it belongs in."""

    name: str
    piece: Piece
    offsets: tuple[int, ...]
    """In the piece; at least one dimension, as in `rows`."""
    rows: tuple[int, ...]
    """Shape of the piece."""
    target: Tensor

    @property
    def width(self) -> int:
        """Bytes of one row of the piece."""
        return math.prod(self.rows[1:]) * self.target.element_size()

    @property
    def is_direct(self) -> bool:
        """Whether the file's bytes are the target's bytes, so that no buffer is needed."""
        target = self.target
        return target.device.type == "cpu" and target.is_contiguous() and target.shape[1:] == self.rows[1:]

    @property
    def buffer_bytes(self) -> int:
        if self.is_direct:
            return 0
        return min(len(self.target) * self.width, max(BUFFER, self.width))


class Filling:
    """Fills tensors from a checkpoint whose manifest is known; no communication."""

    def __init__(self, path: Path, manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
        self._path = path
        self._manifest = manifest
        self._tensors = tensors
        self._regions: dict[str, list[_Region]] = {}
        self._layouts: dict[str, ShardLayout] = {}
        self.forecast = Forecast(0, 0, 0)

    def plan(self) -> Forecast:
        """Decide what to read; touches no shard file."""
        regions = [region for name, tensor in self._tensors.items() for region in self._regions_of(name, tensor)]
        for region in regions:
            self._regions.setdefault(region.piece.file, []).append(region)
        self._layouts = layouts_of(self._path, self._manifest, self._regions)
        self.forecast = Forecast(
            num_bytes=sum(region.target.nbytes for region in regions),
            num_files=len(self._regions),
            host_peak_bytes=max((region.buffer_bytes for region in regions), default=0),
        )
        return self.forecast

    def check(self) -> None:
        """Compare every piece that will be used with its checksum; a DamagedError names the first that differs."""
        for file, regions in self._regions.items():
            with ShardReader(self._path / file, self._layouts[file]) as reader:
                reader.check({region.name: region.piece.checksum for region in regions})

    @torch.no_grad()
    def fill(self) -> None:
        """Read everything into place."""
        on_device = any(region.target.is_cuda for regions in self._regions.values() for region in regions)
        buffer = torch.empty(self.forecast.host_peak_bytes, dtype=torch.uint8, pin_memory=on_device)
        for file, regions in self._regions.items():
            with ShardReader(self._path / file, self._layouts[file]) as reader:
                in_threads(partial(_read_direct, reader), [region for region in regions if region.is_direct])
                for region in regions:
                    if not region.is_direct:
                        _read_through(reader, region, buffer)

    def _regions_of(self, name: str, tensor: Tensor) -> list[_Region]:
        entry, data = self._manifest.tensors[name], local_data(tensor)
        regions = []
        for shared in overlaps(name, tensor, entry):
            target = data
            for dim, (first, length) in enumerate(zip(shared.box_offsets, shared.shape, strict=True)):
                target = target.narrow(dim, first, length)
            if tensor.ndim == 0:
                regions.append(_Region(name, shared.piece, (0,), (1,), target.view(1)))
            else:
                regions.append(_Region(name, shared.piece, shared.piece_offsets, shared.piece.shape, target))
        return regions


def _read_direct(reader: ShardReader, region: _Region) -> None:
    reader.read(region.name, region.offsets[0] * region.width, memory_of(region.target))


def _read_through(reader: ShardReader, region: _Region, buffer: Tensor) -> None:
    """Read whole rows of the piece, as many as the buffer holds, and copy the wanted columns."""
    at_once = max(1, len(buffer) // region.width)
    for first in range(0, len(region.target), at_once):
        target = region.target.narrow(0, first, min(at_once, len(region.target) - first))
        part = buffer[: len(target) * region.width]
        reader.read(region.name, (region.offsets[0] + first) * region.width, memory_of(part))
        block = part.view(target.dtype).view(len(target), *region.rows[1:])
        for dim in range(1, target.ndim):
            block = block.narrow(dim, region.offsets[dim], target.shape[dim])
        target.copy_(block)
