"""What `ls` tells: every checkpoint under a path, sound or not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwise.checkpoint.check import find_damage
from shardwise.checkpoint.errors import DamagedError
from shardwise.checkpoint.folder import CheckpointFolder, find_checkpoints
from shardwise.checkpoint.manifest import read_manifest
from shardwise.checkpoint.names import parse_name
from shardwise.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

    from shardwise.checkpoint.check import Damage


@dataclass(frozen=True)
class Row:
    """One checkpoint; what its manifest would tell is None where that cannot be read."""

    path: Path
    is_latest: bool
    damages: tuple[Damage, ...]
    step: int | None
    saved_at: float | None
    """Seconds since 1970."""
    num_bytes: int | None
    layout: str
    metrics: dict[str, float]


def list_checkpoints(path: Path, *, deep: bool) -> list[Row]:
    """Return every checkpoint at `path`, by step; `deep` reads every byte to see whether it is sound."""
    found = find_checkpoints(path)
    if not found:
        raise InputError(
            f"{path} holds no checkpoint",
            code="checkpoint.none-found",
            fix="name a run directory, its checkpoints folder, or one",
        )
    latest = CheckpointFolder(found[0].parent).latest()
    return sorted(
        (_row(each, is_latest=each == latest, deep=deep) for each in found),
        key=lambda row: (row.step or 0, row.path.name),
    )


def _row(path: Path, *, is_latest: bool, deep: bool) -> Row:
    damages = tuple(find_damage(path, deep=deep))
    try:
        manifest = read_manifest(path)
    except DamagedError:
        named = parse_name(path.name)
        return Row(path, is_latest, damages, named[0] if named else None, None, None, "", {})
    metrics = manifest.facts.get("metrics")
    numbers = metrics.items() if isinstance(metrics, dict) else ()
    return Row(
        path,
        is_latest,
        damages,
        manifest.step,
        manifest.saved_at,
        manifest.num_bytes,
        str(manifest.facts.get("layout", "")),
        {name: float(value) for name, value in numbers if isinstance(value, int | float)},
    )
