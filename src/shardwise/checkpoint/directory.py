"""Checkpoint directories: listing, selecting the checkpoint to resume from, verification and retention."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.checkpoint.disk import (
    DamagedError,
    no_results,
    remove_atomically,
    replace_synced,
    run_collectively,
    size_of,
)
from shardwise.checkpoint.manifest import read_manifest, read_regular
from shardwise.checkpoint.names import BEST, LATEST, MANIFEST, parse_name
from shardwise.checkpoint.read import load
from shardwise.checkpoint.shard import find_damage

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    import torch.distributed as dist
    from torch import Tensor

    from shardwise.checkpoint.manifest import Manifest
    from shardwise.checkpoint.read import Forecast, LoadReport
    from shardwise.checkpoint.shard import Damage
    from shardwise.runs.directory import Keep


class CheckpointDirectory:
    """The checkpoints in a directory, which need not exist. Methods do not communicate."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    def latest(self) -> Path | None:
        """Return the checkpoint named in the `latest` file, or None if the file or the checkpoint does not exist."""
        return self.named(LATEST)

    def named(self, file: str) -> Path | None:
        """Return the checkpoint named in a file, `latest` or `best`; None if the file or the checkpoint is missing."""
        try:
            name = read_regular(self.path / file, max_bytes=64).decode("ascii", errors="replace")
        except (OSError, DamagedError):
            return None
        path = self.path / name
        if parse_name(name) is None or not path.is_dir():
            return None
        return path

    def paths(self) -> list[Path]:
        """Return all checkpoints, including damaged ones: `latest` first, then by descending step."""
        try:
            found = [path for path in self.path.iterdir() if parse_name(path.name) is not None]
        except (FileNotFoundError, NotADirectoryError):
            return []
        latest = self.latest()
        return sorted(found, key=lambda path: (path == latest, parse_name(path.name), path), reverse=True)

    def entries(self) -> list[CheckpointEntry]:
        """Return the checkpoints with a readable manifest, ordered by the time they were saved."""
        entries = []
        for path in self.paths():
            with contextlib.suppress(DamagedError):
                entries.append(entry_of(path, read_manifest(path)))
        return sorted(entries, key=lambda entry: entry.saved_at)

    def newest_good(self, *, deep: bool) -> tuple[CheckpointEntry | None, list[Damage]]:
        """Return the newest intact checkpoint, or None, and the damage of newer checkpoints.

        With `deep`, all checksums are verified; otherwise only manifests, file sizes and headers.
        """
        damages: list[Damage] = []
        for path in self.paths():
            found = find_damage(path, deep=deep)
            if not found:
                return entry_of(path, read_manifest(path)), damages
            damages += found
        return None, damages

    def prune(self, keep: Keep, *, deep: bool = False, spare: Collection[Path] = ()) -> list[Path]:
        """Remove the checkpoints that no rule of `keep` retains and return their paths; call on one rank only.

        The newest intact checkpoint is never removed; if no checkpoint is intact, none is removed. With `deep`,
        checksums are verified to find it, which is not needed directly after a save. `spare` are not removed now.
        """
        newest, _ = self.newest_good(deep=deep)
        if newest is None:
            return []
        entries, removed = self.entries(), []
        for best in best_first(entries, keep)[:1]:
            with contextlib.suppress(OSError):  # a full disk must not end a training
                replace_synced(self.path / BEST, best.path.name.encode())
        for entry in to_remove(entries, keep, now=time.time()):
            if entry.path != newest.path and entry.path not in spare:
                remove_atomically(entry.path)
                removed.append(entry.path)
        return removed


def find_checkpoints(path: Path) -> list[Path]:
    """Return `path` itself if it is a checkpoint, else the checkpoints in that directory or run directory."""
    path = follow_name(path)
    if (path / MANIFEST).exists():
        return [path]
    for directory in (path, path / "checkpoints"):
        found = CheckpointDirectory(directory).paths()
        if found:
            return found
    return []


def follow_name(path: Path) -> Path:
    """Return the checkpoint that a file `latest` or `best` names, and other paths unchanged."""
    named = CheckpointDirectory(path.parent).named(path.name) if path.name in {LATEST, BEST} else None
    return named or path


