"""Whether a checkpoint is sound: every file is looked at, none is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shardwise.checkpoint.errors import DamagedError
from shardwise.checkpoint.manifest import MANIFEST, read_manifest
from shardwise.checkpoint.shard import ShardReader, layouts_of


@dataclass(frozen=True)
class Damage:
    """One thing that is wrong with a checkpoint."""

    checkpoint: Path
    file: str
    reason: str
    code: str

    def __str__(self) -> str:
        return self.reason


def find_damage(path: Path | str, *, deep: bool) -> list[Damage]:
    """Return what is wrong with the checkpoint at `path`, one entry per damaged file; empty if it is sound.

    Sizes, headers and the manifest are always checked; `deep` also reads every byte and compares the checksums.
    """
    path = Path(path)
    try:
        manifest = read_manifest(path)
        layouts = layouts_of(path, manifest, manifest.files)
    except DamagedError as error:
        return [Damage(path, MANIFEST, error.fact, error.code)]
    checksums: dict[str, dict[str, str]] = {file: {} for file in manifest.files}
    for name, entry in manifest.tensors.items():
        for piece in entry.pieces:
            checksums[piece.file][name] = piece.checksum
    found = []
    for file, layout in layouts.items():
        try:
            with ShardReader(path / file, layout) as reader:
                reader.check(checksums[file] if deep else {})
        except DamagedError as error:
            found.append(Damage(path, file, error.fact, error.code))
    return found
