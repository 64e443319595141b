"""Token files of other projects: nanoGPT and llm.c `.bin`, NumPy `.npy`, Megatron `.bin` with `.idx`.

nanoGPT writes raw uint16. llm.c writes 256 int32 before the tokens: a magic number that implies the dtype, version 1
and the number of tokens. Both, and NumPy arrays, are streams without documents: an end-of-document id splits them into
documents, else each chunk is one document. Megatron's `.idx` (MMapIndexedDataset) stores the length and the byte
offset of each sequence, and the first sequence of each document.
"""

from __future__ import annotations

import bisect
import io
import os
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shardwise.data.sources.source import (
    CHUNK_TOKENS,
    DocumentStarts,
    EvenStarts,
    FileSource,
    MappedFile,
    StartsAfter,
)
from shardwise.data.storage.files import FileArray, is_file, open_bytes, truncated, typed
from shardwise.data.storage.read_ahead import ReadAhead
from shardwise.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from shardwise.data.storage.locations import Location

_LLM_C_HEADER = 256 * 4
_LLM_C = {20240520: ("<u2", 50_257), 20240801: ("<u4", 128_256)}
"""Magic number of llm.c -> dtype and vocabulary size: GPT-2, Llama 3."""
_MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
_MEGATRON_HEADER = struct.Struct("<QBQQ")
_MEGATRON_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_SAMPLED_FILES = 64
_SAMPLED_BLOCKS = 32
"""Blocks whose checksum is in the identity of a source, but at least two of each file: on object storage, 32 requests
for one file and 128 for many."""
_SAMPLE_BYTES = 4096
_SAMPLE_THREADS = 8


@dataclass(frozen=True)
class TokenStream:
    """Where the tokens of a file are: their dtype and the bytes before them."""

    dtype: np.dtype[Any]
    header_bytes: int = 0
    vocab_size: int | None = None


@dataclass(frozen=True)
class StreamFiles:
    """Files of one folder that have the same format and no documents."""

    folder: Location
    names: NDArray[np.bytes_]
    """File names as bytes: a tenth of the memory of Path objects."""
    stream: TokenStream
    end_id: int | None
    chunk_tokens: int

    def path(self, number: int) -> Location:
        """Return the path of a file."""
        return self.folder / os.fsdecode(self.names[number])

    def describe(self) -> str:
        """Return what documents depend on besides sizes: dtype, end-of-document id, and samples of the content."""
        paths = [self.path(number) for number in _evenly(len(self.names), _SAMPLED_FILES)]
        return f"{self.stream.dtype} with end {self.end_id}, {_sampled_crc32(paths):08x}"

    def open_file(self, number: int) -> MappedFile:
        """Map a file; raises DataError if its format differs from that of the first file."""
        path = self.path(number)
        content = open_bytes(path)
        stream = read_stream(path, content, default=self.stream.dtype)
        if stream != self.stream:
            raise DataError(
                f"{path} has another token format than {self.path(0)}",
                code="data.formats-differ",
                fix="keep files of one format in a folder",
            )
        tokens = typed(content, stream.dtype, stream.header_bytes)
        starts: DocumentStarts = EvenStarts(len(tokens), self.chunk_tokens)
        if self.end_id is not None:
            starts = StartsAfter(tokens, self.end_id)
        return MappedFile(tokens, starts)


def open_streams(
    folder: Location, sizes: Mapping[str, int], *, end_id: int | None, dtype: str, chunk_tokens: int = CHUNK_TOKENS
) -> FileSource:
    """Return a source over `.bin` or `.npy` files of a folder, by name and size; opens only the first file.

    `dtype` applies to `.bin` files without a header.
    """
    names = list(sizes)
    first = folder / names[0]
    stream = read_stream(first, open_bytes(first), default=np.dtype(dtype).newbyteorder("<"))
    if end_id is not None and end_id > np.iinfo(stream.dtype).max:
        raise DataError(
            f"the end-of-document id {end_id} does not occur in {first}, whose tokens are {stream.dtype}",
            code="data.end-id-invalid",
            fix="pass the token that ends documents in this file",
        )
    encoded = np.array([os.fsencode(name) for name in names])
    files = StreamFiles(folder, encoded, stream, end_id, chunk_tokens)
    num_bytes = np.fromiter(sizes.values(), np.int64, len(sizes)) - stream.header_bytes
    _check_sizes(files, num_bytes)
    return FileSource(
        folder.name if len(names) > 1 else first.stem,
        num_bytes // stream.dtype.itemsize,
        files.open_file,
        vocab_size=stream.vocab_size,
        chunk_tokens=chunk_tokens,
        describe=files.describe,
        has_documents=end_id is not None,
        read_ahead=None if isinstance(folder, Path) else ReadAhead(),
    )


