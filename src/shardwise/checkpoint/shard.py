"""One shard file in the safetensors format, written and read in place; whether the shards of a checkpoint are sound."""

from __future__ import annotations

import math
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import msgspec
import torch

from shardwise.checkpoint.disk import crc32, crc32_text
from shardwise.checkpoint.errors import DamagedError
from shardwise.checkpoint.manifest import DTYPES, MANIFEST, open_regular, read_manifest

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from torch import Tensor

    from shardwise.checkpoint.manifest import Manifest


T = TypeVar("T")

BLOCK = 1 << 20
"""Bytes read or checked at a time: small enough to stay in a core's cache between the two."""
THREADS = min(4, os.cpu_count() or 1)
"""One core reads and checks 3 to 5 GB/s; four outrun most storage."""
_MAX_WRITE = 1 << 30
"""Linux writes at most 2 GiB in one call."""


@dataclass(frozen=True)
class ShardRange:
    """Where one piece is in its file."""

    begin: int
    end: int
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ShardLayout:
    """The whole form of a shard file except its values: a pure function of the names, dtypes and shapes in it.

    So loading needs no header from the disk: it makes the header that must be there and compares.
    """

    header: bytes
    places: dict[str, ShardRange]
    """Pieces by tensor name, in the order of their bytes."""
    size: int

    @classmethod
    def of(cls, pieces: Mapping[str, tuple[str, tuple[int, ...]]]) -> ShardLayout:
        """Place pieces given as dtype name and shape; the widest dtypes first, so that all are aligned."""
        order = sorted(pieces, key=lambda name: (-DTYPES[pieces[name][0]].itemsize, name))
        spans, end = {}, 0
        for name in order:
            code, shape = pieces[name]
            begin, end = end, end + math.prod(shape) * DTYPES[code].itemsize
            spans[name] = (begin, end)
        listing: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        for name, span in spans.items():
            code, shape = pieces[name]
            listing[name] = {"dtype": code, "shape": shape, "data_offsets": span}
        text = msgspec.json.encode(listing)
        text += b" " * (-len(text) % 8)
        header = len(text).to_bytes(8, "little") + text
        start = len(header)
        places = {
            name: ShardRange(start + begin, start + end, DTYPES[pieces[name][0]], pieces[name][1])
            for name, (begin, end) in spans.items()
        }
        return cls(header, places, start + end)


def layouts_of(checkpoint: Path, manifest: Manifest, files: Collection[str]) -> dict[str, ShardLayout]:
    """Return how each of `files` of a checkpoint must look for its manifest to be true."""
    inside: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {file: {} for file in files}
    for name, entry in manifest.tensors.items():
        for piece in entry.pieces:
            if piece.file in inside:
                inside[piece.file][name] = (entry.dtype, piece.shape)
    layouts = {file: ShardLayout.of(pieces) for file, pieces in inside.items()}
    for file, layout in layouts.items():
        if layout.size != manifest.files[file]:
            raise DamagedError(
                f"{checkpoint / MANIFEST} gives {file} {manifest.files[file]} bytes and its tensors {layout.size}",
                code="checkpoint.manifest-inconsistent",
            )
    return layouts


def memory_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous host tensor, not a copy of them."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def write_shard(path: Path, layout: ShardLayout, pieces: Mapping[str, Tensor]) -> dict[str, str]:
    """Write a new shard file and sync it to disk; return each piece's checksum.

    Pieces are asked for once, in the order of the layout. Checksums are taken from memory by a second thread, so that
    they hide behind the disk. A tensor that is on a device or not contiguous passes through the host one at a time.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with ThreadPoolExecutor(1, "checksum") as checker:
            _write(fd, memoryview(layout.header))
            pending = {name: _write_piece(fd, pieces[name], checker) for name in layout.places}
            os.fsync(fd)
            checksums = {name: result() for name, result in pending.items()}
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(fd)
    return checksums


def _write_piece(fd: int, piece: Tensor, checker: ThreadPoolExecutor) -> Callable[[], str]:
    """Write one piece and return what gives its checksum, at once or when the other thread is done."""
    host = piece.detach().cpu().contiguous()
    memory = memory_of(host)
    if len(memory) < BLOCK:  # handing it over would take longer
        _write(fd, memory)
        checksum = crc32_text(memory)
        return lambda: checksum
    pending = checker.submit(crc32_text, memory)
    _write(fd, memory)
    if host.data_ptr() != piece.data_ptr():
        pending.result()  # so that no second copy piles up on the host
    return pending.result


def _write(fd: int, memory: memoryview) -> None:
    done = 0
    while done < len(memory):
        done += os.write(fd, memory[done : done + _MAX_WRITE])


def in_threads(work: Callable[[T], None], items: Iterable[T]) -> None:
    """Do `work` on all items, a few at a time; raises the first failure once all threads are done.

    Reading and checksums leave Python's lock alone, so threads add up; one future a thread, since a future per item
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
    """One shard file opened for reading: a plain file of the right size that begins with the right header."""

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
        """Read the named pieces block by block and compare each with its checksum."""
        in_threads(lambda piece: self._check(*piece), checksums.items())

    def _check(self, name: str, checksum: str) -> None:
        place = self._layout.places[name]
        block, found = memoryview(bytearray(min(BLOCK, place.end - place.begin))), 0
        for begin in range(place.begin, place.end, BLOCK):
            part = block[: place.end - begin]
            self._fill(part, begin)
            found = crc32(part, found)
        if f"{found:08x}" != checksum:
            raise DamagedError(
                f"{self._path} does not match its checksum at {name!r}", code="checkpoint.checksum-mismatch"
            )

    def read(self, name: str, begin: int, into: memoryview) -> None:
        """Fill `into` from one piece, beginning at byte `begin` of it; what is read is not checked again."""
        self._fill(into, self._layout.places[name].begin + begin)

    def _check_form(self) -> None:
        size = os.fstat(self._fd).st_size
        if size != self._layout.size:
            raise DamagedError(
                f"{self._path} has {size} bytes instead of {self._layout.size}", code="checkpoint.file-size-mismatch"
            )
        header = bytearray(len(self._layout.header))
        self._fill(memoryview(header), 0)
        if header != self._layout.header:
            raise DamagedError(
                f"{self._path} does not begin with the header that its manifest asks for",
                code="checkpoint.header-mismatch",
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
                raise DamagedError(f"{self._path} ended while it was read", code="checkpoint.file-truncated")
            done += count


# Whether a checkpoint is sound: every file is checked, none is loaded.


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
