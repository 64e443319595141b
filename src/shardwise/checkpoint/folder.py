"""A folder of checkpoints: which it holds, which to resume from, which retention removes; `ls`, `check` and `prune`."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.checkpoint.disk import remove_whole
from shardwise.checkpoint.errors import LATEST, DamagedError, nothing_more, parse_name, size_of, together
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


class CheckpointFolder:
    """The checkpoints under one folder, which need not exist yet; no communication."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    def latest(self) -> Path | None:
        """Return the checkpoint that was saved last, as the `latest` file names it; None without a usable one."""
        try:
            name = read_regular(self.path / LATEST, max_bytes=64).decode("ascii", errors="replace")
        except (OSError, DamagedError):
            return None
        path = self.path / name
        return path if parse_name(name) is not None and path.is_dir() else None

    def paths(self) -> list[Path]:
        """Return all checkpoints, sound or not, in the order to try them: `latest`, then the highest step first."""
        try:
            found = {path: parse_name(path.name) for path in self.path.iterdir()}
        except (FileNotFoundError, NotADirectoryError):
            return []
        latest = self.latest()
        known = [(path == latest, key, path) for path, key in found.items() if key is not None]
        return [path for *_, path in sorted(known, reverse=True)]

    def entries(self) -> list[CheckpointEntry]:
        """Return the checkpoints whose manifest can be read, the one saved first first."""
        entries = []
        for path in self.paths():
            with contextlib.suppress(DamagedError):
                entries.append(_entry(path))
        return sorted(entries, key=lambda entry: entry.saved_at)

    def newest_good(self, *, deep: bool) -> tuple[CheckpointEntry | None, list[Damage]]:
        """Return the first sound checkpoint in the order to try them, and what is wrong with those before it.

        `deep` reads every byte; otherwise manifests, sizes and headers are checked.
        """
        damages: list[Damage] = []
        for path in self.paths():
            found = find_damage(path, deep=deep)
            if not found:
                return _entry(path), damages
            damages += found
        return None, damages

    def prune(self, keep: Keep, *, deep: bool = False) -> list[Path]:
        """Remove what `keep` does not keep and return it; on one rank only.

        The newest good checkpoint stays in any case, and without a good one everything does. `deep` reads every byte
        to find it; without it a checkpoint that was just saved is trusted.
        """
        newest, _ = self.newest_good(deep=deep)
        if newest is None:
            return []
        removed = []
        for entry in to_remove(self.entries(), keep, now=time.time()):
            if entry.path != newest.path:
                remove_whole(entry.path)
                removed.append(entry.path)
        return removed


def find_checkpoints(path: Path) -> list[Path]:
    """Return the checkpoints at `path`: itself, or all in that folder or run directory, in the order to try them."""
    if (path / MANIFEST).exists():
        return [path]
    for folder in (path, path / "checkpoints"):
        found = CheckpointFolder(folder).paths()
        if found:
            return found
    return []


def load_newest(
    path: Path | str,
    allocate: Callable[[Manifest], Mapping[str, Tensor]],
    *,
    group: dist.ProcessGroup | None,
    strict: bool = True,
    announce: Callable[[Forecast], None] | None = None,
) -> LoadReport | None:
    """Load the newest good checkpoint at `path`; called on every rank, communicates over `group`.

    `path` is a run directory, a folder of checkpoints, or one. `allocate` returns the tensors to fill from the one
    whose manifest it is given: called on every rank, again for the next one where the bytes turn out to be damaged.
    Returns None if there is no checkpoint at all. Damaged ones are skipped and named in the report; if all are
    damaged, raises a DamagedError that names each. Otherwise as `load`.
    """
    doing = f"looking for checkpoints in {path}"
    paths, skipped = together(group, doing, lambda: None, lambda _: [_skip_damaged(Path(path))] * size_of(group))
    for each in paths:
        try:
            manifest = _read_together(each, group)
            report = load(each, allocate(manifest), group=group, strict=strict, announce=announce)
        except DamagedError as error:  # raised on every rank alike, so all continue with the next together
            skipped.append(error.fact)
        else:
            return dataclasses.replace(report, skipped=tuple(skipped))
    if skipped:
        raise DamagedError(
            f"no checkpoint in {path} can be used: {'; '.join(skipped)}",
            code="checkpoint.none-usable",
            fix="remove them to start over, or name another",
        )
    return None


def _skip_damaged(path: Path) -> tuple[list[Path], list[str]]:
    """Return the checkpoints at `path` up to the first with the right sizes and headers, and what the others lack.

    So that tensors are seldom allocated in vain: reading every byte is left to the load itself.
    """
    paths = find_checkpoints(path)
    skipped: list[str] = []
    for number, each in enumerate(paths):
        damages = find_damage(each, deep=False)
        if not damages:
            return paths[number:], skipped
        skipped += [damage.reason for damage in damages]
    return [], skipped


