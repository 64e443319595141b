"""TokenSource: documents of token ids in chunks, and its implementation over files of any format.

The idea: a file is one array of tokens in which documents follow each other, and a chunk is the documents that start
in one window of `chunk_tokens` tokens of a file. So the chunks of a file follow from its size alone: no format needs a
table of chunks, a document is never split between chunks, and a chunk is found without reading the others. A window
inside a long document has no start, so its chunk is empty.

The invariant: the chunks of a source, one after the other, contain each token of each file exactly once, in order.
Opening a source costs eight bytes per file; files are mapped at their first read, and at most MAX_MAPPED stay mapped.
The chunks of objects on object storage are read into memory, and downloaded ahead if `prefetch` names them.
"""

from __future__ import annotations

import functools
import zlib
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from shardwise.data.storage.remote_file import RemoteArray
from shardwise.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from numpy.typing import NDArray

    from shardwise.data.storage.files import FileArray
    from shardwise.data.storage.read_ahead import ReadAhead

CHUNK_TOKENS = 2**20
"""Tokens of a window: 2 MiB of uint16, large enough for sequential reads and small enough to shuffle in memory."""
MAX_MAPPED = 64
"""Files of a source that stay mapped; Linux limits the maps of a process to 65,530 by default."""
MAX_IN_MEMORY = 32
"""Chunks of a remote source in memory: two shuffle groups, 64 MiB of uint16."""
_TAIL_TOKENS = 2**15
"""Tokens after a window that are downloaded with it, since its last document may end there."""
_SCAN_TOKENS = 2**16
"""Tokens that are compared at once in the search for the end of a document."""


class TokenSource(Protocol):
    """Documents of token ids, stored in chunks; random access without reading the rest of the corpus."""

    @property
    def name(self) -> str:
        """Name of the source in reports and errors."""

    @property
    def num_chunks(self) -> int:
        """Number of chunks; some may be empty."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all chunks."""

    @property
    def vocab_size(self) -> int | None:
        """One more than the largest id that may occur; None if unknown."""

    @property
    def identity(self) -> str:
        """A text that changes if the documents do: a position in a changed source has no meaning."""

    def lengths(self, chunk: int) -> NDArray[np.int64]:
        """Return the number of tokens of each document of a chunk, in the order of the documents."""

    def tokens(self, chunk: int) -> NDArray[Any]:
        """Return the tokens of a chunk, in which documents follow each other, without a copy; any integer type."""


@runtime_checkable
class ReadsAhead(Protocol):
    """A TokenSource that can download chunks before they are read."""

    def prefetch(self, chunks: Iterable[int]) -> None:
        """Begin to download chunks, in this order, and return at once."""


class DocumentStarts(Protocol):
    """The positions in a file at which documents start."""

    def between(self, low: int, high: int) -> NDArray[np.int64]:
        """Return the starts in [low, high), in ascending order."""

    def first_from(self, position: int) -> int:
        """Return the first start that is not before `position`; the number of tokens of the file if there is none."""


@dataclass(frozen=True)
class Checksums:
    """The stored checksums of a source on disk."""

    path: str
    num_bytes: int
    """Bytes that `check` reads."""
    check: Callable[[], None]
    """Raises DataError if the content differs."""


@dataclass(frozen=True)
class MappedFile:
    """A file of tokens, read on access, with the starts of its documents."""

    tokens: FileArray
    starts: DocumentStarts


