"""Shard files in the safetensors format: layout, writing, reading and verification."""

from __future__ import annotations

import math
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import msgspec
import torch

from shardwise.checkpoint.disk import DamagedError, crc32, crc32_text
from shardwise.checkpoint.manifest import DTYPES, open_regular, read_manifest
from shardwise.checkpoint.names import MANIFEST

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from torch import Tensor

    from shardwise.checkpoint.manifest import Manifest
    from shardwise.data.storage.locations import Location


T = TypeVar("T")

BLOCK = 1 << 20
"""Number of bytes to read before their checksum is updated; a block fits into the cache of a core."""
THREADS = min(4, os.cpu_count() or 1)
"""Number of reading threads. One core reads and verifies 3 to 5 GB/s, so four cores are faster than most storage."""
_MAX_WRITE = 1 << 30
"""Maximum size of one write in bytes; Linux writes at most 2 GiB per call."""


@dataclass(frozen=True)
class ShardRange:
    """The byte range of one piece in its shard file."""

    begin: int
    end: int
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ShardLayout:
    """The header and byte ranges of a shard file, a pure function of the names, dtypes and shapes of its tensors.

    Loading computes the expected header from the manifest and compares it with the file.
    """

    header: bytes
    ranges: dict[str, ShardRange]
    """Byte range of each tensor, in file order."""
    size: int

    @classmethod
    def of(cls, pieces: Mapping[str, tuple[str, tuple[int, ...]]]) -> ShardLayout:
        """Compute the layout of tensors given as dtype name and shape; the widest dtypes come first for alignment."""
        order = sorted(pieces, key=lambda name: (-DTYPES[pieces[name][0]].itemsize, name))
        spans, end = {}, 0
        listing: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        for name in order:
            code, shape = pieces[name]
            begin, end = end, end + math.prod(shape) * DTYPES[code].itemsize
            spans[name] = (begin, end)
            listing[name] = {"dtype": code, "shape": shape, "data_offsets": (begin, end)}
        text = msgspec.json.encode(listing)
        text += b" " * (-len(text) % 8)
        header = len(text).to_bytes(8, "little") + text
        start, ranges = len(header), {}
        for name, (first, last) in spans.items():
            code, shape = pieces[name]
            ranges[name] = ShardRange(start + first, start + last, DTYPES[code], shape)
        return cls(header, ranges, start + end)


def layouts_of(checkpoint: Location, manifest: Manifest, files: Collection[str]) -> dict[str, ShardLayout]:
    """Return the layout that the manifest of a checkpoint implies for each of the shard files `files`."""
    tensors: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {file: {} for file in files}
    for name, entry in manifest.tensors.items():
        for piece in entry.pieces:
            if piece.file in tensors:
                tensors[piece.file][name] = (entry.dtype, piece.shape)
    layouts = {file: ShardLayout.of(pieces) for file, pieces in tensors.items()}
    for file, layout in layouts.items():
        if layout.size != manifest.files[file]:
            raise DamagedError(
                f"{checkpoint / MANIFEST} lists {file} with {manifest.files[file]} bytes, expected {layout.size}",
                code="checkpoint.manifest-inconsistent",
            )
    return layouts


def byte_view(tensor: Tensor) -> memoryview:
    """Return a view of the bytes of a contiguous host tensor."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def write_shard(path: Path, layout: ShardLayout, pieces: Mapping[str, Tensor]) -> dict[str, str]:
    """Write a new shard file, flush it to disk and return the checksum of each tensor.

    `pieces` is read once per tensor in the order of the layout. A second thread computes checksums while the first
    writes. Device tensors and non-contiguous tensors are copied to host memory one at a time.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with ThreadPoolExecutor(1, "checksum") as checker:
            _write(fd, memoryview(layout.header))
            pending = {name: _write_piece(fd, pieces[name], checker) for name in layout.ranges}
            os.fsync(fd)
            checksums = {name: result() for name, result in pending.items()}
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(fd)
    return checksums


