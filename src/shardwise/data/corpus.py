"""A corpus of token sources as one stream of rows: shuffled by groups of chunks, mixed by proportions.

An epoch of a source permutes its chunks by a key, forms groups of a few chunks, and permutes the documents of a group
by another key: no list of the corpus is ever in memory, and 10^12 tokens cost no more than 10^6. The documents of a
group are concatenated and split into windows of one row each, which are permuted once more. The invariant: a position
(the row of the mixture, and epoch, group and row of each source) determines all rows after it, whatever the number of
ranks and loader workers. A checkpoint stores a few integers per source, and a resumed run prepares one group of each.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from shardwise.data.cursor import sample_ids
from shardwise.errors import DataError
from shardwise.job.losses import IGNORE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardwise.data.mixture import Mixture

CHUNKS_PER_GROUP = 16
"""Chunks whose documents are shuffled together: 16 million tokens of a corpus that `shardwise data prepare` wrote."""


class TokenSource(Protocol):
    """Documents of token ids, stored in chunks, with random access to each chunk."""

    name: str
    num_chunks: int

    def lengths(self, chunk: int) -> npt.NDArray[np.int64]:
        """Return the number of tokens of each document of a chunk."""

    def read(self, chunk: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return tokens of a chunk, by their offsets in it; documents lie one after the other."""


class SourcePosition(msgspec.Struct, frozen=True, kw_only=True):
    """The next row of one source."""

    epoch: int = 0
    group: int = 0
    row: int = 0


class CorpusForm(msgspec.Struct, frozen=True, kw_only=True):
    """What the rows of a corpus depend on: positions of a corpus of another form have no meaning in this one."""

    length: int
    chunks_per_group: int
    sources: tuple[str, ...]
    """Name and number of chunks of each source."""


class CorpusPosition(msgspec.Struct, frozen=True, kw_only=True):
    """The next row of a corpus: O(sources) integers, independent of ranks and loader workers."""

    row: int
    """Rows of the mixture that were read."""
    sources: tuple[SourcePosition, ...]
    """By source, in their order."""
    form: CorpusForm


class Row(NamedTuple):
    """One row as pieces of documents, which are contiguous tokens of a chunk."""

    source: int
    chunks: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    """First token of each piece in its chunk."""
    lengths: npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False, kw_only=True)
class Corpus(IterableDataset[tuple[Tensor, Tensor]]):
    """Rows of `length` tokens from several sources, without end: (int64 [length] tokens, int64 [length] targets)."""

    sources: tuple[TokenSource, ...]
    mixture: Mixture
    length: int
    """Tokens per row; each has the next token of its source as target."""
    chunks_per_group: int = CHUNKS_PER_GROUP
    seed: int = 0
    """Key of the order of `iter`; a training uses the seed of its job."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        rows = CorpusRows(self, seed=self.seed)
        while True:
            tokens, targets = self.read(*rows.take(1))
            yield torch.from_numpy(tokens), torch.from_numpy(targets)

    @property
    def form(self) -> CorpusForm:
        """What the rows depend on, except the proportions, which may change when a run is resumed."""
        names = tuple(f"{source.name}: {source.num_chunks} chunks" for source in self.sources)
        return CorpusForm(length=self.length, chunks_per_group=self.chunks_per_group, sources=names)

    def read(self, row: Row) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the tokens and targets [length] of a row; padding at the end of a group has ignored targets."""
        window = np.zeros(self.length + 1, dtype=np.int64)
        source, filled = self.sources[row.source], 0
        for chunk, start, size in zip(row.chunks.tolist(), row.starts.tolist(), row.lengths.tolist(), strict=True):
            window[filled : filled + size] = source.read(chunk, start, start + size)
            filled += size
        targets = window[1:].copy()
        targets[max(0, filled - 1) :] = IGNORE
        return window[:-1], targets


class CorpusRows:
    """Iterates over the rows of a corpus from a position, on every rank alike; it reads lengths, not tokens."""

    def __init__(self, corpus: Corpus, *, seed: int, position: CorpusPosition | None = None) -> None:
        self._corpus, self._form = corpus, corpus.form
        self._row = 0
        starts: Sequence[SourcePosition] = [SourcePosition()] * len(corpus.sources)
        if position is not None:
            _check_form(position.form, self._form)
            self._row, starts = position.row, position.sources
        self._sources = [
            _SourceRows(corpus, source, seed=seed, position=start)
            for source, start in zip(corpus.sources, starts, strict=True)
        ]

    @property
    def position(self) -> CorpusPosition:
        """The position of the next row."""
        return CorpusPosition(row=self._row, sources=tuple(each.position for each in self._sources), form=self._form)

    def take(self, number: int, wanted: range | None = None) -> list[Row]:
        """Advance by `number` rows and return them, or only those with an index in `wanted`."""
        sources = self._corpus.mixture.sources(self._row, self._row + number)
        self._row += number
        rows = []
        for index, source in enumerate(sources.tolist()):
            group, place = self._sources[source].advance()
            if wanted is None or index in wanted:
                rows.append(Row(source, *group.row(place)))
        return rows


