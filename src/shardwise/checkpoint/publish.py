"""Rank 0's part of a save: the temporary folder, the manifest, and the moment when the checkpoint becomes visible."""

from __future__ import annotations

import contextlib
import shutil
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardwise.checkpoint.disk import (
    lock,
    remove_whole,
    replace_synced,
    sweep,
    sync_folder,
    temporary_name,
    unlock,
    write_synced,
)
from shardwise.checkpoint.errors import CheckpointError
from shardwise.checkpoint.manifest import MANIFEST, Manifest, Piece, TensorEntry, encode, find_problem
from shardwise.checkpoint.names import LATEST, name_of, parse_name
from shardwise.checkpoint.pieces import assign

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from shardwise.checkpoint.pieces import Form, Proposal


@dataclass(frozen=True)
class Order:
    """What one rank is told to write, and where."""

    temporary: Path
    maker: str
    """Host on which rank 0 made that folder."""
    names: list[str]


@dataclass(frozen=True)
class Written:
    """What one rank has written; no file at all where it had nothing to write."""

    file: str
    size: int
    pieces: dict[str, Piece]


@dataclass(frozen=True)
class Published:
    """The checkpoint as all ranks hear of it."""

    path: Path
    num_bytes: int


class Publication:
    """One save from the temporary folder to the moment it is seen; on ranks other than 0 it does nothing."""

    def __init__(self, folder: Path, step: int) -> None:
        self._folder = folder
        self._step = step
        self._temporary: Path | None = None
        self._lock: int | None = None
        self._forms: dict[str, Form] = {}

    def open(self, proposals: list[Proposal]) -> list[Order]:
        """Lock the folder, clear what dead saves left, make the temporary folder, and tell each rank its part."""
        chosen, self._forms = assign(proposals)
        self._folder.mkdir(exist_ok=True)  # not its parents: if those have vanished, say so
        self._lock = lock(self._folder)
        sweep(self._folder)
        self._temporary = self._folder / temporary_name(name_of(self._step))
        self._temporary.mkdir()
        return [Order(self._temporary, socket.gethostname(), names) for names in chosen]

    def publish(self, temporary: Path, results: list[Written], facts: dict[str, Any]) -> list[Published]:
        """Check what all ranks wrote, write the manifest, give the folder its name, and move `latest`."""
        manifest = self._manifest(results, facts)
        for file, size in manifest.files.items():
            found = (temporary / file).stat().st_size
            if found != size:
                raise CheckpointError(
                    f"{temporary / file} has {found} bytes after {size} were written",
                    code="checkpoint.write-incomplete",
                )
        write_synced(temporary / MANIFEST, encode(manifest))
        sync_folder(temporary)
        older = _saves_of(self._step, self._folder)
        attempt = max((parse_name(path.name) or (0, 0))[1] for path in older) + 1 if older else 1
        path = self._folder / name_of(self._step, attempt)
        temporary.rename(path)
        self._temporary = None
        sync_folder(self._folder)
        replace_synced(self._folder / LATEST, path.name.encode())
        for replaced in older:
            with contextlib.suppress(OSError):  # the new one is safe: an old one that stays does no harm
                remove_whole(replaced)
        return [Published(path, manifest.num_bytes)] * len(results)

    def close(self) -> None:
        """Remove what was not published and let the folder go; safe to call twice."""
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary = None
        if self._lock is not None:
            unlock(self._lock)
            self._lock = None

    def _manifest(self, results: Sequence[Written], facts: dict[str, Any]) -> Manifest:
        pieces: dict[str, list[Piece]] = {name: [] for name in self._forms}
        for result in results:
            for name, piece in result.pieces.items():
                pieces[name].append(piece)
        manifest = Manifest(
            step=self._step,
            saved_at=time.time(),
            facts=facts,
            files={result.file: result.size for result in results if result.pieces},
            tensors={
                name: TensorEntry(shape, dtype, tuple(pieces[name])) for name, (dtype, shape) in self._forms.items()
            },
        )
        problem = find_problem(manifest)
        if problem:
            raise CheckpointError(f"the ranks' tensors make no whole: {problem}", code="checkpoint.tensors-incomplete")
        return manifest


def _saves_of(step: int, folder: Path) -> list[Path]:
    return [path for path in folder.glob(f"{name_of(step)}*") if (parse_name(path.name) or (None,))[0] == step]
