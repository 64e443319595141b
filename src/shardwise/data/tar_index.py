"""TarIndex: where the members of a tar file are, so that a sample is read without reading the file up to it.

A sample consists of the members that share their name before the first dot of its last part, as in WebDataset:
`train/0001.jpg` and `train/0001.cls`. The standard library's `tarfile` reads the headers and skips the contents; it
understands the long names of GNU and pax. An index is kept in a cache whose key is the path, size and version of the
file, and a claim keeps the ranks of a node from reading the same headers.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import re
import tarfile
import zipfile
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from shardwise.data.storage.block_cache import BlockCache
from shardwise.data.storage.files import open_ranges, open_stream, size_and_version, unreadable
from shardwise.environment import cache_directory
from shardwise.errors import DataError

if TYPE_CHECKING:
    from typing import BinaryIO

    from numpy.typing import NDArray

    from shardwise.data.storage.locations import Location

_MEMBER = re.compile(r"((?:.*/)?[^./]+)\.([^/]+)", re.DOTALL)
"""Name of a sample and suffix of a member; other members, such as hidden files, belong to no sample."""
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZ": "bzip2", b"\xfd7": "xz", b"(\xb5": "zstd"}
_CACHE_BYTES = 2 * 10**9
_CACHE_SETS = 16
_VERSION = 1
"""Of the cached form."""


@dataclass(frozen=True)
class TarIndex:
    """The members of one tar file that belong to samples, in the order of the file."""

    size: int
    """Of the file, as `version`; another version needs another index."""
    version: int
    num_samples: int
    suffixes: tuple[str, ...]
    """The suffixes that occur, in lower case."""
    samples: NDArray[np.int64]
    """Number of the sample of each member."""
    suffix_codes: NDArray[np.int64]
    """Position of the member's suffix in `suffixes`."""
    starts: NDArray[np.int64]
    """First byte of the member's content."""
    num_bytes: NDArray[np.int64]

    def suffixes_of(self, sample: int) -> list[str]:
        """Return the suffixes of a sample."""
        return [self.suffixes[code] for code in self.suffix_codes[self.samples == sample]]

    def to_bytes(self) -> bytes:
        """Return the index in the form that the cache stores."""
        content = io.BytesIO()
        np.savez(
            content,
            facts=np.array([self.size, self.version, self.num_samples]),
            suffixes=np.frombuffer("/".join(self.suffixes).encode("utf-8", "surrogateescape"), np.uint8),
            samples=self.samples,
            suffix_codes=self.suffix_codes,
            starts=self.starts,
            num_bytes=self.num_bytes,
        )
        return content.getvalue()


def _from_bytes(content: bytes) -> TarIndex:
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        size, version, num_samples = arrays["facts"].tolist()
        suffixes = arrays["suffixes"].tobytes().decode("utf-8", "surrogateescape").split("/")
        members = [arrays[name] for name in ("samples", "suffix_codes", "starts", "num_bytes")]
    return TarIndex(size, version, num_samples, tuple(suffixes), *members)


def open_tar_index(path: Location) -> TarIndex:
    """Return the index of a tar file, from the cache or by reading its headers; raises DataError if it is damaged."""
    found = size_and_version(path)
    if found is None:
        raise DataError(f"tar file {path} does not exist", code="data.shard-missing", fix="copy it, or pass others")
    size, version = found
    name = path.resolve() if isinstance(path, Path) else path
    key = hashlib.sha256(f"{name} {size} {version} {_VERSION}".encode("utf-8", "surrogateescape")).hexdigest()[:32]
    cache = BlockCache(cache_directory() / "tar", _CACHE_BYTES, _CACHE_SETS)
    index = _cached(cache, key)
    if index is None:
        with cache.claim(key, wait=True):
            index = _cached(cache, key)  # another rank may have added it now
            if index is None:
                index = read_tar_index(path, size, version)
                cache.put(key, index.to_bytes())
    return index


