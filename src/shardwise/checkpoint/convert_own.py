"""Our own checkpoint as the source or the target of a conversion, and where one is when a folder of them is named."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shardwise.checkpoint.contents import Contents
from shardwise.checkpoint.dtypes import DTYPES
from shardwise.checkpoint.folder import CheckpointFolder
from shardwise.checkpoint.load import load
from shardwise.checkpoint.manifest import MANIFEST, read_manifest
from shardwise.checkpoint.names import name_of
from shardwise.checkpoint.save import save
from shardwise.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from torch import Tensor


def find_checkpoints(path: Path) -> list[Path]:
    """Return the checkpoints at `path`: itself, or all in that folder or run directory, in the order to try them."""
    if (path / MANIFEST).exists():
        return [path]
    for folder in (path, path / "checkpoints"):
        found = CheckpointFolder(folder).paths()
        if found:
            return found
    return []


def read(path: Path) -> Contents:
    """Return what a checkpoint holds, of several the newest good one; bytes are checked when they are read."""
    found = find_checkpoints(path)
    if found != [path]:
        entry, damages = CheckpointFolder(found[0].parent).newest_good(deep=False)
        if entry is None:
            raise InputError(f"{path} holds no good checkpoint ({damages[0]})", fix="name another one")
        path = entry.path
    manifest = read_manifest(path)

    def get(names: Collection[str]) -> dict[str, Tensor]:
        entries = {name: manifest.tensors[name] for name in names}
        tensors = {name: torch.empty(entry.shape, dtype=DTYPES[entry.dtype]) for name, entry in entries.items()}
        load(path, tensors, group=None, strict=False)
        return tensors

    return Contents(
        kind="shardwise",
        step=manifest.step,
        forms={name: (entry.dtype, entry.shape) for name, entry in manifest.tensors.items()},
        facts=manifest.facts,
        read=get,
    )


def write(contents: Contents, path: Path) -> list[str]:
    """Write a new checkpoint; it can hold everything."""
    folder = path.with_name(path.name + ".saving")
    save(folder, contents.step, contents.read(list(contents.forms)), contents.facts, group=None)
    (folder / name_of(contents.step)).rename(path)
    for rest in folder.iterdir():
        rest.unlink()
    folder.rmdir()
    return []