def _check_sizes(files: StreamFiles, num_bytes: NDArray[np.int64]) -> None:
    """Raise DataError for the first file whose bytes after the header are not whole tokens, or none."""
    header, itemsize = files.stream.header_bytes, files.stream.dtype.itemsize
    for number in np.flatnonzero((num_bytes <= 0) | (num_bytes % itemsize != 0)).tolist():
        path, found = files.path(number), int(num_bytes[number])
        if found == 0:
            raise _no_tokens(path)
        raise truncated(path, header + found, header + max(0, -(-found // itemsize)) * itemsize)


def _evenly(count: int, most: int) -> list[int]:
    """Return at most `most` of the numbers below `count` at equal distances, the first and the last included."""
    numbers: list[int] = np.unique(np.linspace(0, count - 1, min(count, most)).astype(np.int64)).tolist()
    return numbers


def _sampled_crc32(paths: Sequence[Location]) -> int:
    """Return a checksum of blocks at equal distances in files, the first and the last block of each included."""
    with ThreadPoolExecutor(_SAMPLE_THREADS) as threads:  # blocks of objects are requests
        contents = list(threads.map(open_bytes, paths))
        blocks = []
        for content in contents:
            last = max(1, len(content) - _SAMPLE_BYTES + 1)
            blocks += [(content, start) for start in _evenly(last, max(2, _SAMPLED_BLOCKS // len(paths)))]
        found = threads.map(lambda block: block[0][block[1] : block[1] + _SAMPLE_BYTES].tobytes(), blocks)
        return zlib.crc32(b"".join(found))


def _no_tokens(path: Location) -> DataError:
    return DataError(f"{path} contains no tokens", code="data.no-tokens", fix="pass files with tokens")


def read_stream(path: Location, content: FileArray, *, default: np.dtype[Any]) -> TokenStream:
    """Return the token format of a file by its header; raises DataError if its size differs from the header."""
    if path.suffix == ".npy":
        stream, count = _npy_stream(path, content)
    else:
        stream, count = _bin_stream(path, content, default)
    expected = stream.header_bytes + count * stream.dtype.itemsize
    if len(content) != expected:
        raise truncated(path, len(content), expected)
    if count == 0:
        raise _no_tokens(path)
    return stream


def _bin_stream(path: Location, content: FileArray, default: np.dtype[Any]) -> tuple[TokenStream, int]:
    """Return the format and number of tokens of a `.bin` file: llm.c's if it has that header, else raw tokens."""
    if len(content) >= _LLM_C_HEADER:
        magic, version, count = (int(value) for value in content[:12].view("<i4"))
        if magic in _LLM_C:
            if version != 1:
                raise _header_invalid(path, f"llm.c version {version}, expected 1")
            dtype, vocab_size = _LLM_C[magic]
            return TokenStream(np.dtype(dtype), _LLM_C_HEADER, vocab_size), count
    return TokenStream(default), -(-len(content) // default.itemsize)


def _npy_stream(path: Location, content: FileArray) -> tuple[TokenStream, int]:
    """Return the format and number of tokens of a NumPy file."""
    start = io.BytesIO(content[:65_536].tobytes())
    try:
        version = np.lib.format.read_magic(start)
        read_header = np.lib.format.read_array_header_1_0
        if version != (1, 0):
            read_header = np.lib.format.read_array_header_2_0
        shape, _, dtype = read_header(start)
    except ValueError as error:
        raise _header_invalid(path, str(error)) from None
    if len(shape) != 1 or dtype.kind not in "iu":
        raise _header_invalid(path, f"an array of {dtype} with shape {shape}, expected integers in one dimension")
    return TokenStream(dtype, start.seek(0, os.SEEK_CUR)), int(shape[0])


def _header_invalid(path: Location, problem: str) -> DataError:
    return DataError(
        f"the header of {path} is invalid ({problem})",
        code="data.header-invalid",
        fix="pass a token file of a supported format",
    )


# Megatron: the starts of documents come from two memory-mapped arrays, so that no list of documents is in memory.


@dataclass(frozen=True)
class MegatronStarts:
    """Starts of Megatron documents: the offset of the first sequence of each document."""

    sizes: FileArray
    """Tokens of each sequence, int32."""
    pointers: FileArray
    """Byte offset of each sequence, int64."""
    documents: FileArray
    """First sequence of each document, and the number of sequences at the end."""
    itemsize: int
    num_tokens: int

    def between(self, low: int, high: int) -> NDArray[np.int64]:
        """Return the starts in [low, high)."""
        first, last = self._find(low), self._find(high)
        if first == last:
            return np.empty(0, np.int64)
        next_sequence = int(self.documents[min(last, len(self.documents) - 1)])
        self._check_order(int(self.documents[first]), min(next_sequence, len(self.pointers) - 1))
        sequences = self.documents[first:last]
        low, high = int(sequences.min()), int(sequences.max()) + 1  # one range, since those of an object are requests
        starts: NDArray[np.int64] = self.pointers[low:high][sequences - low] // self.itemsize
        return starts

    def first_from(self, position: int) -> int:
        """Return the first start from `position`."""
        return self._start(self._find(position))

    def _find(self, position: int) -> int:
        return bisect.bisect_left(range(len(self.documents)), position, key=self._start)

    def _check_order(self, first: int, last: int) -> None:
        """Raise DataError unless the sequences first to last follow each other in the file."""
        ends = self.pointers[first:last] + self.sizes[first:last].astype(np.int64) * self.itemsize
        wrong = np.flatnonzero(ends != self.pointers[first + 1 : last + 1])
        if len(wrong):
            raise DataError(
                f"sequence {first + int(wrong[0]) + 1} of a Megatron index does not follow the sequence before it",
                code="data.sequences-not-contiguous",
                fix="write the dataset again with Megatron's preprocess_data.py",
            )

    def _start(self, document: int) -> int:
        sequence = int(self.documents[document]) if document < len(self.documents) else len(self.pointers)
        if sequence >= len(self.pointers):
            return self.num_tokens
        return int(self.pointers[sequence]) // self.itemsize


def is_megatron(index: Location) -> bool:
    """Return whether a file is the index of a Megatron dataset."""
    return is_file(index) and open_bytes(index)[: len(_MEGATRON_MAGIC)].tobytes() == _MEGATRON_MAGIC


def open_megatron(tokens_path: Location, index_path: Location, *, chunk_tokens: int = CHUNK_TOKENS) -> FileSource:
    """Return a source over a Megatron `.bin` and `.idx`."""
    file = MegatronFile(tokens_path, index_path)
    num_tokens = len(file.open_file(0).tokens)
    if num_tokens == 0:
        raise _no_tokens(tokens_path)
    return FileSource(
        tokens_path.stem,
        np.array([num_tokens]),
        file.open_file,
        chunk_tokens=chunk_tokens,
        describe=file.describe,
        read_ahead=None if isinstance(tokens_path, Path) else ReadAhead(),
    )


@dataclass(frozen=True)
class MegatronFile:
    """The two files of a Megatron dataset."""

    tokens_path: Location
    index_path: Location

    def describe(self) -> str:
        """Return a checksum of samples of both files."""
        return f"{_sampled_crc32([self.tokens_path, self.index_path]):08x}"

    def open_file(self, _number: int) -> MappedFile:
        """Map both files; raises DataError if their sizes do not match the header."""
        index = open_bytes(self.index_path)
        start = len(_MEGATRON_MAGIC)
        if len(index) < start + _MEGATRON_HEADER.size:
            raise truncated(self.index_path, len(index), start + _MEGATRON_HEADER.size)
        version, code, num_sequences, num_documents = _MEGATRON_HEADER.unpack(
            index[start : start + _MEGATRON_HEADER.size].tobytes()
        )
        if version != 1 or code not in _MEGATRON_DTYPES:
            raise _header_invalid(self.index_path, f"version {version}, dtype code {code}")
        start += _MEGATRON_HEADER.size
        expected = start + num_sequences * (4 + 8) + num_documents * 8
        if len(index) != expected:
            raise truncated(self.index_path, len(index), expected)
        sizes_end, pointers_end = start + num_sequences * 4, start + num_sequences * 12
        sizes = typed(index, np.dtype("<i4"), start, sizes_end)
        pointers = typed(index, np.dtype("<i8"), sizes_end, pointers_end)
        documents = typed(index, np.dtype("<i8"), pointers_end)
        dtype = np.dtype(_MEGATRON_DTYPES[code])
        content = open_bytes(self.tokens_path)
        last_byte = int(pointers[-1]) + int(sizes[-1]) * dtype.itemsize if num_sequences else 0
        if len(content) != last_byte:
            raise truncated(self.tokens_path, len(content), last_byte)
        tokens = typed(content, dtype)
        return MappedFile(tokens, MegatronStarts(sizes, pointers, documents, dtype.itemsize, len(tokens)))
