"""Downloads checkpoints from object storage into a local directory, and verifies remote checkpoints by checksums.

A downloaded checkpoint is published as a saved one is: all its bytes are verified and flushed to disk in a temporary
directory, which is then renamed. So it is a local checkpoint like any other, and loading it needs no second case.
"""

from __future__ import annotations

import io
import shutil
from functools import partial
from typing import TYPE_CHECKING, Any

from shardwise.checkpoint.disk import (
    DamagedError,
    crc32,
    lock,
    remove_temporary_files,
    sync_directory,
    sync_file,
    temporary_name,
    unlock,
    write_synced,
)
from shardwise.checkpoint.manifest import decode
from shardwise.checkpoint.names import MANIFEST, parse_name
from shardwise.checkpoint.shard import find_damage, layouts_of
from shardwise.checkpoint.write import publish_directory
from shardwise.data.storage.uploads import PART_BYTES, run_in_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from shardwise.checkpoint.manifest import Manifest
    from shardwise.checkpoint.remote import RemoteCheckpoints
    from shardwise.checkpoint.shard import ShardLayout
    from shardwise.data.storage.locations import RemotePath


def read_remote_manifest(remote: RemoteCheckpoints, name: str) -> tuple[Manifest, bytes]:
    """Return the manifest of a remote checkpoint and its bytes; raises DamagedError if it is missing or invalid."""
    path = remote.folder / name / MANIFEST
    try:
        data = remote.read_manifest(name)
    except FileNotFoundError:
        raise DamagedError(f"{path} does not exist", code="checkpoint.read-failed") from None
    manifest, named = decode(data, str(path)), parse_name(name)
    if named is not None and named[0] != manifest.step:
        raise DamagedError(
            f"{path} contains step {manifest.step}, expected step {named[0]}", code="checkpoint.step-mismatch"
        )
    return manifest, data


def download_newest(
    remote: RemoteCheckpoints, names: Sequence[str], directory: Path, note: Callable[[str], None]
) -> Path:
    """Download the first intact checkpoint of `names` into a local directory and return its path; no communication.

    Damaged checkpoints are skipped with a note. Raises DamagedError if all are damaged.
    """
    directory.mkdir(parents=True, exist_ok=True)
    lock_fd = lock(directory)
    try:
        remove_temporary_files(directory)
        skipped = []
        for name in names:
            try:
                return _download(remote, name, directory)
            except DamagedError as error:
                skipped.append(error.fact)
                note(f"skipped checkpoint: {error.fact}")
    finally:
        unlock(lock_fd)
    raise DamagedError(
        f"all checkpoints in {remote} are damaged: {'; '.join(skipped)}",
        code="checkpoint.none-usable",
        fix="remove the damaged checkpoints to start from step 0, or pass a different checkpoint",
    )


def _download(remote: RemoteCheckpoints, name: str, directory: Path) -> Path:
    manifest, data = read_remote_manifest(remote, name)
    for reason in find_remote_damage(remote, name, deep=False):
        raise DamagedError(reason, code="checkpoint.remote-damaged")
    temporary = directory / temporary_name(name)
    temporary.mkdir()
    try:
        tasks = []
        for file, size in manifest.files.items():
            with (temporary / file).open("xb") as created:
                created.truncate(size)
            for start in range(0, size, PART_BYTES):
                stop = min(start + PART_BYTES, size)
                tasks.append(partial(_download_part, remote.folder / name / file, temporary / file, start, stop))
        run_in_threads(tasks)
        for file in manifest.files:
            sync_file(temporary / file)
        write_synced(temporary / MANIFEST, data)
        for damage in find_damage(temporary, deep=True):
            raise DamagedError(
                f"{remote.folder / name / damage.file} is damaged ({damage.reason})", code="checkpoint.remote-damaged"
            )
        sync_directory(temporary)
        return publish_directory(temporary, directory, manifest.step)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # does nothing after publication


def _download_part(source: RemotePath, file: Path, start: int, stop: int) -> int:
    try:
        content = source.store.read(source, start, stop)
    except FileNotFoundError:
        raise DamagedError(f"{source} does not exist", code="checkpoint.read-failed") from None
    with file.open("r+b") as stream:
        stream.seek(start)
        stream.write(content)
    return len(content)


# Verification without a local copy.


def find_remote_damage(remote: RemoteCheckpoints, name: str, *, deep: bool) -> list[str]:
    """Return the damage of a remote checkpoint, one sentence for each file; empty if it is intact.

    The manifest and the file sizes are always checked. With `deep`, all bytes are read and checksums verified.
    """
    folder = remote.folder / name
    try:
        manifest, _ = read_remote_manifest(remote, name)
        layouts = layouts_of(folder, manifest, manifest.files)
    except DamagedError as error:
        return [error.fact]
    objects = folder.store.find(folder) if folder.can_list else {}
    found = []
    for file, layout in layouts.items():
        facts = objects.get(file) if folder.can_list else folder.store.facts(folder / file)
        if facts is None:
            found.append(f"{folder / file} does not exist")
        elif facts.size != layout.size:
            found.append(f"{folder / file} has {facts.size} bytes, expected {layout.size}")
        elif deep:
            found += _content_damage(folder / file, layout, manifest)
    return found


def _content_damage(path: RemotePath, layout: ShardLayout, manifest: Manifest) -> list[str]:
    checksums = {}
    for name, entry in manifest.tensors.items():
        for piece in entry.pieces:
            if piece.file == path.name:
                checksums[name] = piece.checksum
    with io.BufferedReader(_ObjectStream(path, layout.size), PART_BYTES) as stream:
        if stream.read(len(layout.header)) != layout.header:
            return [f"the header of {path} does not match the manifest"]
        for name, stored in layout.ranges.items():  # in the order of the file
            checksum = 0
            for begin in range(stored.begin, stored.end, PART_BYTES):
                checksum = crc32(stream.read(min(stored.end - begin, PART_BYTES)), checksum)
            if f"{checksum:08x}" != checksums[name]:
                return [f"tensor {name!r} in {path} has checksum {checksum:08x}, expected {checksums[name]}"]
    return []


class _ObjectStream(io.RawIOBase):
    """An object of known size, read once from start to end."""

    def __init__(self, path: RemotePath, size: int) -> None:
        self._path, self._size, self._position = path, size, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        stop = min(self._position + len(buffer), self._size)
        if stop == self._position:
            return 0
        content = self._path.store.read(self._path, self._position, stop)
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)