def _write_piece(fd: int, piece: Tensor, checker: ThreadPoolExecutor) -> Callable[[], str]:
    """Write one tensor and return a function that returns its checksum, possibly waiting for the checksum thread."""
    host = piece.detach().cpu().contiguous()
    memory = byte_view(host)
    if len(memory) < BLOCK:  # faster than submitting it to the thread
        _write(fd, memory)
        checksum = crc32_text(memory)
        return lambda: checksum
    pending = checker.submit(crc32_text, memory)
    _write(fd, memory)
    if host.data_ptr() != piece.data_ptr():
        pending.result()  # at most one copy is in host memory at a time
    return pending.result


def _write(fd: int, memory: memoryview) -> None:
    done = 0
    while done < len(memory):
        done += os.write(fd, memory[done : done + _MAX_WRITE])


def in_threads(work: Callable[[T], None], items: Iterable[T]) -> None:
    """Run `work` on all items in a few threads; raise the first error when all threads have finished.

    Reads and checksums release the GIL. Each thread takes items from a shared iterator, because a Future per item
    costs more than the checksum of a small tensor.
    """
    shared = iter(list(items))

    def drain() -> None:
        for item in shared:
            work(item)

    with ThreadPoolExecutor(THREADS, "checkpoint") as pool:
        for thread in [pool.submit(drain) for _ in range(THREADS)]:
            thread.result()


class ShardReader:
    """A shard file opened for reading, whose size and header match the expected layout."""

    def __init__(self, path: Path, layout: ShardLayout) -> None:
        self._path = path
        self._layout = layout
        try:
            self._fd = open_regular(path)
        except OSError as error:
            raise DamagedError(f"{path} cannot be read ({error.strerror})", code="checkpoint.read-failed") from None
        try:
            self._check_form()
        except BaseException:
            os.close(self._fd)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def check(self, checksums: Mapping[str, str]) -> None:
        """Read the named tensors block by block and verify their checksums."""
        in_threads(lambda piece: self._check(*piece), checksums.items())

    def _check(self, name: str, checksum: str) -> None:
        stored = self._layout.ranges[name]
        block, found = memoryview(bytearray(min(BLOCK, stored.end - stored.begin))), 0
        for begin in range(stored.begin, stored.end, BLOCK):
            part = block[: stored.end - begin]
            self._fill(part, begin)
            found = crc32(part, found)
        if f"{found:08x}" != checksum:
            raise DamagedError(
                f"tensor {name!r} in {self._path} has checksum {found:08x}, expected {checksum}",
                code="checkpoint.checksum-mismatch",
            )

    def read(self, name: str, begin: int, into: memoryview) -> None:
        """Read the bytes of a tensor from offset `begin` into a buffer, without verifying them."""
        self._fill(into, self._layout.ranges[name].begin + begin)

    def _check_form(self) -> None:
        size = os.fstat(self._fd).st_size
        if size != self._layout.size:
            raise DamagedError(
                f"{self._path} has {size} bytes, expected {self._layout.size}", code="checkpoint.file-size-mismatch"
            )
        header = bytearray(len(self._layout.header))
        self._fill(memoryview(header), 0)
        if header != self._layout.header:
            raise DamagedError(
                f"the header of {self._path} does not match the manifest", code="checkpoint.header-mismatch"
            )

    def _fill(self, into: memoryview, offset: int) -> None:
        done = 0
        while done < len(into):
            try:
                count = os.preadv(self._fd, [into[done:]], offset + done)
            except OSError as error:
                raise DamagedError(
                    f"{self._path} cannot be read ({error.strerror})", code="checkpoint.read-failed"
                ) from error
            if count == 0:
                raise DamagedError(f"{self._path} was truncated while it was read", code="checkpoint.file-truncated")
            done += count


@dataclass(frozen=True)
class Damage:
    """A damaged file of a checkpoint."""

    checkpoint: Path
    file: str
    reason: str
    code: str

    def __str__(self) -> str:
        return self.reason


def find_damage(path: Path | str, *, deep: bool) -> list[Damage]:
    """Return the damaged files of the checkpoint at `path`, or an empty list if it is intact.

    The manifest, file sizes and headers are always checked. With `deep`, all bytes are read and checksums verified.
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
                if deep:
                    reader.check(checksums[file])
        except DamagedError as error:
            found.append(Damage(path, file, error.fact, error.code))
    return found
