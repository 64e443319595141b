"""BlockCache: blocks of objects in a folder on disk, bounded, shared by the processes of a node.

The idea: the cache is set-associative. The key of a block determines one of NUM_SETS folders, and each folder keeps its
part of the limit. So a write looks at one small folder, no process needs to know what others wrote, and the limit
is kept at any number of processes. A block file gets its name when it is complete, and ends with its CRC-32, so a
process never sees half a block. Its modification time is that of its last use, and the oldest are removed first; a
process that has opened a removed file can still read it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

from zlib_ng import zlib_ng

if TYPE_CHECKING:
    from collections.abc import Iterator

NUM_SETS = 256
_CRC_BYTES = 4
_ABANDONED_S = 3600
"""Age at which a file without a name, or a lock, is that of a process that was killed."""


class BlockCache:
    """Blocks by key in a folder of limited size; a folder that cannot be written caches nothing."""

    def __init__(self, folder: Path, limit: int, num_sets: int = NUM_SETS) -> None:
        self._folder, self._num_sets = folder, num_sets
        self._set_limit = limit // num_sets

    def get(self, key: str) -> bytes | None:
        """Return a block, or None if the cache does not contain it."""
        path = self._path(key)
        try:
            content = path.read_bytes()
            os.utime(path)
        except OSError:
            return None
        block, stored = content[:-_CRC_BYTES], content[-_CRC_BYTES:]
        if zlib_ng.crc32(block).to_bytes(_CRC_BYTES, "little") != stored:  # a file that a crashed machine left
            return None
        return block

    def contains(self, key: str) -> bool:
        """Return whether a block is in the cache."""
        return self._path(key).exists()

    def put(self, key: str, block: bytes) -> None:
        """Add a block, and remove the blocks of its set that were not used for longest if it is full."""
        path = self._path(key)
        partial = path.with_name(f".tmp-{secrets.token_hex(8)}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            partial.write_bytes(block + zlib_ng.crc32(block).to_bytes(_CRC_BYTES, "little"))
            partial.rename(path)
            self._evict(path)
        except OSError:  # such as a full disk: the caller has the block anyway
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)

    @contextlib.contextmanager
    def claim(self, key: str, *, wait: bool) -> Iterator[bool]:
        """Hold the right to download a block, and yield whether it was obtained; with `wait`, always.

        The operating system releases the claim of a process that ends. Where files have no locks, all obtain it.
        """
        path = self._path(key).with_name(f".lock-{key}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            file = path.open("wb")
        except OSError:
            yield True
            return
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            except OSError:
                yield True
                return
            try:
                yield True
            finally:
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self._folder / f"{zlib.crc32(key.encode()) % self._num_sets:02x}" / key

    def _evict(self, newest: Path) -> None:
        """Remove the oldest blocks of a set until it has its part of the limit; the newest one always stays."""
        total, found = 0, []
        with os.scandir(newest.parent) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # another process removed it
                    status = entry.stat()
                    found.append((status.st_mtime_ns, status.st_size, entry.path))
                    total += status.st_size
        now = time.time()
        for modified_ns, size, path in sorted(found):
            is_temporary = Path(path).name.startswith(".")
            is_excess = total > self._set_limit and not is_temporary and path != str(newest)
            if is_excess or (is_temporary and now - modified_ns / 1e9 > _ABANDONED_S):
                Path(path).unlink(missing_ok=True)
                total -= size
