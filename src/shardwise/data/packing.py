"""Packing of documents into rows of a fixed length, from their lengths alone.

Best-fit decreasing: documents in descending order of length, each into the fullest row that has enough space left. It
needs at most 11/9 of the optimal number of rows (Johnson, 1973), and truncates nothing (Ding et al., "Fewer Truncations
Improve Language Modeling", 2024). A document longer than a row is split into full rows and a remainder. The invariant:
the result is a function of the lengths, so any rank, and a resumed run, packs a group in the same way.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class PackedRows(NamedTuple):
    """The pieces of documents in rows, ordered by row and by their place in it."""

    documents: npt.NDArray[np.int64]
    """Document of each piece."""
    starts: npt.NDArray[np.int64]
    """First token of each piece in its document."""
    lengths: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    """[rows + 1]: row r has the pieces offsets[r] to offsets[r + 1]."""

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self.offsets) - 1


def pack(lengths: npt.NDArray[np.int64], row_length: int) -> PackedRows:
    """Return the rows of documents with these lengths; empty documents are left out, and long ones are split."""
    documents, starts, sizes = _pieces(lengths, row_length)
    rows = _best_fit_decreasing(sizes, row_length)
    order = np.lexsort((np.arange(len(rows)), rows))
    counts = np.bincount(rows, minlength=int(rows.max(initial=-1)) + 1)
    offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    return PackedRows(documents[order], starts[order], sizes[order], offsets)


def _pieces(
    lengths: npt.NDArray[np.int64], row_length: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return document, start and size of each piece: documents split where they exceed a row."""
    num_pieces = -(-lengths // row_length)
    documents = np.repeat(np.arange(len(lengths)), num_pieces)
    firsts = np.cumsum(num_pieces) - num_pieces
    starts = (np.arange(len(documents)) - np.repeat(firsts, num_pieces)) * row_length
    sizes = np.minimum(lengths[documents] - starts, row_length)
    return documents, starts, sizes


def _best_fit_decreasing(sizes: npt.NDArray[np.int64], row_length: int) -> npt.NDArray[np.int64]:
    """Return the row of each piece.

    Bit c of `free` is set if a row has c tokens left, so the fullest row with enough space is the lowest set bit at or
    above the size: one shift of a large integer, 1 us at 8,192 tokens.
    """
    rows = np.empty(len(sizes), dtype=np.int64)
    by_space: list[deque[int]] = [deque() for _ in range(row_length + 1)]
    free, num_rows = 0, 0
    order = np.argsort(-sizes, kind="stable")
    for piece, size in zip(order.tolist(), sizes[order].tolist(), strict=True):
        candidates = free >> size
        if candidates:
            space = size + (candidates & -candidates).bit_length() - 1
            row = by_space[space].popleft()
            if not by_space[space]:
                free &= ~(1 << space)
        else:
            space, row = row_length, num_rows
            num_rows += 1
        rows[piece] = row
        left = space - size
        if left:
            by_space[left].append(row)
            free |= 1 << left
    return rows
