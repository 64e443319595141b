"""The rows of one shuffle group: windows over its concatenated documents, or documents packed into rows.

A row is a list of pieces, contiguous tokens of documents, which are computed from lengths alone; tokens are read later,
by the rank that needs the row. In both forms every token has the token after it as target, once: in windows across the
ends of documents, in packed rows inside of documents only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from shardwise.data.cursor import sample_ids
from shardwise.data.packing import PackedRows, pack
from shardwise.job.losses import IGNORE

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardwise.data.sources.source import TokenSource

    Read = Callable[[int, int, int], npt.NDArray[np.int64]]

Integers = npt.NDArray[np.int64]


class Pieces(NamedTuple):
    """The pieces of a row, each in one chunk."""

    chunks: Integers
    starts: Integers
    """First token of each piece in its chunk."""
    lengths: Integers
    is_continued: npt.NDArray[np.bool_]
    """Whether the document of each piece has another token after it, the target of the piece's last token."""


@dataclass(frozen=True, eq=False, kw_only=True)
class RowGroup:
    """The documents of a shuffle group in their order, and its rows."""

    chunks: Integers
    """Chunk of each document."""
    starts: Integers
    """First token of each document in its chunk."""
    sizes: Integers
    """Tokens of each document."""
    rows: PackedRows
    order: Integers
    """The rows in the order in which they are read."""

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self.order)

    def row(self, number: int) -> Pieces:
        """Return the pieces of one row."""
        documents, begins, lengths, _ = self.rows.row(int(self.order[number]))
        is_continued = begins + lengths < self.sizes[documents]
        return Pieces(self.chunks[documents], self.starts[documents] + begins, lengths, is_continued)


def make_group(
    source: TokenSource, chunks: Integers, *, length: int, packed: bool, seed: int | None = None, number: int = 0
) -> RowGroup:
    """Return the rows of `length` tokens of these chunks.

    `seed` and `number` key the order of documents and of rows; without a seed, both are in the order of the source.
    """
    lengths = [source.lengths(chunk) for chunk in chunks.tolist()]
    owners = np.repeat(chunks, [len(each) for each in lengths])
    starts = np.concatenate([np.cumsum(each) - each for each in lengths])
    sizes = np.concatenate(lengths).astype(np.int64)
    kept = np.flatnonzero(sizes)
    order = kept[_permutation(len(kept), seed=seed, number=2 * number)]
    sizes = sizes[order]
    rows = pack(sizes, length) if packed else windows(sizes, length)
    return RowGroup(
        chunks=owners[order],
        starts=starts[order],
        sizes=sizes,
        rows=rows,
        order=_permutation(rows.num_rows, seed=seed, number=2 * number + 1),
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
    offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
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


# Reading the tokens of a row.


def read_window(pieces: Pieces, read: Read, length: int) -> tuple[Integers, Integers]:
    """Return tokens and targets [length] of a window; targets of padding, at the end of a group, are ignored."""
    window = np.zeros(length + 1, dtype=np.int64)
    filled = 0
    for chunk, start, size in zip(pieces.chunks.tolist(), pieces.starts.tolist(), pieces.lengths.tolist(), strict=True):
        window[filled : filled + size] = read(chunk, start, start + size)
        filled += size
    targets = window[1:].copy()
    targets[max(0, filled - 1) :] = IGNORE
    return window[:-1], targets


def read_packed(pieces: Pieces, read: Read, length: int) -> tuple[Integers, Integers, Integers, Integers]:
    """Return tokens, position ids, document ids and targets [length] of a packed row.

    Positions start at 0 in every piece. The target of a document's last token is ignored, and so are those of padding,
    which is a document of its own.
    """
    tokens, positions, documents = (np.zeros(length, dtype=np.int64) for _ in range(3))
    targets = np.full(length, IGNORE, dtype=np.int64)
    filled = 0
    for number, (chunk, start, size, is_continued) in enumerate(zip(*(each.tolist() for each in pieces), strict=True)):
        found = read(chunk, start, start + size + is_continued)
        here = slice(filled, filled + size)
        tokens[here] = found[:size]
        positions[here] = np.arange(size)
        documents[here] = number
        targets[filled : filled + len(found) - 1] = found[1:]
        filled += size
    positions[filled:] = np.arange(length - filled)
    documents[filled:] = len(pieces.chunks)
    return tokens, positions, documents, targets
