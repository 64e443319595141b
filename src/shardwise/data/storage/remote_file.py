"""RemoteFile: an object that is read in blocks through the cache, as an array or as a binary file.

A read finds the blocks of its range in the cache and downloads the others, adjacent ones in one request. The key of a
block contains the version of the object, and after a download the version is compared again: blocks of two versions
are never mixed. A claim on the first missing block keeps the ranks of a node from downloading the same range twice.
"""

from __future__ import annotations

import hashlib
import io
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from shardwise.data.storage.block_cache import BlockCache
from shardwise.environment import storage_cache
from shardwise.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from shardwise.data.storage.locations import RemotePath
    from shardwise.data.storage.objects import ObjectFacts

BLOCK_BYTES = 2**19
"""A chunk of 2 MiB and the end of its last document are 5 blocks, so a quarter more is read than it has."""
_PEEK_BYTES = 2**12
MAX_BLOCKS = 16
"""Blocks of one request."""


class RemoteFile:
    """An object of one version; threads and forked processes may share it."""

    def __init__(self, path: RemotePath, facts: ObjectFacts) -> None:
        self.path, self._facts = path, facts
        self.size = facts.size
        self._cache = BlockCache(*storage_cache())
        name = f"{path} {facts.version} {BLOCK_BYTES}"
        self._name = hashlib.sha256(name.encode()).hexdigest()[:32]
        self._last: tuple[int, bytes] = (-1, b"")
        """The block that was read last, for searches in an index; replaced as a whole, so threads need no lock."""

    def read(self, start: int, stop: int) -> NDArray[np.uint8]:
        """Return bytes [start, stop)."""
        if start >= stop:
            return np.empty(0, np.uint8)
        first, last = start // BLOCK_BYTES, (stop - 1) // BLOCK_BYTES
        recent, block = self._last
        if first == last == recent:
            blocks = [block]
        else:
            blocks = self._blocks(first, last + 1)
            self._last = (last, blocks[-1])
        offset = first * BLOCK_BYTES
        return np.frombuffer(b"".join(blocks), np.uint8)[start - offset : stop - offset]

    def prefetch(self, start: int, stop: int) -> None:
        """Download the blocks of bytes [start, stop) into the cache, except those that another process downloads."""
        for first, last in self._missing(start // BLOCK_BYTES, -(-min(stop, self.size) // BLOCK_BYTES)):
            with self._cache.claim(self._key(first), wait=False) as is_ours:
                if is_ours:
                    self._download(first, last)

    def _blocks(self, first: int, stop: int) -> list[bytes]:
        blocks = {number: self._cache.get(self._key(number)) for number in range(first, stop)}
        number = first
        while number < stop:
            if blocks[number] is not None:
                number += 1
                continue
            end = number
            while end < min(stop, number + MAX_BLOCKS) and blocks[end] is None:
                end += 1
            with self._cache.claim(self._key(number), wait=True):
                found = self._cache.get(self._key(number))  # the claim of another process may have ended now
                if found is None:
                    blocks.update(self._download(number, end))
                else:
                    blocks[number] = found
            for later in range(number + 1, end):
                blocks[later] = blocks[later] or self._cache.get(self._key(later))
        return [block for block in blocks.values() if block is not None]

    def _missing(self, first: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield ranges of blocks that the cache does not contain, each of one request."""
        begin = None
        for number in range(first, stop + 1):
            is_missing = number < stop and not self._cache.contains(self._key(number))
            if begin is None and is_missing:
                begin = number
            elif begin is not None and (not is_missing or number - begin == MAX_BLOCKS):
                yield begin, number
                begin = number if is_missing else None

    def _download(self, first: int, stop: int) -> dict[int, bytes]:
        """Download adjacent blocks in one request, and add them to the cache."""
        offset = first * BLOCK_BYTES
        content = b""
        try:
            content = self.path.store.read(self.path, offset, min(stop * BLOCK_BYTES, self.size))
        except FileNotFoundError:
            facts = None
        else:
            facts = self.path.store.facts(self.path)
        if facts != self._facts:
            raise DataError(
                f"{self.path} has changed since it was opened",
                code="data.object-changed",
                fix="run the command again when nothing writes to it",
            )
        blocks = {}
        for number in range(first, stop):
            start = number * BLOCK_BYTES - offset
            blocks[number] = content[start : start + BLOCK_BYTES]
            self._cache.put(self._key(number), blocks[number])
        return blocks

    def _key(self, number: int) -> str:
        return f"{self._name}-{number}"


class RemoteArray:
    """The content of an object as an array of one dimension: an index or a slice reads it."""

    def __init__(self, file: RemoteFile, dtype: np.dtype[Any], start: int, stop: int) -> None:
        """Create an array over bytes [start, stop), which must be a multiple of the item size."""
        self.file, self.dtype = file, dtype
        self._start, self._stop = start, stop

    def __len__(self) -> int:
        return (self._stop - self._start) // self.dtype.itemsize

    @overload
    def __getitem__(self, index: slice) -> NDArray[Any]: ...
    @overload
    def __getitem__(self, index: int) -> Any: ...

    def __getitem__(self, index: slice | int) -> Any:
        if isinstance(index, slice):
            first, stop, _ = index.indices(len(self))
            return self._read(first, stop)
        place = range(len(self))[index]
        return self._read(place, place + 1)[0]

    def part(self, dtype: np.dtype[Any], start: int, stop: int | None = None) -> RemoteArray:
        """Return an array of another type over the bytes [start, stop) of this one."""
        last = self._stop if stop is None else self._start + stop
        return RemoteArray(self.file, dtype, self._start + start, last)

    def prefetch(self, first: int, stop: int) -> None:
        """Download items [first, stop) into the cache."""
        size = self.dtype.itemsize
        self.file.prefetch(self._start + first * size, min(self._start + stop * size, self._stop))

    def _read(self, first: int, stop: int) -> NDArray[Any]:
        size = self.dtype.itemsize
        content = self.file.read(self._start + first * size, self._start + max(first, stop) * size)
        if not content.flags.aligned or content.ctypes.data % size:
            content = content.copy()  # items begin at any byte of a block
        return content.view(self.dtype)


class RemoteStream(io.RawIOBase):
    """An object as a binary file that can seek; each read returns all bytes that it requests."""

    def __init__(self, file: RemoteFile) -> None:
        self._file, self._position = file, 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the position, and return it."""
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.size}[whence]
        self._position = max(0, origin + offset)
        return self._position

    def peek(self, _size: int = 0) -> bytes:
        """Return the next bytes of a block without moving, so that `readline` finds the end of a line."""
        stop = min((self._position // BLOCK_BYTES + 1) * BLOCK_BYTES, self._position + _PEEK_BYTES, self._file.size)
        return self._file.read(self._position, stop).tobytes()

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer from the position, and return the number of bytes."""
        view = memoryview(buffer).cast("B")
        stop = min(self._position + len(view), self._file.size)
        content = self._file.read(self._position, stop)
        view[: len(content)] = content.data
        self._position += len(content)
        return len(content)
