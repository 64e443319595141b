"""RemoteCheckpoints: a folder on object storage, in which a checkpoint exists exactly if its manifest does.

Objects appear when they are complete, but a folder of objects does not. So the manifest is written last and deleted
first: whoever lists the folder at any moment sees complete checkpoints only. This module imports no torch, because the
launcher checks the access to the folder before it starts ranks.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from shardwise.checkpoint.names import BEST, LATEST, MANIFEST, parse_name
from shardwise.data.storage.locations import locate_url
from shardwise.data.storage.objects import OPENING
from shardwise.data.storage.uploads import run_in_threads, upload_files
from shardwise.errors import DataError, InputError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from shardwise.data.storage.locations import RemotePath
    from shardwise.data.storage.objects import ObjectFacts

_FOLDER = "checkpoints"
_MAX_NAME_BYTES = 64


@dataclass(frozen=True)
class RemoteListing:
    """The objects of a folder of checkpoints at one moment."""

    objects: Mapping[str, Mapping[str, ObjectFacts]]
    """Checkpoint -> file -> metadata."""

    @property
    def complete(self) -> list[str]:
        """Names of the checkpoints that have a manifest, by descending step."""
        found = [name for name, files in self.objects.items() if MANIFEST in files]
        return sorted(found, key=lambda name: parse_name(name) or (0, 0), reverse=True)

    @property
    def incomplete(self) -> list[str]:
        """Names of the folders without a manifest: uploads or deletions that did not end."""
        return [name for name, files in self.objects.items() if MANIFEST not in files]


class RemoteCheckpoints:
    """The checkpoints in a folder on object storage. One process at a time may change them."""

    def __init__(self, folder: RemotePath) -> None:
        self.folder, self._store = folder, folder.store

    @classmethod
    def of_run(cls, url: str) -> RemoteCheckpoints:
        """Return the checkpoints of the run whose uploads go to `url`."""
        return cls(locate_url(url) / _FOLDER)

    def __str__(self) -> str:
        return str(self.folder)

    def scan(self) -> RemoteListing:
        """Return all objects, by checkpoint."""
        objects: dict[str, dict[str, ObjectFacts]] = {}
        for path, facts in self._store.find(self.folder).items():
            name, _, file = path.partition("/")
            if parse_name(name) is not None and "/" not in file:
                objects.setdefault(name, {})[file] = facts
        return RemoteListing(objects)

    def newest_first(self) -> list[str]:
        """Return the complete checkpoints: the one that `latest` names first, then by descending step."""
        names = self.scan().complete
        latest = self.named(LATEST) if names else None
        return sorted(names, key=lambda name: name != latest)

    def named(self, file: str) -> str | None:
        """Return the name of the checkpoint in an object, `latest` or `best`; None if there is none."""
        path = self.folder / file
        facts = self._store.facts(path)
        if facts is None or not 0 < facts.size <= _MAX_NAME_BYTES:
            return None
        name = self._store.read(path, 0, facts.size).decode("ascii", errors="replace")
        return name if parse_name(name) is not None else None

    def set_name(self, file: str, name: str) -> None:
        """Write the name of a checkpoint into an object, `latest` or `best`."""
        self._store.write(self.folder / file, name.encode())

    def read_manifest(self, name: str) -> bytes:
        """Return the manifest of a checkpoint; raises FileNotFoundError if the checkpoint does not exist."""
        return self._store.read_all(self.folder / name / MANIFEST)

    def publish(self, name: str, files: Mapping[str, Path], manifest: bytes) -> int:
        """Upload the files of a checkpoint and then its manifest; return the number of bytes that were sent.

        Files that an interrupted upload has sent are skipped. A different checkpoint of this name is replaced.
        """
        target = self.folder / name
        facts = self._store.facts(target / MANIFEST)
        if facts is not None and facts.size == len(manifest) and self.read_manifest(name) == manifest:
            return upload_files({}, target, self.folder)  # aborts unfinished uploads
        if facts is not None:
            self._store.delete(target / MANIFEST)  # its files are about to be replaced
        num_bytes = upload_files(files, target, self.folder)
        found = self._store.find(target)
        for file, path in files.items():
            if file not in found or found[file].size != path.stat().st_size:
                raise DataError(
                    f"{target / file} has disappeared or changed during its upload",
                    code="data.object-changed",
                    fix="use one URL for each run",
                )
        self._store.write(target / MANIFEST, manifest)
        return num_bytes + len(manifest)

    def remove(self, name: str, files: Mapping[str, ObjectFacts]) -> None:
        """Delete a checkpoint with these files, so that it does not exist from the first request on."""
        folder = self.folder / name
        if MANIFEST in files:
            self._store.delete(folder / MANIFEST)

        def delete(file: str) -> int:
            self._store.delete(folder / file)
            return 0

        run_in_threads([partial(delete, file) for file in files if file != MANIFEST])

    def check_access(self) -> None:
        """Write, list and delete a small object; raises DataError if the folder cannot be used for uploads."""
        self.folder.check_writable()
        probe = self.folder / f".probe-{secrets.token_hex(8)}"
        try:
            self._store.write(probe, b"probe", OPENING)
            self._store.find(self.folder)
            self._store.delete(probe, OPENING)
        except DataError as error:
            raise DataError(error.fact.replace(str(probe), str(self)), code=error.code, fix=error.fix) from None


def find_remote(url: str) -> tuple[RemoteCheckpoints, list[str]]:
    """Return the folder of the checkpoints at a URL and their names, newest first; raises InputError if there are none.

    `url` is that of a run, of its checkpoints, of one checkpoint, or of the object `latest` or `best`.
    """
    path = locate_url(url)
    if parse_name(path.name) is not None:
        parent = RemoteCheckpoints(path.parent)
        facts = path.store.facts(path / MANIFEST)
        if facts is not None and not facts.is_folder:
            return parent, [path.name]
    elif path.name in {LATEST, BEST}:
        parent = RemoteCheckpoints(path.parent)
        name = parent.named(path.name)
        if name is not None and name in parent.scan().complete:
            return parent, [name]
    elif not path.can_list:
        raise InputError(
            f"{path.scheme}:// has no listings, so checkpoints in {path} cannot be found",
            code="checkpoint.url-not-listable",
            fix="pass the URL of one checkpoint, such as .../step-00000100",
        )
    else:
        for found in (RemoteCheckpoints(path), RemoteCheckpoints(path / _FOLDER)):
            names = found.newest_first()
            if names:
                return found, names
    raise InputError(
        f"{path} contains no complete checkpoint",
        code="checkpoint.none-found",
        fix="pass the URL of a run, of its checkpoints, or of one checkpoint",
    )
