"""Reading the tokens of rows into tensors [rows, length].

The idea: the pieces of all rows of a batch are copied one after the other into one array [rows, length + 1] of the
files' own dtype. Its rows without their last token are the tokens, and without their first token the targets, so that
conversion to int64 happens once for each, at the speed of memory. Python handles one slice per piece and no token.
The additional token is the first one of the next window, or the next token of a document that a packed row splits. The
invariant: a piece of a split document fills its row (`packing.py`), so its next token has this place.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardwise.job.losses import IGNORE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.data.row_groups import Integers, RowPieces
    from shardwise.data.sources.source import TokenSource

_CHUNK_BITS = 40
"""Bits of a chunk's number in a key that has the number of its source above them."""
_MAX_ARRAYS = 256
"""Arrays of batches that may be used again: three steps of 32 micro-batches, if their rows have two fields."""


class RowRequest(NamedTuple):
    """Rows to read: a few arrays, which cost a loader worker 20 us to receive."""

    rows: RowPieces
    sources: Integers
    """Number of the source of each row."""

    def span(self, first: int, stop: int) -> RowRequest:
        """Return the rows from `first` to `stop`."""
        return RowRequest(self.rows.span(first, stop), self.sources[first:stop])


class BatchMemory:
    """Allocates the tensors of batches: pinned for a GPU, else memory of earlier batches that nothing refers to.

    New memory costs a page fault per 4 KiB, which takes as long as reading the tokens. Torch caches pinned memory. A
    tensor keeps a view of its array alive, as do all tensors that share its storage, so an array is free when the view
    has gone. Batches are freed in the order in which they were read, thus only the oldest array is tried.
    """

    def __init__(self, *, pin_memory: bool = False) -> None:
        self._pin_memory = pin_memory
        self._arrays: deque[tuple[Integers, weakref.ref[Integers]]] = deque(maxlen=_MAX_ARRAYS)

    def tensors(self, number: int, num_rows: int, length: int) -> list[Tensor]:
        """Return int64 tensors [num_rows, length] with any values."""
        shape = (num_rows, length)
        if self._pin_memory:
            return [torch.empty(shape, dtype=torch.int64, pin_memory=True) for _ in range(number)]
        return [torch.from_numpy(self._array(shape)) for _ in range(number)]

    def _array(self, shape: tuple[int, int]) -> Integers:
        """Return a view of the oldest array, or of a new one if a tensor still uses it."""
        array = None
        if self._arrays and self._arrays[0][1]() is None:
            array, _ = self._arrays.popleft()
        if array is None or array.shape != shape:
            array = np.empty(shape, dtype=np.int64)
        view = array.view()
        self._arrays.append((array, weakref.ref(view)))
        return view


def read_windows(request: RowRequest, sources: Sequence[TokenSource], length: int, memory: BatchMemory) -> list[Tensor]:
    """Return tokens and targets of windows; targets of padding, at the end of a group, are ignored."""
    rows = request.rows
    found = _gather(request, sources, rows.pieces.lengths, length)
    tokens, targets = memory.tensors(2, rows.num_rows, length)
    np.copyto(tokens.numpy(), found[:, :-1])
    np.copyto(targets.numpy(), found[:, 1:])
    filled = np.add.reduceat(rows.pieces.lengths, rows.offsets[:-1])
    for row in np.flatnonzero(filled <= length).tolist():
        targets[row, filled[row] - 1 :] = IGNORE
    return [tokens, targets]