def _cached(cache: BlockCache, key: str) -> TarIndex | None:
    content = cache.get(key)
    if content is None:
        return None
    with contextlib.suppress(ValueError, KeyError, OSError, EOFError, zipfile.BadZipFile):
        return _from_bytes(content)
    return None


def read_tar_index(path: Location, size: int, version: int) -> TarIndex:
    """Return the index of a tar file by reading the headers of its members."""
    members = _Members()
    try:
        with open_stream(path) as file:
            _check_not_compressed(path, file.read(2))
            file.seek(0)
            end = _read_headers(path, file, members)
            file.seek(end)
            # tarfile takes a damaged header for the end of the file: only the block of zeros is one.
            is_complete = file.read(tarfile.BLOCKSIZE) == tarfile.NUL * tarfile.BLOCKSIZE
    except tarfile.TarError as error:
        raise _damaged(path, str(error)) from None
    except OSError as error:
        raise unreadable(path, error) from error
    if not is_complete:
        raise _damaged(path, f"its end is missing or damaged after byte {end} of {size}")
    return members.index(path, size, version)


def _read_headers(path: Location, file: BinaryIO, members: _Members) -> int:
    """Add the members of a tar file, and return the position after the last of them."""
    with tarfile.open(fileobj=file, mode="r:") as tar:
        while (member := tar.next()) is not None:
            tar.members.clear()  # type: ignore[attr-defined]  # it would have an object per member
            parts = _MEMBER.fullmatch(member.name)
            if parts is None or not member.isreg():
                continue
            if member.issparse():
                raise DataError(
                    f"member {member.name} of {path} is sparse, so it is not one range of bytes",
                    code="data.tar-member-sparse",
                    fix="write the tar file again without --sparse",
                )
            members.add(parts[1], parts[2].lower(), member)
        return tar.offset


@dataclass(frozen=True)
class _Members:
    """The members that were read so far; only samples and suffixes are objects."""

    samples: dict[str, int] = field(default_factory=dict)
    """Name of a sample -> its number."""
    suffixes: dict[str, int] = field(default_factory=dict)
    numbers: array[int] = field(default_factory=lambda: array("q"))
    """Four numbers per member: sample, suffix, first byte and size."""

    def add(self, sample: str, suffix: str, member: tarfile.TarInfo) -> None:
        number = self.samples.setdefault(sample, len(self.samples))
        code = self.suffixes.setdefault(suffix, len(self.suffixes))
        self.numbers.extend((number, code, member.offset_data, member.size))

    def index(self, path: Location, size: int, version: int) -> TarIndex:
        columns = np.array(self.numbers, dtype=np.int64).reshape(-1, 4).T.copy()
        samples, codes, starts, _ = columns
        _, first = np.unique(samples * max(1, len(self.suffixes)) + codes, return_index=True)
        repeated = np.setdiff1d(np.arange(len(samples)), first)
        if len(repeated):
            raise DataError(
                f"tar file {path} has two members {member_name(path, int(starts[repeated[0]]))}",
                code="data.tar-member-repeated",
                fix="give each sample a name of its own",
            )
        return TarIndex(size, version, len(self.samples), tuple(self.suffixes), *columns)


def member_name(path: Location, start: int) -> str:
    """Return the name of the member whose content starts at a byte, at most its first 100 characters."""
    header = open_ranges(path).read(start - tarfile.BLOCKSIZE, start).tobytes()
    with contextlib.suppress(tarfile.HeaderError):
        return tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape").name
    return f"at byte {start}"


def _check_not_compressed(path: Location, first: bytes) -> None:
    if first in _COMPRESSED:
        raise DataError(
            f"tar file {path} is compressed by {_COMPRESSED[first]}, so no sample can be read without those before it",
            code="data.tar-compressed",
            fix="decompress it: images are compressed already",
        )


def _damaged(path: Location, problem: str) -> DataError:
    return DataError(
        f"tar file {path} is truncated or damaged ({problem})",
        code="data.tar-damaged",
        fix="copy or write it again",
    )
