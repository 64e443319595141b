"""Files at a location, on disk or on object storage: the only functions of `data` that open inputs.

Local files are memory-mapped. Remote ones are read by ranges of bytes through a cache on disk (`remote_file.py`).
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import numpy as np

from shardwise.data.storage.remote_file import RemoteArray, RemoteFile, RemoteStream
from shardwise.errors import DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardwise.data.storage.locations import Location, RemotePath

FileArray = np.ndarray[Any, np.dtype[Any]] | RemoteArray
"""The content of a file: an array in memory, or one whose slices are read from an object."""


def open_bytes(path: Location) -> FileArray:
    """Return the content of a file as a read-only array of bytes of which only accessed parts are read."""
    if not isinstance(path, Path):
        file = _open_remote(path)
        return RemoteArray(file, np.dtype(np.uint8), 0, file.size)
    try:
        if path.stat().st_size == 0:
            return np.empty(0, dtype=np.uint8)
        return np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))  # slices of a memmap object cost more
    except FileNotFoundError:
        raise missing(path) from None
    except OSError as error:
        raise unreadable(path, error) from error


class LocalFile:
    """A file of this machine of which ranges are read; a read has no position, so forked processes may share it."""

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("rb", buffering=0)
        except FileNotFoundError:
            raise missing(path) from None
        except OSError as error:
            raise unreadable(path, error) from error
        self._path = path

    def read(self, start: int, stop: int) -> NDArray[np.uint8]:
        """Return bytes [start, stop), fewer if the file ends before."""
        try:
            return np.frombuffer(os.pread(self._file.fileno(), stop - start, start), np.uint8)
        except OSError as error:
            raise unreadable(self._path, error) from error


def open_ranges(path: Location) -> LocalFile | RemoteFile:
    """Return a file whose `read(start, stop)` reads one range of bytes."""
    return LocalFile(path) if isinstance(path, Path) else _open_remote(path)


def typed(content: FileArray, dtype: np.dtype[Any], start: int = 0, stop: int | None = None) -> FileArray:
    """Return bytes [start, stop) of a file as an array of another type, without reading them."""
    if isinstance(content, RemoteArray):
        return content.part(dtype, start, stop)
    return content[start:stop].view(dtype)


def in_memory(content: FileArray) -> NDArray[Any]:
    """Return a whole file as an array: that of an object is downloaded, a local one stays mapped."""
    return content[:]


def open_stream(path: Location) -> BinaryIO:
    """Return a file for reading; OSErrors of local files are the caller's."""
    if isinstance(path, Path):
        return path.open("rb")
    return cast("BinaryIO", RemoteStream(_open_remote(path)))


def read_file(path: Location) -> bytes:
    """Return the content of a file; raises FileNotFoundError if it does not exist."""
    if isinstance(path, Path):
        try:
            return path.read_bytes()
        except FileNotFoundError:
            raise
        except OSError as error:
            raise unreadable(path, error) from error
    if not is_file(path):
        raise FileNotFoundError(str(path))
    return in_memory(open_bytes(path)).tobytes()


def is_file(path: Location) -> bool:
    """Return whether a location is a file or an object."""
    if isinstance(path, Path):
        return path.is_file()
    facts = path.store.facts(path)
    return facts is not None and not facts.is_folder


def is_folder(path: Location) -> bool:
    """Return whether a location is a folder; on object storage, whether the name of an object starts with it."""
    if isinstance(path, Path):
        return path.is_dir()
    facts = path.store.facts(path)
    return facts is not None and facts.is_folder


def size_and_version(path: Location) -> tuple[int, int] | None:
    """Return the size of a file, and a number that changes with its content: for local files, its mtime in ns."""
    if isinstance(path, Path):
        try:
            status = path.stat()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise unreadable(path, error) from error
        return status.st_size, status.st_mtime_ns
    facts = path.store.facts(path)
    if facts is None or facts.is_folder:
        return None
    return facts.size, int(hashlib.sha256(facts.version.encode()).hexdigest()[:15], 16)


def list_files(folder: Location, suffixes: tuple[str, ...]) -> dict[str, int]:
    """Return name -> size of the files of a folder that end with one of the suffixes, sorted by name."""
    if not isinstance(folder, Path):
        try:
            facts = folder.store.list(folder)
        except FileNotFoundError:
            raise missing(folder) from None
        return {name: facts[name].size for name in sorted(facts) if name.endswith(suffixes)}
    sizes = {}
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.endswith(suffixes):
                    sizes[entry.name] = entry.stat().st_size
    except OSError as error:
        raise unreadable(folder, error) from error
    return dict(sorted(sizes.items()))


def list_others(folder: Location, suffixes: tuple[str, ...]) -> list[str]:
    """Return the sorted names of what `list_files` leaves out, subfolders with a slash; hidden ones are left out."""
    if isinstance(folder, Path):
        is_folder_by_name = {entry.name: entry.is_dir() for entry in folder.iterdir()}
    else:
        is_folder_by_name = {name: facts.is_folder for name, facts in folder.store.list(folder).items()}
    others = []
    for name, is_subfolder in sorted(is_folder_by_name.items()):
        if name and not name.startswith(".") and not name.endswith(suffixes):
            others.append(f"{name}/" if is_subfolder else name)
    return others


def _open_remote(path: RemotePath) -> RemoteFile:
    facts = path.store.facts(path)
    if facts is None or facts.is_folder:
        raise missing(path)
    return RemoteFile(path, facts)


def missing(path: Location) -> DataError:
    """Return the error for a file that does not exist."""
    return DataError(
        f"file {path} does not exist", code="data.file-missing", fix="restore it, or prepare the corpus again"
    )


def unreadable(path: Location, error: OSError) -> DataError:
    """Return the error for a path that the operating system does not let us read."""
    return DataError(
        f"{path} cannot be read ({error.strerror or error})",
        code="data.read-failed",
        fix="pass a readable path, or change its permissions",
    )


def truncated(path: Location, found: int, expected: int) -> DataError:
    """Return the error for a file with fewer or more bytes than its index or header specifies."""
    return DataError(
        f"{path} has {found} bytes, but its index or header specifies {expected}",
        code="data.size-mismatch",
        fix="copy the file again, or prepare the corpus again",
    )
