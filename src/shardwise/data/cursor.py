"""The order of samples, a keyed permutation with O(1) memory that does not depend on the number of ranks.

The idea: position i of an epoch is sample P(i), where P is a pseudorandom permutation keyed by (seed, epoch), so
indices are never generated, stored or sent as a list. The invariant: positions do not depend on ranks; data-parallel
ranks read spans of positions, so any world size reads the same global batches, and a checkpoint stores three integers.
P is an unbalanced Feistel network over the next power of two (Luby and Rackoff, 1988), repeated for values outside the
dataset (cycle walking: Black and Rogaway, "Ciphers with arbitrary finite domains", 2002).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
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
    """The position of the training in the sample stream: three integers, independent of ranks."""

    seed: int
    epoch: int = 0
    index: int = 0
    """Number of samples of this epoch that were already read."""

    def advance(self, samples: int, length: int) -> Cursor:
        """Return the cursor after `samples` more samples of a dataset of `length`; the last sample ends the epoch."""
        index = self.index + samples
        if index >= length:
            return Cursor(seed=self.seed, epoch=self.epoch + 1)
        return Cursor(seed=self.seed, epoch=self.epoch, index=index)


class SamplePositions(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The positions of a micro-batch's samples in the sample stream."""

    seed: int
    epoch: int
    indices: Sequence[int]
    """Position of each sample in the epoch."""

    def keys(self) -> npt.NDArray[np.uint64]:
        """Return a random key for each sample that depends only on the seed, the epoch and its position."""
        positions = np.asarray(self.indices, dtype=np.uint64) + np.uint64(1)
        return _mix(_mix(_state(self.seed, self.epoch)) + positions * np.uint64(_GOLDEN))


def sample_ids(positions: npt.NDArray[np.int64], *, seed: int, epoch: int, length: int) -> npt.NDArray[np.int64]:
    """Return the sample ids at `positions` of an epoch over a dataset of `length`.

    A Feistel network permutes the next power of two; ids outside the dataset are permuted again until they are inside
    (less than once on average). Time and memory depend only on the number of positions.
    """
    if len(positions) and (positions.min() < 0 or positions.max() >= length):
        raise DataError(
            f"positions must be in [0, {length}), got {positions.min()} to {positions.max()}",
            code="data.position-outside-epoch",
            fix=f"pass positions from 0 to {length - 1}",
        )
    bits = max(2, (length - 1).bit_length())
    keys = _round_keys(seed, epoch)
    ids = _permute(positions.astype(np.uint64), bits, keys)
    outside = ids >= length
    while outside.any():
        ids[outside] = _permute(ids[outside], bits, keys)
        outside = ids >= length
    return ids.astype(np.int64)


def _permute(values: npt.NDArray[np.uint64], bits: int, keys: list[np.uint64]) -> npt.NDArray[np.uint64]:
    """Apply an unbalanced Feistel network over `bits` bits: a bijection for any keys."""
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
    """Return the Feistel round keys of (seed, epoch): a mixed Weyl sequence, uncorrelated for adjacent seeds."""
    weyl = np.arange(1, _ROUNDS + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    return list(_mix(_state(seed, epoch) + weyl))


def _state(seed: int, epoch: int) -> npt.NDArray[np.uint64]:
    return _mix(np.array([seed & _MASK], dtype=np.uint64)) ^ np.uint64((epoch + 1) * _GOLDEN & _MASK)


# The positions of an epoch that each data-parallel rank reads in each micro-batch.


@dataclass(frozen=True, kw_only=True)
class Slices:
    """Splits the global batches of an epoch into the micro-batches of one data-parallel rank."""

    batch_size: int
    """Global batch size: samples per optimizer step over all data-parallel ranks."""
    accumulation: int
    dp_rank: int
    """Index of the data-parallel rank, less than `dp_size`; not the global rank."""
    dp_size: int
    length: int
    """Number of samples of the dataset."""

    def __post_init__(self) -> None:
        if self.length < 1:
            raise DataError(
                "the training dataset has 0 samples", code="data.no-samples", fix="return a dataset with samples"
            )

    @property
    def micro_batch(self) -> int:
        """Number of rows of a full micro-batch."""
        return self.batch_size // (self.dp_size * self.accumulation)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps per epoch, including a short last step."""
        return -(-self.length // self.batch_size)

    def rows_of_step(self, step: int) -> int:
        """Return the number of samples of a step of the epoch, over all data-parallel ranks."""
        return min(self.batch_size, self.length - step * self.batch_size)

    def spans(self, step: int) -> list[tuple[int, int]]:
        """Return the positions (start, stop) of each micro-batch of this rank in a step; spans may be empty.

        A short step is distributed evenly, which balances the load and minimizes the number of empty micro-batches.
        """
        rows, first, num_parts = self.rows_of_step(step), step * self.batch_size, self.dp_size * self.accumulation
        start = self.dp_rank * self.accumulation
        bounds = [first + part * rows // num_parts for part in range(start, start + self.accumulation + 1)]
        return list(pairwise(bounds))
