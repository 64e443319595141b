"""The corpus format of `shardwise data prepare`: shards of raw tokens, document starts, and a JSON index.

    index.json          dtype, tokenizer, vocabulary size, end-of-document id; tokens and checksum of each shard
    shard-00000.bin     tokens, little-endian uint16 or uint32, one document after the other
    shard-00000.idx     int64 starts of the documents, and the number of tokens at the end
    tokenizer.json      a copy of the tokenizer file, if the corpus was not tokenized as bytes
    prepare.jsonl       what `data prepare` needs to continue; not part of the corpus

Each document ends with the end-of-document id. The index has columns in place of one object per shard, so that NumPy
reads a million shards in 0.3 s with 100 MB. It is written last: a folder without it is not a corpus.
"""

from __future__ import annotations

import os
import secrets
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np
from zlib_ng import zlib_ng

from shardwise.data.sources.source import CHUNK_TOKENS, Checksums, FileSource, MappedFile, StoredStarts
from shardwise.data.storage.files import (
    FileArray,
    in_memory,
    list_files,
    open_bytes,
    read_file,
    size_and_version,
    truncated,
    typed,
    unreadable,
)
from shardwise.data.storage.read_ahead import ReadAhead
from shardwise.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from shardwise.data.storage.locations import Location

INDEX = "index.json"
TOKENIZER = "tokenizer.json"
JOURNAL = "prepare.jsonl"
"""Complete shards of an interrupted `data prepare`; see `data/prepare/journal.py`."""
VERSION = 1
_STARTS_DTYPE = np.dtype("<i8")
_CRC_BLOCK = 2**26
_PARTIAL = ".tmp-"
"""Prefix of files that are being written."""


class TokenizerName(msgspec.Struct, frozen=True, kw_only=True):
    """The tokenizer of a corpus: "bytes", or the name of a tokenizer file and the SHA-256 of its content."""

    name: str
    sha256: str = ""


