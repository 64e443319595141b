"""Loading: any layout from any layout, every byte checked before one is used, straight into place."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.checkpoint.agreement import nothing_more, size_of, together
from shardwise.checkpoint.check import find_damage
from shardwise.checkpoint.dtypes import CODES
from shardwise.checkpoint.errors import CheckpointError, DamagedError, MismatchError
from shardwise.checkpoint.fill import Filling
from shardwise.checkpoint.manifest import read_manifest
from shardwise.errors import some_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch.distributed as dist
    from torch import Tensor

    from shardwise.checkpoint.fill import Forecast
    from shardwise.checkpoint.manifest import Manifest


@dataclass(frozen=True)
class Comparison:
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
    comparison: Comparison
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
    `announce` hears on every rank what will be read, before it is. Without a group this process is the whole world.
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


def _merge(path: Path, findings: list[_Findings]) -> Comparison:
    if len({found.saved_at for found in findings}) > 1:
        raise CheckpointError(
            "ranks read different manifests",
            code="checkpoint.manifests-differ",
            fix="load from storage that every node shares",
        )
    saved = findings[0].saved
    asked = dict.fromkeys(name for found in findings for name in found.asked)
    differing = {name: words for found in findings for name, words in found.differing.items()}
    comparison = Comparison(
        restored=tuple(name for name in asked if name in saved and name not in differing),
        missing=tuple(name for name in asked if name not in saved),
        unexpected=tuple(sorted(saved - asked.keys())),
        differing=tuple(differing.values()),
    )
    if not comparison.is_equal:  # before the job is blamed: does the manifest agree with its own files?
        for damage in find_damage(path, deep=False):
            raise DamagedError(damage.reason, code=damage.code)
    return comparison
