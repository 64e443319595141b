"""Our own checkpoint as the source or the target of a conversion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shardwise.checkpoint.convert.contents import BATCH_BYTES, Contents
from shardwise.checkpoint.errors import name_of
from shardwise.checkpoint.folder import CheckpointFolder, find_checkpoints
from shardwise.checkpoint.manifest import DTYPES, read_manifest
from shardwise.checkpoint.read import Filling
from shardwise.checkpoint.shard import ShardLayout
from shardwise.checkpoint.write import Draft
from shardwise.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from pathlib import Path


def read(path: Path) -> Contents:
    """Return what a checkpoint holds, of several the newest good one; bytes are checked when they are read."""
    found = find_checkpoints(path)
    if found != [path]:
        entry, damages = CheckpointFolder(found[0].parent).newest_good(deep=False)
        if entry is None:
            raise InputError(
                f"{path} holds no good checkpoint ({damages[0]})", code="checkpoint.none-usable", fix="name another one"
            )
        path = entry.path
    manifest = read_manifest(path)

    def get(names: Collection[str]) -> dict[str, Tensor]:
        entries = {name: manifest.tensors[name] for name in names}
        tensors = {name: torch.empty(entry.shape, dtype=DTYPES[entry.dtype]) for name, entry in entries.items()}
        filling = Filling(path, manifest, tensors)
        filling.plan()
        filling.check()
        filling.fill()
        return tensors

    return Contents(
        kind="shardwise",
        step=manifest.step,
        forms={name: (entry.dtype, entry.shape) for name, entry in manifest.tensors.items()},
        facts=manifest.facts,
        read=get,
    )


def write(contents: Contents, path: Path) -> list[str]:
    """Write a new checkpoint, which can hold everything, a few hundred megabytes at a time."""
    folder = path.with_name(path.name + ".saving")
    forms = {
        name: torch.empty(shape, dtype=DTYPES[code], device="meta") for name, (code, shape) in contents.forms.items()
    }
    Draft(folder, contents.step, forms, contents.facts, None).write(lambda: Streamed(contents))
    (folder / name_of(contents.step)).rename(path)
    for rest in folder.iterdir():
        rest.unlink()
    folder.rmdir()
    return []


class Streamed(Mapping[str, Tensor]):
    """Tensors of a checkpoint, read in parts in the order of a shard file; one part is in memory at a time."""

    def __init__(self, contents: Contents) -> None:
        self._contents = contents
        self._parts = contents.split(list(ShardLayout.of(contents.forms).places), BATCH_BYTES)
        self._part_of = {name: part for part in self._parts for name in part}
        self._held: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._held:
            self._held = {}  # before the next part comes, not after
            self._held = self._contents.read(self._part_of[name])
        return self._held[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._part_of)

    def __len__(self) -> int:
        return len(self._part_of)
