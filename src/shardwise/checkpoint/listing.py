"""The commands `checkpoint ls`, `check` and `prune`, for local directories and, except `prune`, for object storage."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.checkpoint.directory import CheckpointDirectory, find_checkpoints, follow_name, metrics_of
from shardwise.checkpoint.disk import DamagedError
from shardwise.checkpoint.download import find_remote_damage, read_remote_manifest
from shardwise.checkpoint.manifest import read_manifest
from shardwise.checkpoint.names import BEST, LATEST, parse_name
from shardwise.checkpoint.remote import find_remote
from shardwise.checkpoint.shard import find_damage
from shardwise.checkpoint.spec import CheckReport, ListingRow, ListReport, PruneReport
from shardwise.errors import InputError, nearest
from shardwise.runs.console import CHECK_FAILED, DONE
from shardwise.runs.directory import parse_keep
from shardwise.spec import is_url

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.checkpoint.manifest import Manifest
    from shardwise.checkpoint.spec import CheckSpec, ListSpec, PruneSpec
    from shardwise.data.storage.locations import Location


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
    rows = _list_local(spec.path, deep=False)
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
    removed = CheckpointDirectory(find_checkpoints(spec.path)[0].parent).prune(keep, deep=True)
    return PruneReport(removed=tuple(removed), num_kept=len(rows) - len(removed))


def _list(path: str, *, deep: bool) -> tuple[ListingRow, ...]:
    rows = _list_remote(path, deep=deep) if is_url(path) else _list_local(Path(path), deep=deep)
    return tuple(sorted(rows, key=lambda row: (row.step or 0, row.path.name)))


def _list_local(path: Path, *, deep: bool) -> list[ListingRow]:
    found = find_checkpoints(path)
    if not found:
        raise InputError(
            f"{path} contains no checkpoint",
            code="checkpoint.none-found",
            fix="pass a run directory, a directory of checkpoints, or a checkpoint",
        )
    directory = CheckpointDirectory(found[0].parent)
    latest, best = directory.named(LATEST), directory.named(BEST)
    rows = []
    for each in found:
        damages = [str(damage) for damage in find_damage(each, deep=deep)]
        try:
            manifest = read_manifest(each)
        except DamagedError:
            manifest = None
        rows.append(_row(each, manifest, damages, is_latest=each == latest, is_best=each == best))
    return rows


def _list_remote(url: str, *, deep: bool) -> list[ListingRow]:
    remote, names = find_remote(url)
    latest, best = remote.named(LATEST), remote.named(BEST)
    rows = []
    for name in names:
        damages = find_remote_damage(remote, name, deep=deep)
        try:
            manifest, _ = read_remote_manifest(remote, name)
        except DamagedError:
            manifest = None
        rows.append(_row(remote.folder / name, manifest, damages, is_latest=name == latest, is_best=name == best))
    return rows


def _row(
    path: Location, manifest: Manifest | None, damages: Sequence[str], *, is_latest: bool, is_best: bool
) -> ListingRow:
    if manifest is None:
        step, _ = parse_name(path.name) or (None, None)
        return ListingRow(path=path, is_latest=is_latest, is_best=is_best, damages=tuple(damages), step=step)
    return ListingRow(
        path=path,
        is_latest=is_latest,
        is_best=is_best,
        damages=tuple(damages),
        step=manifest.step,
        saved_at=manifest.saved_at,
        num_bytes=manifest.num_bytes,
        layout=str(manifest.facts.get("layout", "")),
        metrics=metrics_of(manifest),
    )