def read_packed(
    request: RowRequest,
    sources: Sequence[TokenSource],
    length: int,
    memory: BatchMemory,
    *,
    is_packed: npt.NDArray[np.bool_],
) -> list[Tensor]:
    """Return tokens, position ids, document ids and targets of rows; `is_packed` has a value for each row.

    Positions start at 0 in every piece of a packed row. The target of a document's last token is ignored, and so are
    those of padding, which is a document of its own. A window is one document.
    """
    rows = request.rows
    num_rows, pieces = rows.num_rows, rows.pieces
    owners = np.repeat(np.arange(num_rows), np.diff(rows.offsets))
    in_packed = is_packed[owners]
    found = _gather(request, sources, pieces.lengths + (pieces.is_continued & in_packed), length)
    tensors = memory.tensors(4, num_rows, length)
    tokens, positions, documents, targets = (each.numpy() for each in tensors)
    np.copyto(tokens, found[:, :-1])
    np.copyto(targets, found[:, 1:])
    filled = np.add.reduceat(pieces.lengths, rows.offsets[:-1])
    ends = np.cumsum(pieces.lengths) - (np.cumsum(filled) - filled)[owners]  # within the row
    is_last = in_packed & ~pieces.is_continued
    targets[owners[is_last], ends[is_last] - 1] = IGNORE
    for row in np.flatnonzero(filled < length + ~is_packed).tolist():
        targets[row, filled[row] - 1 :] = IGNORE

    # Documents start at each piece of a packed row and at its padding; a window has one start.
    is_start = in_packed.copy()
    is_start[rows.offsets[:-1]] = True
    padded = np.flatnonzero(is_packed & (filled < length))
    starts = (owners * length + ends - pieces.lengths)[is_start]
    starts = np.sort(np.concatenate((starts, padded * length + filled[padded])))
    sizes = np.diff(starts, append=num_rows * length)
    firsts = np.searchsorted(starts, np.arange(num_rows) * length)
    np.subtract(np.arange(num_rows * length), np.repeat(starts, sizes), out=positions.reshape(-1))
    documents.reshape(-1)[:] = np.repeat(np.arange(len(starts)) - firsts[starts // length], sizes)
    return tensors


def find_unknown_id(fields: Sequence[Tensor], vocab_size: int) -> tuple[int, int] | None:
    """Return the row and the value of a token id that is not in [0, `vocab_size`); None if there is none.

    Files of signed integers have negative ids if those of the tokenizer exceeded their type.
    """
    inputs, last = fields[0], fields[-1][:, -1:]  # of the targets of a row, only the last is not one of its inputs
    last = last.where(last != IGNORE, 0)
    lowest = min(int(inputs.min()), int(last.min()))
    highest = max(int(inputs.max()), int(last.max()))
    if lowest >= 0 and highest < vocab_size:
        return None
    found = lowest if lowest < 0 else highest
    has_it = (torch.cat((inputs, last), dim=1) == found).any(dim=1)
    return int(has_it.int().argmax()), found


def _gather(
    request: RowRequest, sources: Sequence[TokenSource], sizes: Integers, length: int
) -> npt.NDArray[np.integer[Any]]:
    """Return [rows, length + 1] tokens: `sizes` tokens from the start of each piece, and zeros to the end of a row."""
    (pieces, offsets), numbers = request
    keys = (np.repeat(numbers << _CHUNK_BITS, np.diff(offsets)) | pieces.chunks).tolist()
    views = {key: sources[key >> _CHUNK_BITS].tokens(key & ((1 << _CHUNK_BITS) - 1)) for key in set(keys)}
    dtypes = {view.dtype for view in views.values()}
    dtype = dtypes.pop() if len(dtypes) == 1 else np.dtype(np.int64)
    spans = zip(keys, pieces.starts.tolist(), (pieces.starts + sizes).tolist(), strict=True)
    parts = [views[key][start:end] for key, start, end in spans]
    gaps = length + 1 - np.add.reduceat(sizes, offsets[:-1])
    zeros = np.zeros(int(gaps.max()), dtype=dtype)
    for row in np.flatnonzero(gaps)[::-1].tolist():  # from the last row on, since an insertion moves what follows
        parts.insert(offsets[row + 1], zeros[: gaps[row]])
    return np.concatenate(parts, dtype=dtype).reshape(-1, length + 1)