def _check_form(saved: CorpusForm, now: CorpusForm) -> None:
    """Raise DataError if rows would be repeated or left out because the corpus differs from that of the checkpoint."""
    for name in ("sources", "length", "chunks_per_group"):
        before, after = getattr(saved, name), getattr(now, name)
        if before != after:
            raise DataError(
                f"{name} of the corpus was {before} in the checkpoint and is {after} now",
                code="data.corpus-changed",
                fix="resume with the corpus of the run, or start a new run from these weights",
            )


class _SourceRows:
    """The rows of one source, one group at a time."""

    def __init__(self, corpus: Corpus, source: TokenSource, *, seed: int, position: SourcePosition) -> None:
        self._source = source
        self._length, self._chunks_per_group = corpus.length, corpus.chunks_per_group
        # Two sources with equal numbers of chunks have different orders.
        self._seed = seed + (zlib.crc32(source.name.encode()) << 31)
        self._num_groups = -(-source.num_chunks // corpus.chunks_per_group)
        self.position = position
        self._group: _Group | None = None

    def advance(self) -> tuple[_Group, int]:
        """Return the group and the row of the position, and advance to the next row, group or epoch."""
        group, position = self._load(), self.position
        if position.row + 1 == group.num_rows:
            self._next_group()
        else:
            self.position = SourcePosition(epoch=position.epoch, group=position.group, row=position.row + 1)
        return group, position.row

    def _load(self) -> _Group:
        """Return the group of the position; groups without tokens are skipped."""
        num_tried = 0
        while self._group is None:
            place = self.position
            group = make_group(
                self._source,
                self._chunks(place.epoch, place.group),
                length=self._length,
                seed=self._seed,
                number=place.epoch * self._num_groups + place.group,
            )
            if group.num_rows:
                self._group = group
                break
            num_tried += 1
            if num_tried > self._num_groups:
                raise DataError(
                    f"source {self._source.name} has no document with at least two tokens",
                    code="data.source-empty",
                    fix="remove it from the mixture, or prepare it from text that is not empty",
                )
            self._next_group()
        return self._group

    def _next_group(self) -> None:
        self._group = None
        epoch, group = self.position.epoch, self.position.group + 1
        if group == self._num_groups:
            epoch, group = epoch + 1, 0
        self.position = SourcePosition(epoch=epoch, group=group)

    def _chunks(self, epoch: int, group: int) -> npt.NDArray[np.int64]:
        """Return the chunks of a group: the next ones of the epoch's permutation."""
        first = group * self._chunks_per_group
        last = min(first + self._chunks_per_group, self._source.num_chunks)
        positions = np.arange(first, last)
        return sample_ids(positions, seed=self._seed, epoch=epoch, length=self._source.num_chunks)


@dataclass(frozen=True, eq=False, kw_only=True)
class _Group:
    """The documents of a shuffle group, concatenated in their order and split into windows."""

    chunks: npt.NDArray[np.int64]
    """Chunk of each document."""
    starts: npt.NDArray[np.int64]
    """First token of each document in its chunk."""
    sizes: npt.NDArray[np.int64]
    """Tokens of each document."""
    ends: npt.NDArray[np.int64]
    """Tokens up to the end of each document, in the concatenated group."""
    order: npt.NDArray[np.int64]
    """The windows in the order in which they are read."""
    length: int

    @property
    def num_rows(self) -> int:
        """Number of windows."""
        return len(self.order)

    def row(self, number: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return chunk, start and length of each piece of a window, which includes the first token of the next one."""
        begin = int(self.order[number]) * self.length
        end = min(begin + self.length + 1, int(self.ends[-1]))
        first = int(np.searchsorted(self.ends, begin, side="right"))
        last = int(np.searchsorted(self.ends, end, side="left"))
        pieces = slice(first, last + 1)
        ends = self.ends[pieces]
        begins = ends - self.sizes[pieces]
        lower, upper = np.maximum(begins, begin), np.minimum(ends, end)
        return self.chunks[pieces], self.starts[pieces] + (lower - begins), upper - lower


def make_group(source: TokenSource, chunks: npt.NDArray[np.int64], *, length: int, seed: int, number: int) -> _Group:
    """Return the windows of `length` tokens of these chunks; `number` keys the order of documents and windows.

    Every token but the first of the group is a target of one window.
    """
    lengths = [source.lengths(chunk) for chunk in chunks.tolist()]
    owners = np.repeat(chunks, [len(each) for each in lengths])
    starts = np.concatenate([np.cumsum(each) - each for each in lengths])
    sizes = np.concatenate(lengths)
    is_kept = sizes > 0
    owners, starts, sizes = owners[is_kept], starts[is_kept], sizes[is_kept]
    order = _permutation(len(sizes), seed=seed, number=2 * number)
    sizes = sizes[order]
    ends = np.cumsum(sizes)
    num_tokens = int(ends[-1]) if len(ends) else 0
    num_rows = max(0, -(-(num_tokens - 1) // length))
    windows = _permutation(num_rows, seed=seed, number=2 * number + 1)
    return _Group(chunks=owners[order], starts=starts[order], sizes=sizes, ends=ends, order=windows, length=length)


def _permutation(length: int, *, seed: int, number: int) -> npt.NDArray[np.int64]:
    if length == 0:
        return np.empty(0, dtype=np.int64)
    return sample_ids(np.arange(length), seed=seed + 1, epoch=number, length=length)
