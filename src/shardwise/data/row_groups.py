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
    from collections.abc import Sequence

    from shardwise.data.sources.source import TokenSource

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
    """The rows of a shuffle group."""

    pieces: Pieces
    """The pieces of all rows, one row after the other."""
    offsets: Integers
    """[rows + 1]: row r has the pieces offsets[r] to offsets[r + 1]."""
    order: Integers
    """The rows in the order in which they are read."""

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self.order)

    def row(self, number: int) -> Pieces:
        """Return the pieces of one row."""
        row = self.order[number]
        here = slice(self.offsets[row], self.offsets[row + 1])
        chunks, starts, lengths, is_continued = self.pieces
        return Pieces(chunks[here], starts[here], lengths[here], is_continued[here])


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
    documents, begins, pieces, offsets = pack(sizes, length) if packed else windows(sizes, length)
    return RowGroup(
        pieces=Pieces(
            chunks=owners[order][documents],
            starts=starts[order][documents] + begins,
            lengths=pieces,
            is_continued=begins + pieces < sizes[documents],
        ),
        offsets=offsets,
        order=_permutation(len(offsets) - 1, seed=seed, number=2 * number + 1),
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


# Reading the tokens of rows into arrays [rows, length].


def read_windows(rows: Sequence[Pieces], sources: Sequence[TokenSource], length: int) -> tuple[Integers, Integers]:
    """Return tokens and targets of windows; targets of padding, at the end of a group, are ignored."""
    tokens = np.empty((len(rows), length), dtype=np.int64)
    targets = np.empty_like(tokens)
    for number, (pieces, source) in enumerate(zip(rows, sources, strict=True)):
        filled, row, shifted = 0, tokens[number], targets[number]
        for chunk, start, size, _ in zip(*(each.tolist() for each in pieces), strict=True):
            found = source.tokens(chunk)[start : start + size]
            row[filled : filled + size] = found[: length - filled]
            first = 1 - min(filled, 1)  # the first token of a window is not a target
            shifted[filled - 1 + first : filled - 1 + size] = found[first:]
            filled += size
        row[filled:] = 0
        shifted[filled - 1 :] = IGNORE
    return tokens, targets


def read_packed(
    rows: Sequence[Pieces], sources: Sequence[TokenSource], length: int, *, is_packed: Sequence[bool]
) -> tuple[Integers, ...]:
    """Return tokens, position ids, document ids and targets of rows, some of which are packed.

    Positions start at 0 in every piece of a packed row. The target of a document's last token is ignored, and so are
    those of padding, which is a document of its own. A window is one document.
    """
    tokens, positions, documents = (np.zeros((len(rows), length), dtype=np.int64) for _ in range(3))
    targets = np.full((len(rows), length), IGNORE, dtype=np.int64)
    counted = np.arange(length)
    for number, (pieces, source) in enumerate(zip(rows, sources, strict=True)):
        if not is_packed[number]:
            (tokens[number],), (targets[number],) = read_windows([pieces], [source], length)
            positions[number] = counted
            continue
        filled = 0
        for index, (chunk, start, size, is_continued) in enumerate(
            zip(*(each.tolist() for each in pieces), strict=True)
        ):
            end = filled + size
            found = source.tokens(chunk)[start : start + size + is_continued]
            tokens[number, filled:end] = found[:size]
            targets[number, filled : filled + len(found) - 1] = found[1:]
            positions[number, filled:end] = counted[:size]
            documents[number, filled:end] = index
            filled = end
        positions[number, filled:] = counted[: length - filled]
        documents[number, filled:] = len(pieces.chunks)
    return tokens, positions, documents, targets