def load_newest(
    path: Path | str,
    allocate: Callable[[Manifest], Mapping[str, Tensor]],
    *,
    group: dist.ProcessGroup | None,
    strict: bool = True,
    announce: Callable[[Forecast], None] | None = None,
) -> LoadReport | None:
    """Load the newest intact checkpoint at `path`. Communicates over `group`; call on every rank.

    `path` is a run directory, a directory of checkpoints, or a checkpoint. `allocate` receives a manifest and returns
    the tensors to load into; it is called again for the next checkpoint if a checksum is wrong. Damaged checkpoints
    are skipped and listed in the report. Returns None if no checkpoint exists and raises a DamagedError if all are
    damaged. `strict` and `announce` have the same meaning as in `load`.
    """
    operation = f"finding checkpoints in {path}"
    paths, skipped = run_collectively(
        group, operation, lambda: None, lambda _: [_skip_damaged(Path(path))] * size_of(group)
    )
    for each in paths:
        try:
            manifest = _read_on_all_ranks(each, group)
            report = load(each, allocate(manifest), group=group, strict=strict, announce=announce)
        except DamagedError as error:  # raised on all ranks, so that all ranks continue with the next checkpoint
            skipped.append(error.fact)
        else:
            return dataclasses.replace(report, skipped=tuple(skipped))
    if skipped:
        raise DamagedError(
            f"all checkpoints in {path} are damaged: {'; '.join(skipped)}",
            code="checkpoint.none-usable",
            fix="remove the damaged checkpoints to start from step 0, or pass a different checkpoint",
        )
    return None


def _skip_damaged(path: Path) -> tuple[list[Path], list[str]]:
    """Return the newest checkpoint with correct sizes and headers and all older ones, and the damage of newer ones.

    This cheap check avoids allocating tensors for a damaged checkpoint; `load` verifies the checksums.
    """
    paths = find_checkpoints(path)
    skipped: list[str] = []
    for number, each in enumerate(paths):
        damages = find_damage(each, deep=False)
        if not damages:
            return paths[number:], skipped
        skipped += [damage.reason for damage in damages]
    return [], skipped


def _read_on_all_ranks(path: Path, group: dist.ProcessGroup | None) -> Manifest:
    """Read the manifest; raise on all ranks if one rank fails. Communicates over `group`; call on every rank."""
    read: list[Manifest] = []
    run_collectively(group, f"loading {path}", lambda: read.append(read_manifest(path)), no_results)
    return read[0]


def entry_of(path: Path, manifest: Manifest) -> CheckpointEntry:
    """Return the entry of a checkpoint with this manifest."""
    return CheckpointEntry(path, manifest.step, manifest.saved_at, manifest.num_bytes, metrics_of(manifest))


def metrics_of(manifest: Manifest) -> dict[str, float]:
    """Return the numeric values of `facts["metrics"]`."""
    metrics: Any = manifest.facts.get("metrics")
    if not isinstance(metrics, dict):
        return {}
    return {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}


@dataclass(frozen=True)
class CheckpointEntry:
    """A checkpoint in a directory, described by its manifest."""

    path: Path
    step: int
    saved_at: float
    """Seconds since 1970."""
    num_bytes: int
    metrics: dict[str, float]
    """Numeric values of `facts["metrics"]`."""


def to_remove(entries: Sequence[CheckpointEntry], keep: Keep, *, now: float) -> list[CheckpointEntry]:
    """Return the entries that no rule of `keep` retains at time `now`, never the newest; `entries` are oldest first."""
    if keep.last is None and keep.age_s is None and not keep.best:
        return []
    retained = list(entries[-(keep.last or 1) :])
    if keep.age_s is not None:
        retained += [entry for entry in entries if now - entry.saved_at < keep.age_s]
    retained += best_first(entries, keep)[: keep.best]
    return [entry for entry in entries if entry not in retained]


def best_first(entries: Sequence[CheckpointEntry], keep: Keep) -> list[CheckpointEntry]:
    """Return the entries with a finite value of the metric of `keep`; of equal values the newest is the best."""
    measured = [entry for entry in entries if math.isfinite(entry.metrics.get(keep.metric, math.nan))]
    sign = -1 if keep.highest else 1
    return sorted(measured, key=lambda entry: (sign * entry.metrics[keep.metric], -entry.saved_at))
