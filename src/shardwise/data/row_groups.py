"""The rows of one shuffle group: windows over its concatenated documents, or documents packed into rows.

A row is a list of pieces, contiguous tokens of documents, which are computed from lengths alone; tokens are read later
(`row_reads.py`), by the rank that needs the row. In both forms every token has the token after it as target, once: in
windows across the ends of documents, in packed rows inside of documents only. Several rows are a few arrays over all of
their pieces, so that a batch of rows costs Python no object per row or piece until its tokens are read.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from shardwise.data.cursor import sample_ids
from shardwise.data.packing import PackedRows, pack
from shardwise.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.data.sources.source import TokenSource

CHUNKS_PER_GROUP = 16
"""Chunks whose documents are shuffled together: 16 million tokens of a corpus that `shardwise data prepare` wrote."""
Integers = npt.NDArray[np.int64]


class Pieces(NamedTuple):
    """Pieces of rows, each in one chunk."""

    chunks: Integers
    starts: Integers
    """First token of each piece in its chunk."""
    lengths: Integers
    is_continued: npt.NDArray[np.bool_]
    """Whether the document of each piece has another token after it, the target of the piece's last token."""


class RowPieces(NamedTuple):
    """Several rows."""

    pieces: Pieces
    """The pieces of all rows, one row after the other."""
    offsets: Integers
    """[rows + 1]: row r has the pieces offsets[r] to offsets[r + 1]."""

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self.offsets) - 1

    def select(self, rows: Integers) -> RowPieces:
        """Return these rows, in this order."""
        begins = self.offsets[rows]
        counts = self.offsets[rows + 1] - begins
        offsets = _offsets(counts)
        index = np.repeat(begins - offsets[:-1], counts)
        index += np.arange(len(index))
        chunks, starts, lengths, is_continued = self.pieces
        return RowPieces(Pieces(chunks[index], starts[index], lengths[index], is_continued[index]), offsets)

    def span(self, first: int, stop: int) -> RowPieces:
        """Return the rows from `first` to `stop`, without a copy."""
        here = slice(self.offsets[first], self.offsets[stop])
        chunks, starts, lengths, is_continued = self.pieces
        pieces = Pieces(chunks[here], starts[here], lengths[here], is_continued[here])
        return RowPieces(pieces, self.offsets[first : stop + 1] - self.offsets[first])


def join_rows(parts: Sequence[RowPieces]) -> RowPieces:
    """Return the rows of all parts, one part after the other."""
    columns = zip(*(part.pieces for part in parts), strict=True)
    counts = np.concatenate([np.diff(part.offsets) for part in parts])
    return RowPieces(Pieces(*(np.concatenate(column) for column in columns)), _offsets(counts))


def _offsets(counts: Integers) -> Integers:
    offsets = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets


@dataclass(frozen=True, eq=False, kw_only=True)
class RowGroup:
    """The rows of a shuffle group."""

    rows: RowPieces
    order: Integers
    """The rows in the order in which they are read."""

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self.order)

    def read_order(self, first: int, stop: int) -> RowPieces:
        """Return the rows from `first` to `stop` in the order in which they are read."""
        return self.rows.select(self.order[first:stop])


def source_seed(name: str, seed: int) -> int:
    """Return the key of the order of a source: sources with equal numbers of chunks have different orders."""
    return seed + (zlib.crc32(name.encode()) << 31)


def chunks_of_group(num_chunks: int, group: int, *, size: int, seed: int, epoch: int) -> Integers:
    """Return the chunks of a group of `size` chunks: the next ones of the epoch's permutation."""
    positions = np.arange(group * size, min((group + 1) * size, num_chunks))
    return sample_ids(positions, seed=seed, epoch=epoch, length=num_chunks)


def make_group(
    source: TokenSource,
    chunks: Integers,
    *,
    length: int,
    packed: bool,
    split_documents: bool = True,
    seed: int | None = None,
    number: int = 0,
) -> RowGroup:
    """Return the rows of `length` tokens of these chunks.

    Without `split_documents`, raises DataError if a packed document is longer than a row. `seed` and `number` key the
    order of documents and of rows; without a seed, both are in the order of the source.
    """
    lengths = [source.lengths(chunk) for chunk in chunks.tolist()]
    owners = np.repeat(chunks, [len(each) for each in lengths])
    starts = np.concatenate([np.cumsum(each) - each for each in lengths])
    sizes = np.concatenate(lengths).astype(np.int64)
    if packed and not split_documents and sizes.max(initial=0) > length:
        raise _too_long(source.name, int(sizes.max()), int(owners[sizes.argmax()]), length)
    kept = np.flatnonzero(sizes)
    order = kept[_permutation(len(kept), seed=seed, number=2 * number)]
    sizes = sizes[order]
    documents, begins, pieces, offsets = pack(sizes, length) if packed else windows(sizes, length)
    rows = RowPieces(
        Pieces(
            chunks=owners[order][documents],
            starts=starts[order][documents] + begins,
            lengths=pieces,
            is_continued=begins + pieces < sizes[documents],
        ),
        offsets,
    )
    return RowGroup(rows=rows, order=_permutation(rows.num_rows, seed=seed, number=2 * number + 1))


def _too_long(name: str, size: int, chunk: int, length: int) -> DataError:
    return DataError(
        f"chunk {chunk} of {name} has a document of {size} tokens, which is longer than a row of {length}, and"
        " split_documents is False",
        code="data.document-too-long",
        fix=f"pass length={size} or more, or split_documents=True, which also continues this run",
    )


def windows(sizes: Integers, length: int) -> PackedRows:
    """Return windows of `length` + 1 tokens over concatenated documents; the last token is also the next one's first.

    Every token but the first of all is a target of one window.
    """
    ends = np.cumsum(sizes)
    total = int(ends[-1]) if len(ends) else 0
    num_rows = max(0, -(-(total - 1) // length))
    begins = np.arange(num_rows) * length
    stops = np.minimum(begins + length + 1, total)
    firsts = np.searchsorted(ends, begins, side="right")
    lasts = np.searchsorted(ends, stops, side="left")
    counts = lasts - firsts + 1
    offsets = _offsets(counts)
    owners = np.repeat(np.arange(num_rows), counts)
    documents = np.arange(len(owners)) - np.repeat(offsets[:-1] - firsts, counts)
    begin_of = ends[documents] - sizes[documents]
    lower = np.maximum(begin_of, begins[owners])
    upper = np.minimum(ends[documents], stops[owners])
    return PackedRows(documents, lower - begin_of, upper - lower, offsets)


def _permutation(length: int, *, seed: int | None, number: int) -> Integers:
    if seed is None or length == 0:
        return np.arange(length)
    return sample_ids(np.arange(length), seed=seed + 1, epoch=number, length=length)