class ShardColumns(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The facts of all shards as undecoded JSON arrays of integers, in the order of the shards."""

    tokens: msgspec.Raw
    documents: msgspec.Raw
    tokens_crc32: msgspec.Raw
    starts_crc32: msgspec.Raw


class CorpusIndex(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of index.json."""

    version: int
    dtype: Literal["uint16", "uint32"]
    tokenizer: TokenizerName
    vocab_size: int
    end_id: int
    chunk_tokens: int
    num_shards: int
    num_tokens: int
    num_documents: int
    num_empty: int
    """Documents without tokens, which the corpus does not contain."""
    shards: ShardColumns


class ShardFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of one shard that the index records."""

    tokens: int
    documents: int
    tokens_crc32: int
    starts_crc32: int


@dataclass(frozen=True)
class TokenShards:
    """A corpus in the format of this module, opened by its index; the shards are opened on access."""

    folder: Location
    index: CorpusIndex
    columns: dict[str, NDArray[np.int64]]
    """Name of a field of ShardFacts -> its value for each shard."""

    def paths(self, number: int) -> tuple[Location, Location]:
        """Return the files of a shard: tokens and document starts."""
        tokens, starts = _shard_names(number)
        return self.folder / tokens, self.folder / starts

    def open_shard(self, number: int) -> MappedFile:
        """Map a shard; raises DataError if a file is missing or its size differs from the index.

        The document starts of a remote shard are downloaded as a whole, and their checksum is verified.
        """
        tokens_path, starts_path = self.paths(number)
        tokens = _sized(tokens_path, int(self.columns["tokens"][number]), token_dtype(self.index.dtype))
        starts = _sized(starts_path, int(self.columns["documents"][number]) + 1, _STARTS_DTYPE)
        content = in_memory(starts)
        if not isinstance(self.folder, Path):
            _compare(starts_path, zlib_ng.crc32(content), int(self.columns["starts_crc32"][number]))
        return MappedFile(tokens, StoredStarts(content))

    def source(self) -> FileSource:
        """Return the corpus as a TokenSource."""
        is_local = isinstance(self.folder, Path)
        return FileSource(
            self.folder.name,
            self.columns["tokens"],
            self.open_shard,
            vocab_size=self.index.vocab_size,
            chunk_tokens=self.index.chunk_tokens,
            checksum=zlib.crc32(np.ascontiguousarray(self.columns["tokens_crc32"]).tobytes()),
            checksums=Checksums(str(self.folder), self.num_bytes, self.check_checksums) if is_local else None,
            read_ahead=None if is_local else ReadAhead(),
        )

    @property
    def num_bytes(self) -> int:
        """Size of all shards."""
        num_starts = self.index.num_documents + self.index.num_shards
        return self.index.num_tokens * token_dtype(self.index.dtype).itemsize + num_starts * _STARTS_DTYPE.itemsize

    def check_sizes(self) -> None:
        """Raise DataError if a file of a shard is missing or has another size than the index specifies."""
        itemsize = token_dtype(self.index.dtype).itemsize
        sizes = None  # one request lists a thousand objects
        if not isinstance(self.folder, Path) and self.folder.can_list:
            sizes = list_files(self.folder, (".bin", ".idx"))
        for number in range(self.index.num_shards):
            tokens_path, starts_path = self.paths(number)
            _check_size(tokens_path, int(self.columns["tokens"][number]) * itemsize, sizes)
            _check_size(starts_path, (int(self.columns["documents"][number]) + 1) * _STARTS_DTYPE.itemsize, sizes)

    def check_checksums(self) -> None:
        """Read every byte of the shards and raise DataError if a checksum differs from the index."""
        self.check_sizes()
        for number in range(self.index.num_shards):
            for path, column in zip(self.paths(number), ("tokens_crc32", "starts_crc32"), strict=True):
                check_checksum(path, int(self.columns[column][number]))


def shard_paths(folder: Path, number: int) -> tuple[Path, Path]:
    """Return the files of a shard: tokens and document starts."""
    tokens, starts = _shard_names(number)
    return folder / tokens, folder / starts


def _shard_names(number: int) -> tuple[str, str]:
    return f"shard-{number:05d}.bin", f"shard-{number:05d}.idx"


def token_dtype(name: str) -> np.dtype[Any]:
    """Return the little-endian dtype of stored tokens."""
    return np.dtype(name).newbyteorder("<")


def smallest_dtype(vocab_size: int) -> Literal["uint16", "uint32"]:
    """Return the dtype in which every id of a vocabulary fits."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


def open_corpus(folder: Location) -> TokenShards:
    """Read the index of a corpus; no shard is opened."""
    path = folder / INDEX
    try:
        index = msgspec.json.decode(read_file(path), type=CorpusIndex)
    except OSError as error:
        raise unreadable(path, error) from error
    except msgspec.MsgspecError as error:
        raise _invalid(path, str(error)) from None
    if index.version != VERSION:
        raise DataError(
            f"{path} has version {index.version}, this release reads version {VERSION}",
            code="data.index-version",
            fix="upgrade shardwise, or prepare the corpus again",
        )
    columns = {}
    for name in ShardFacts.__struct_fields__:
        columns[name] = _column(path, name, getattr(index.shards, name), index.num_shards)
    totals = (int(columns["tokens"].sum()), int(columns["documents"].sum()))
    if totals != (index.num_tokens, index.num_documents):
        raise _invalid(path, f"shards have {totals[0]} tokens in {totals[1]} documents, the totals differ")
    return TokenShards(folder, index, columns)


def _column(path: Location, name: str, raw: msgspec.Raw, num_shards: int) -> NDArray[np.int64]:
    """Parse a JSON array of integers without a Python object per number."""
    text = bytes(raw).strip(b"[] \r\n\t")
    if text.strip(b"0123456789, \r\n\t"):
        raise _invalid(path, f"column {name} must contain integers")
    values = np.fromstring(text.decode(), dtype=np.int64, sep=",")
    if len(values) != num_shards:
        raise _invalid(path, f"column {name} has {len(values)} values for {num_shards} shards")
    return values


def _invalid(path: Location, problem: str) -> DataError:
    return DataError(
        f"{path} is not a valid index ({problem})",
        code="data.index-invalid",
        fix="restore it, or prepare the corpus again",
    )


def _sized(path: Location, count: int, dtype: np.dtype[Any]) -> FileArray:
    content = open_bytes(path)
    if len(content) != count * dtype.itemsize:
        raise truncated(path, len(content), count * dtype.itemsize)
    return typed(content, dtype)


def _check_size(path: Location, expected: int, sizes: dict[str, int] | None) -> None:
    if sizes is None:
        found, _ = size_and_version(path) or (None, 0)
    else:
        found = sizes.get(path.name)
    if found is None:
        raise DataError(
            f"shard {path} does not exist", code="data.shard-missing", fix="restore it, or prepare the corpus again"
        )
    if found != expected:
        raise truncated(path, found, expected)


def check_checksum(path: Location, expected: int) -> None:
    """Read a file and raise DataError if its CRC-32 differs from `expected`."""
    content = open_bytes(path)
    found = 0
    for start in range(0, len(content), _CRC_BLOCK):
        found = zlib_ng.crc32(content[start : start + _CRC_BLOCK], found)
    _compare(path, found, expected)


def _compare(path: Location, found: int, expected: int) -> None:
    if found != expected:
        raise DataError(
            f"the CRC-32 of {path} is {found:08x}, but the index specifies {expected:08x}",
            code="data.checksum-mismatch",
            fix="copy the file again, or prepare the corpus again",
        )


# Writing: shards appear under their names only when they are complete, and the index last.


class ShardWriter:
    """Writes one shard: tokens as they arrive, document starts at the end."""

    def __init__(self, folder: Path, number: int, dtype: str) -> None:
        self.num_tokens = 0
        self._paths = shard_paths(folder, number)
        self._dtype = token_dtype(dtype)
        self._partial = _partial(self._paths[0])
        self._file = self._partial.open("wb")
        self._crc32 = 0
        self._lengths: list[NDArray[np.int64]] = []

    def add(self, tokens: NDArray[Any], lengths: NDArray[np.int64]) -> None:
        """Append documents: their tokens, one document after the other, and the number of tokens of each."""
        content = tokens.astype(self._dtype, copy=False).view(np.uint8)
        self._crc32 = zlib_ng.crc32(content, self._crc32)
        self._file.write(content.data)
        self._lengths.append(lengths)
        self.num_tokens += len(tokens)

    def close(self) -> ShardFacts:
        """Flush both files to disk and give them their names."""
        starts = np.cumsum(np.concatenate([np.zeros(1, np.int64), *self._lengths]), dtype=_STARTS_DTYPE).tobytes()
        replace_file(self._paths[1], starts)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._partial.rename(self._paths[0])
        return ShardFacts(
            tokens=self.num_tokens,
            documents=sum(map(len, self._lengths)),
            tokens_crc32=self._crc32,
            starts_crc32=zlib_ng.crc32(starts),
        )


def write_index(
    folder: Path,
    shards: Iterable[ShardFacts],
    *,
    dtype: Literal["uint16", "uint32"],
    tokenizer: TokenizerName,
    vocab_size: int,
    end_id: int,
    num_empty: int,
    chunk_tokens: int = CHUNK_TOKENS,
) -> CorpusIndex:
    """Write index.json atomically and return its content."""
    facts = list(shards)
    columns = {name: [getattr(each, name) for each in facts] for name in ShardFacts.__struct_fields__}
    index = CorpusIndex(
        version=VERSION,
        dtype=dtype,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        end_id=end_id,
        chunk_tokens=chunk_tokens,
        num_shards=len(facts),
        num_tokens=sum(columns["tokens"]),
        num_documents=sum(columns["documents"]),
        num_empty=num_empty,
        shards=ShardColumns(**{name: msgspec.Raw(msgspec.json.encode(each)) for name, each in columns.items()}),
    )
    replace_file(folder / INDEX, msgspec.json.encode(index) + b"\n")
    return index


def replace_file(path: Path, content: bytes) -> None:
    """Write a file atomically and flush it and its directory entry to disk."""
    partial = _partial(path)
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _partial(path: Path) -> Path:
    return path.with_name(f"{_PARTIAL}{path.name}-{secrets.token_hex(4)}")


def remove_partial_files(folder: Path) -> None:
    """Remove the files of an interrupted writer, which have no name yet."""
    for path in folder.glob(f"{_PARTIAL}*"):
        path.unlink()
