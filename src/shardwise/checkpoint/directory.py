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
    BEST,
    LATEST,
    DamagedError,
    no_results,
    parse_name,
    remove_atomically,
    replace_synced,
    run_collectively,
    size_of,
)
from shardwise.checkpoint.manifest import MANIFEST, read_manifest, read_regular
from shardwise.checkpoint.read import load
from shardwise.checkpoint.shard import find_damage
from shardwise.checkpoint.spec import CheckReport, ListingRow, ListReport, PruneReport
from shardwise.errors import InputError, nearest
from shardwise.runs.console import CHECK_FAILED, DONE
from shardwise.runs.directory import parse_keep

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch.distributed as dist
    from torch import Tensor

    from shardwise.checkpoint.manifest import Manifest
    from shardwise.checkpoint.read import Forecast, LoadReport
    from shardwise.checkpoint.shard import Damage
    from shardwise.checkpoint.spec import CheckSpec, ListSpec, PruneSpec
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
                entries.append(_entry(path))
        return sorted(entries, key=lambda entry: entry.saved_at)

    def newest_good(self, *, deep: bool) -> tuple[CheckpointEntry | None, list[Damage]]:
        """Return the newest intact checkpoint, or None, and the damage of newer checkpoints.

        With `deep`, all checksums are verified; otherwise only manifests, file sizes and headers.
        """
        damages: list[Damage] = []
        for path in self.paths():
            found = find_damage(path, deep=deep)
            if not found:
                return _entry(path), damages
            damages += found
        return None, damages

    def prune(self, keep: Keep, *, deep: bool = False) -> list[Path]:
        """Remove the checkpoints that no rule of `keep` retains and return their paths; call on one rank only.

        The newest intact checkpoint is never removed; if no checkpoint is intact, none is removed. With `deep`,
        checksums are verified to find it, which is not needed directly after a save.
        """
        newest, _ = self.newest_good(deep=deep)
        if newest is None:
            return []
        entries, removed = self.entries(), []
        for best in _best_first(entries, keep)[:1]:
            with contextlib.suppress(OSError):  # a full disk must not end a training
                replace_synced(self.path / BEST, best.path.name.encode())
        for entry in to_remove(entries, keep, now=time.time()):
            if entry.path != newest.path:
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


def _entry(path: Path) -> CheckpointEntry:
    manifest = read_manifest(path)
    return CheckpointEntry(path, manifest.step, manifest.saved_at, manifest.num_bytes, _metrics(manifest))


def _metrics(manifest: Manifest) -> dict[str, float]:
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
    retained += _best_first(entries, keep)[: keep.best]
    return [entry for entry in entries if entry not in retained]


def _best_first(entries: Sequence[CheckpointEntry], keep: Keep) -> list[CheckpointEntry]:
    """Return the entries with a finite value of the metric of `keep`; of equal values the newest is the best."""
    measured = [entry for entry in entries if math.isfinite(entry.metrics.get(keep.metric, math.nan))]
    sign = -1 if keep.highest else 1
    return sorted(measured, key=lambda entry: (sign * entry.metrics[keep.metric], -entry.saved_at))


def list_checkpoints(spec: ListSpec) -> ListReport:
    """List the checkpoints at a path by step, checking manifests, file sizes and headers."""
    return ListReport(rows=_list(spec.path, deep=False))


def check_checkpoints(spec: CheckSpec) -> CheckReport:
    """Verify the checksums of the checkpoints at a path."""
    rows = _list(spec.path, deep=True)
    return CheckReport(rows=rows, exit_code=CHECK_FAILED if any(row.damages for row in rows) else DONE)


def prune_checkpoints(spec: PruneSpec) -> PruneReport:
    """Remove the checkpoints that no rule retains, except the newest intact checkpoint."""
    keep = parse_keep(spec.keep)
    rows = _list(spec.path, deep=False)
    if [row.path for row in rows] == [follow_name(spec.path)]:
        raise InputError(
            f"{spec.path} must be a directory of checkpoints, got a single checkpoint",
            code="checkpoint.single-checkpoint",
            fix="pass the run directory or the parent directory",
        )
    metrics = set().union(*(row.metrics for row in rows))
    if keep.metric and keep.metric not in metrics:
        raise InputError(
            f"no checkpoint in {spec.path} contains the metric {keep.metric!r}",
            code="checkpoint.metric-unknown",
            fix=nearest(keep.metric, metrics) if metrics else "use a count or an age, such as --keep 3 or --keep 2d",
        )
    removed = CheckpointDirectory(rows[0].path.parent).prune(keep, deep=True)
    return PruneReport(removed=tuple(removed), num_kept=len(rows) - len(removed))


def _list(path: Path, *, deep: bool) -> tuple[ListingRow, ...]:
    found = find_checkpoints(path)
    if not found:
        raise InputError(
            f"{path} contains no checkpoint",
            code="checkpoint.none-found",
            fix="pass a run directory, a directory of checkpoints, or a checkpoint",
        )
    directory = CheckpointDirectory(found[0].parent)
    latest, best = directory.named(LATEST), directory.named(BEST)
    rows = [_row(each, is_latest=each == latest, is_best=each == best, deep=deep) for each in found]
    return tuple(sorted(rows, key=lambda row: (row.step or 0, row.path.name)))


def _row(path: Path, *, is_latest: bool, is_best: bool, deep: bool) -> ListingRow:
    damages = tuple(map(str, find_damage(path, deep=deep)))
    try:
        manifest = read_manifest(path)
    except DamagedError:
        step, _ = parse_name(path.name) or (None, None)
        return ListingRow(path=path, is_latest=is_latest, is_best=is_best, damages=damages, step=step)
    return ListingRow(
        path=path,
        is_latest=is_latest,
        is_best=is_best,
        damages=damages,
        step=manifest.step,
        saved_at=manifest.saved_at,
        num_bytes=manifest.num_bytes,
        layout=str(manifest.facts.get("layout", "")),
        metrics=_metrics(manifest),
    )