def _read_together(path: Path, group: dist.ProcessGroup | None) -> Manifest:
    """Read the manifest on every rank; communicates over `group`, so that all or none raise."""
    read: list[Manifest] = []
    together(group, f"loading {path}", lambda: read.append(read_manifest(path)), nothing_more)
    return read[0]


def _entry(path: Path) -> CheckpointEntry:
    manifest = read_manifest(path)
    return CheckpointEntry(path, manifest.step, manifest.saved_at, manifest.num_bytes, _metrics(manifest))


def _metrics(manifest: Manifest) -> dict[str, float]:
    """Return what `facts["metrics"]` holds, as far as it is numbers."""
    metrics: Any = manifest.facts.get("metrics")
    if not isinstance(metrics, dict):
        return {}
    return {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}


# Which checkpoints may go, by a run's rules: a decision, nothing is removed here.


@dataclass(frozen=True)
class CheckpointEntry:
    """One checkpoint in a folder, as its manifest describes it."""

    path: Path
    step: int
    saved_at: float
    """Seconds since 1970."""
    num_bytes: int
    metrics: dict[str, float]
    """What `facts["metrics"]` holds, as far as it is numbers."""


def to_remove(entries: Sequence[CheckpointEntry], keep: Keep, *, now: float) -> list[CheckpointEntry]:
    """Return the entries, given oldest first, that no rule of `keep` wants at time `now`; never the newest."""
    if keep.last is None and keep.age_s is None and not keep.best:
        return []
    staying = {entry.path for entry in entries[-(keep.last or 1) :]}
    if keep.age_s is not None:
        staying |= {entry.path for entry in entries if now - entry.saved_at < keep.age_s}
    measured = [entry for entry in entries if math.isfinite(entry.metrics.get(keep.metric, math.nan))]
    sign = -1 if keep.highest else 1
    ranked = sorted(measured, key=lambda entry: (sign * entry.metrics[keep.metric], -entry.saved_at))
    staying |= {entry.path for entry in ranked[: keep.best]}
    return [entry for entry in entries if entry.path not in staying]


# What `ls`, `check` and `prune` are asked.


def list_checkpoints(spec: ListSpec) -> ListReport:
    """Return every checkpoint at a path, by step; sizes and headers are looked at, not every byte."""
    return ListReport(rows=_list(spec.path, deep=False))


def check_checkpoints(spec: CheckSpec) -> CheckReport:
    """Read every byte of the checkpoints at a path and compare it with its checksum."""
    rows = _list(spec.path, deep=True)
    return CheckReport(rows=rows, exit_code=CHECK_FAILED if any(row.damages for row in rows) else DONE)


def prune_checkpoints(spec: PruneSpec) -> PruneReport:
    """Remove the checkpoints that no rule keeps; the newest good one stays in any case."""
    keep = parse_keep(spec.keep)
    rows = _list(spec.path, deep=False)
    if [row.path for row in rows] == [spec.path]:
        raise InputError(
            f"{spec.path} is one checkpoint",
            code="checkpoint.single-checkpoint",
            fix="name the run directory or the folder it is in",
        )
    metrics = {name for row in rows for name in row.metrics}
    if keep.metric and keep.metric not in metrics:
        raise InputError(
            f"no checkpoint in {spec.path} has a metric {keep.metric!r}",
            code="checkpoint.metric-unknown",
            fix=nearest(keep.metric, metrics) if metrics else "",
        )
    removed = CheckpointFolder(rows[0].path.parent).prune(keep, deep=True)
    return PruneReport(removed=tuple(removed), num_kept=len(rows) - len(removed))


def _list(path: Path, *, deep: bool) -> tuple[ListingRow, ...]:
    found = find_checkpoints(path)
    if not found:
        raise InputError(
            f"{path} holds no checkpoint",
            code="checkpoint.none-found",
            fix="name a run directory, its checkpoints folder, or one",
        )
    latest = CheckpointFolder(found[0].parent).latest()
    rows = [_row(each, is_latest=each == latest, deep=deep) for each in found]
    return tuple(sorted(rows, key=lambda row: (row.step or 0, row.path.name)))


def _row(path: Path, *, is_latest: bool, deep: bool) -> ListingRow:
    damages = tuple(map(str, find_damage(path, deep=deep)))
    try:
        manifest = read_manifest(path)
    except DamagedError:
        named = parse_name(path.name)
        return ListingRow(path=path, is_latest=is_latest, damages=damages, step=named[0] if named else None)
    return ListingRow(
        path=path,
        is_latest=is_latest,
        damages=damages,
        step=manifest.step,
        saved_at=manifest.saved_at,
        num_bytes=manifest.num_bytes,
        layout=str(manifest.facts.get("layout", "")),
        metrics=_metrics(manifest),
    )