class FileSource:
    """A TokenSource over files of tokens, opened at their first read; for one thread, other processes may copy it."""

    def __init__(
        self,
        name: str,
        tokens_per_file: NDArray[np.int64],
        open_file: Callable[[int], MappedFile],
        *,
        vocab_size: int | None = None,
        chunk_tokens: int = CHUNK_TOKENS,
        checksum: int = 0,
        describe: Callable[[], str] | None = None,
        has_documents: bool = True,
        checksums: Checksums | None = None,
        read_ahead: ReadAhead | None = None,
    ) -> None:
        """Create a source; `open_file` maps the file with a number from 0 to len(tokens_per_file) - 1.

        `checksum` is that of the content, if it is known without reading it; else `describe` returns a text that
        depends on the content, called when the identity is first needed. `has_documents` is False if every chunk is
        one document. `checksums` are those of a format that stores them. `read_ahead` downloads remote files, so
        `open_file` must be safe to call from its threads.
        """
        self.name = name
        self.vocab_size = vocab_size
        self.has_documents = has_documents
        self.checksums = checksums
        self.num_tokens = int(tokens_per_file.sum())
        self._chunk_tokens = chunk_tokens
        self._tokens_per_file = tokens_per_file
        windows = -(-tokens_per_file // chunk_tokens)
        self._first_chunk = np.concatenate([[0], np.cumsum(windows)])
        self.num_chunks = int(self._first_chunk[-1])
        self._checksum, self._describe = checksum, describe
        self._open_file = open_file
        self._mapped: OrderedDict[int, MappedFile] = OrderedDict()
        self._views: OrderedDict[int, NDArray[Any]] = OrderedDict()
        """Chunks that were read last, since the rows of a group lie in a few chunks."""
        self._read_ahead = read_ahead
        self._opened: dict[int, MappedFile] = {}
        """Files that a thread has opened ahead, until they are mapped."""

    @functools.cached_property
    def identity(self) -> str:
        """A text that changes with the sizes of the files, and with what `checksum` and `describe` cover."""
        sizes = zlib.crc32(np.ascontiguousarray(self._tokens_per_file, dtype=np.int64).tobytes(), self._checksum)
        identity = f"{self.num_tokens} tokens in chunks of {self._chunk_tokens}, {sizes:08x}"
        if self._describe is not None:
            identity += f", {self._describe()}"
        return identity

    def lengths(self, chunk: int) -> NDArray[np.int64]:
        """Return the number of tokens of each document of a chunk; documents without tokens are left out."""
        file, low, high = self._window(chunk)
        starts = file.starts.between(low, high)
        lengths = np.diff(starts, append=file.starts.first_from(high))
        return lengths[lengths > 0].astype(np.int64, copy=False)

    def tokens(self, chunk: int) -> NDArray[Any]:
        """Return a view of the mapped file, or the tokens that were read from an object."""
        view = self._views.get(chunk)
        if view is None:
            file, low, high = self._window(chunk)
            view = file.tokens[file.starts.first_from(low) : file.starts.first_from(high)]
            if len(self._views) >= (MAX_IN_MEMORY if isinstance(file.tokens, RemoteArray) else MAX_MAPPED):
                self._views.popitem(last=False)
            self._views[chunk] = view
        return view

    def read(self, chunk: int, start: int, stop: int) -> NDArray[np.int64]:
        """Return a copy of the tokens [start, stop) of a chunk."""
        view = self.tokens(chunk)
        if not 0 <= start <= stop <= len(view):
            raise IndexError(f"tokens [{start}, {stop}) are outside chunk {chunk}, which has {len(view)} tokens")
        return view[start:stop].astype(np.int64)

    def prefetch(self, chunks: Iterable[int]) -> None:
        """Begin to download chunks of remote files; does nothing for local ones."""
        if self._read_ahead is not None:
            for chunk in chunks:
                self._read_ahead.submit(functools.partial(self._download, chunk))

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without maps, which pickle would copy; the receiver maps the files again."""
        return {**self.__dict__, "_mapped": OrderedDict(), "_views": OrderedDict(), "_opened": {}}

    def _download(self, chunk: int) -> None:
        """Download the documents of a chunk into the cache; called from a thread."""
        number, low, high = self._place(chunk)
        file = self._mapped.get(number) or self._opened.get(number)
        if file is None:
            file = self._open_file(number)
            if len(self._opened) < MAX_MAPPED:
                self._opened[number] = file
        if isinstance(file.tokens, RemoteArray):
            file.tokens.prefetch(low, high + _TAIL_TOKENS)

    def _window(self, chunk: int) -> tuple[MappedFile, int, int]:
        """Return the file of a chunk and the positions between which the chunk's documents start."""
        number, low, high = self._place(chunk)
        return self._map(number), low, high

    def _place(self, chunk: int) -> tuple[int, int, int]:
        """Return the number of the file of a chunk and the positions between which the chunk's documents start."""
        if not 0 <= chunk < self.num_chunks:
            raise IndexError(f"chunk {chunk} is outside {self.name}, which has {self.num_chunks} chunks")
        number = int(np.searchsorted(self._first_chunk, chunk, side="right")) - 1
        low = (chunk - int(self._first_chunk[number])) * self._chunk_tokens
        return number, low, min(low + self._chunk_tokens, int(self._tokens_per_file[number]))

    def _map(self, number: int) -> MappedFile:
        if number not in self._mapped:
            if len(self._mapped) >= MAX_MAPPED:
                self._mapped.popitem(last=False)
            opened = self._opened.pop(number) if number in self._opened else self._open_file(number)
            self._mapped[number] = opened
        self._mapped.move_to_end(number)
        return self._mapped[number]


@dataclass(frozen=True)
class StoredStarts:
    """Starts from a stored array of int64: the start of each document, and the number of tokens at the end."""

    offsets: NDArray[np.int64]

    def between(self, low: int, high: int) -> NDArray[np.int64]:
        """Return the stored starts in [low, high)."""
        first, last = np.searchsorted(self.offsets[:-1], [low, high])
        return self.offsets[first:last]

    def first_from(self, position: int) -> int:
        """Return the first stored start from `position`."""
        return int(self.offsets[np.searchsorted(self.offsets, position)])


@dataclass(frozen=True)
class StartsAfter:
    """Starts found by scanning tokens: position 0, and each position after an end-of-document id."""

    tokens: FileArray
    end_id: int

    def between(self, low: int, high: int) -> NDArray[np.int64]:
        """Return the starts in [low, high) by scanning this part of the file."""
        first = max(low - 1, 0)
        found = np.flatnonzero(self.tokens[first : max(high - 1, first)] == self.end_id) + first + 1
        if low == 0 < high:
            found = np.concatenate([[0], found])
        return found

    def first_from(self, position: int) -> int:
        """Return the first start from `position` by scanning until the end of a document."""
        if position == 0:
            return 0
        for low in range(position - 1, len(self.tokens), _SCAN_TOKENS):
            found = np.flatnonzero(self.tokens[low : low + _SCAN_TOKENS] == self.end_id)
            if len(found):
                return low + int(found[0]) + 1
        return len(self.tokens)


@dataclass(frozen=True)
class EvenStarts:
    """Starts of a file without documents: every `length` tokens."""

    num_tokens: int
    length: int

    def between(self, low: int, high: int) -> NDArray[np.int64]:
        """Return the multiples of `length` in [low, high)."""
        return np.arange(self.first_from(low), high, self.length)

    def first_from(self, position: int) -> int:
        """Return the first multiple of `length` from `position`."""
        return min(-(-position // self.length) * self.length, self.num_tokens)


def without_rows(name: str) -> DataError:
    """Return the error for a source of which no row has a target."""
    return DataError(
        f"source {name} has no document with at least two tokens",
        code="data.source-empty",
        fix="remove it from the mixture, or prepare it from text that is not empty",
    )


# Token ids that a model does not know.


def vocabulary_too_large(name: str, size: int, vocab_size: int) -> DataError:
    """Return the error for a source whose tokenizer has more ids than the model."""
    return DataError(
        f"source {name} has a vocabulary of {size} ids, but the model has {vocab_size}",
        code="data.vocabulary-too-large",
        fix=f"set the vocabulary size of the model to {size} or more, or use another tokenizer",
    )


def outside_vocabulary(name: str, token_id: int, vocab_size: int) -> DataError:
    """Return the error for a token id that the model does not have."""
    fix = f"set the vocabulary size of the model to {token_id + 1} or more, or use its tokenizer"
    if token_id < 0:
        fix = "write the tokens again as uint16 or uint32, whose values do not become negative"
    return DataError(
        f"source {name} has the token id {token_id}, but the model has a vocabulary of {vocab_size} ids",
        code="data.token-outside-vocabulary",
        fix=fix,
    )
