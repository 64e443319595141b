"""The order of samples: a keyed permutation, O(1) in memory, the same at any number of ranks.

The idea: position i of an epoch holds sample P(i), where P is a pseudorandom permutation keyed by (seed, epoch), so no
list of indices is drawn, stored or sent. The invariant: a position has no rank in it; data-parallel ranks take spans of
positions, so any world size reads the same global batches, and a checkpoint needs three integers. P is an unbalanced
Feistel network over the next power of two (Luby and Rackoff, 1988) that walks on where it leaves the dataset
(cycle walking: Black and Rogaway, "Ciphers with arbitrary finite domains", 2002).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from shardwise.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Sequence


_ROUNDS = 6
_MIX_A = np.uint64(0xFF51AFD7ED558CCD)  # the finaliser of MurmurHash3 (public domain, Austin Appleby)
_MIX_B = np.uint64(0xC4CEB9FE1A85EC53)
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


class Cursor(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Where training stands in the stream of samples: three integers, nothing about ranks."""

    seed: int
    epoch: int = 0
    index: int = 0
    """Samples of this epoch that are already used."""

    def advance(self, samples: int, length: int) -> Cursor:
        """Return the cursor after `samples` more of a dataset of `length`; an epoch ends with its last sample."""
        index = self.index + samples
        if index >= length:
            return Cursor(seed=self.seed, epoch=self.epoch + 1)
        return Cursor(seed=self.seed, epoch=self.epoch, index=index)


class Places(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Where the samples of a micro-batch stand in the stream."""

    seed: int
    epoch: int
    indices: Sequence[int]
    """In the order of the epoch, one for each sample."""

    def keys(self) -> npt.NDArray[np.uint64]:
        """Return a number for each sample, the same wherever and whenever it comes again at this place."""
        places = np.asarray(self.indices, dtype=np.uint64) + np.uint64(1)
        return _mix(_mix(_state(self.seed, self.epoch)) + places * np.uint64(_GOLDEN))


def sample_ids(places: npt.NDArray[np.int64], *, seed: int, epoch: int, length: int) -> npt.NDArray[np.int64]:
    """Return which samples stand at `places` of an epoch over a dataset of `length`.

    A Feistel network permutes the next power of two; places that fall outside the dataset walk on until they
    fall inside (less than once on average). Cost and memory depend on the number of places alone.
    """
    if len(places) and (places.min() < 0 or places.max() >= length):
        raise DataError(
            f"a place outside an epoch of {length} samples",
            code="data.position-outside-epoch",
            fix="stay inside the epoch",
        )
    bits = max(2, (length - 1).bit_length())
    keys = _round_keys(seed, epoch)
    ids = _permute(places.astype(np.uint64), bits, keys)
    outside = ids >= length
    while outside.any():
        ids[outside] = _permute(ids[outside], bits, keys)
        outside = ids >= length
    return ids.astype(np.int64)


def _permute(values: npt.NDArray[np.uint64], bits: int, keys: list[np.uint64]) -> npt.NDArray[np.uint64]:
    """One pass of an unbalanced Feistel network over `bits` bits: a bijection for any keys."""
    low_bits, high_bits = np.uint64(bits // 2), np.uint64(bits - bits // 2)
    low_mask = np.uint64((1 << int(low_bits)) - 1)
    high_mask = np.uint64((1 << int(high_bits)) - 1)
    high, low = values >> low_bits, values & low_mask
    for number, key in enumerate(keys):
        if number % 2 == 0:
            high = high ^ (_mix(low ^ key) & high_mask)
        else:
            low = low ^ (_mix(high ^ key) & low_mask)
    return (high << low_bits) | low


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    values = (values ^ (values >> np.uint64(33))) * _MIX_A
    values = (values ^ (values >> np.uint64(33))) * _MIX_B
    return values ^ (values >> np.uint64(33))


def _round_keys(seed: int, epoch: int) -> list[np.uint64]:
    """Keys from (seed, epoch) by a Weyl sequence through the mixer; neighbouring seeds share nothing."""
    weyl = np.arange(1, _ROUNDS + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    return list(_mix(_state(seed, epoch) + weyl))


def _state(seed: int, epoch: int) -> npt.NDArray[np.uint64]:
    return _mix(np.array([seed & _MASK], dtype=np.uint64)) ^ np.uint64((epoch + 1) * _GOLDEN & _MASK)


# Which positions of an epoch each data-parallel rank and micro-batch gets: pure arithmetic.


@dataclass(frozen=True, kw_only=True)
class Slices:
    """How one data-parallel rank splits the global batches of an epoch into micro-batches."""

    batch_size: int
    """Global batch size: samples per optimizer step over all data-parallel ranks."""
    accumulation: int
    dp_rank: int
    """Which of the `dp_size` data-parallel ranks this is; never the global rank."""
    dp_size: int
    length: int
    """Samples in the dataset."""

    def __post_init__(self) -> None:
        if self.length < 1:
            raise DataError("the training set is empty", code="data.no-samples", fix="give a dataset with samples")

    @property
    def micro_batch(self) -> int:
        """Rows of a full micro-batch."""
        return self.batch_size // (self.dp_size * self.accumulation)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps per epoch; the last may be short, none is dropped."""
        return -(-self.length // self.batch_size)

    def rows_of_step(self, step: int) -> int:
        """Real samples of a step of the epoch, over all data-parallel ranks."""
        return min(self.batch_size, self.length - step * self.batch_size)

    def places(self, step: int) -> list[tuple[int, int]]:
        """Return (start, stop) in the epoch's order for each micro-batch of this rank; empty spans are allowed.

        A short step is spread evenly, so that no rank waits for another and as few as possible have nothing.
        """
        rows, first, cells = self.rows_of_step(step), step * self.batch_size, self.dp_size * self.accumulation
        start = self.dp_rank * self.accumulation
        return [
            (first + cell * rows // cells, first + (cell + 1) * rows // cells)
            for cell in range(start, start + self.accumulation)
        ]
