"""A folder of checkpoints: what is in it, which one to resume from, and what may go."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.checkpoint.agreement import size_of, together
from shardwise.checkpoint.check import find_damage
from shardwise.checkpoint.disk import remove_whole
from shardwise.checkpoint.errors import DamagedError
from shardwise.checkpoint.keep import Entry, to_remove
from shardwise.checkpoint.load import load
from shardwise.checkpoint.manifest import read_manifest, read_regular
from shardwise.checkpoint.names import LATEST, parse_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch.distributed as dist
    from torch import Tensor

    from shardwise.checkpoint.check import Damage
    from shardwise.checkpoint.fill import Forecast
    from shardwise.checkpoint.keep import Keep
    from shardwise.checkpoint.load import LoadReport


class CheckpointFolder:
    """The checkpoints under one folder, which need not exist yet; no communication."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    def latest(self) -> Path | None:
        """Return the checkpoint that was saved last, as the `latest` file tells; None without a usable one."""
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

    def entries(self) -> list[Entry]:
        """Return the checkpoints whose manifest can be read, the one saved first first."""
        entries = []
        for path in self.paths():
            with contextlib.suppress(DamagedError):
                entries.append(_entry(path))
        return sorted(entries, key=lambda entry: entry.saved_at)

    def newest_good(self, *, deep: bool) -> tuple[Entry | None, list[Damage]]:
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
        """Remove what `keep` does not want and return it; on one rank only.

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


def load_newest(
    folder: Path | str,
    tensors: Mapping[str, Tensor],
    *,
    group: dist.ProcessGroup | None,
    strict: bool = True,
    announce: Callable[[Forecast], None] | None = None,
) -> LoadReport | None:
    """Load the newest good checkpoint of `folder`; called on every rank, communicates over `group`.

    Returns None if there is no checkpoint at all. Damaged ones are skipped and named in the report; if all are
    damaged, raises a DamagedError that names each. Otherwise as `load`.
    """
    listed = CheckpointFolder(folder)
    paths = together(group, f"listing {folder}", lambda: None, lambda _: [listed.paths()] * size_of(group))
    skipped: list[str] = []
    for path in paths:
        try:
            report = load(path, tensors, group=group, strict=strict, announce=announce)
        except DamagedError as error:  # raised on every rank alike, so all go on to the next together
            skipped.append(error.fact)
        else:
            return dataclasses.replace(report, skipped=tuple(skipped))
    if skipped:
        raise DamagedError(f"no checkpoint in {folder} can be used: {'; '.join(skipped)}")
    return None


def _entry(path: Path) -> Entry:
    manifest = read_manifest(path)
    metrics: Any = manifest.facts.get("metrics")
    numbers = {
        name: float(value)
        for name, value in (metrics.items() if isinstance(metrics, dict) else ())
        if isinstance(value, int | float)
    }
    return Entry(path, manifest.step, manifest.saved_at, manifest.num_bytes, numbers)
