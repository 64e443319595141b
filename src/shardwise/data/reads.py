"""Reads of a dataset by index: what a sample's transforms draw depends on the sample alone.

Random augmentation draws from the global generators of torch, Python and NumPy. They are seeded before each sample by
the job's seed, the epoch and the sample's index, and put back afterwards where the model draws from the same ones. So
neither ranks nor DataLoader workers nor a resume change a sample, and peers that read the same samples (along tp, cp
and pp) get the same values. The first micro-batches show which generators a dataset draws from, if any: only those are
seeded from then on, since it takes 20 us a sample.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from torch.utils.data import Dataset

from shardwise.data.cursor import Places
from shardwise.job.generators import KINDS, host_generators, seed_host_generators, untouched_host_generators

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardwise.data.collate import Collated, CountedCollate

_LOOKS = 4
"""Micro-batches, in each process, that show what a dataset draws from."""


class Request(NamedTuple):
    """The samples of one micro-batch."""

    epoch: int
    ids: list[int]


class SeededReads(Dataset[Any]):
    """A dataset that is read and collated a micro-batch at a time, under generators of its samples."""

    def __init__(self, dataset: Any, collate: CountedCollate, seed: int) -> None:
        self._dataset = dataset
        self._read_many: Callable[[list[int]], list[Any]] | None = getattr(dataset, "__getitems__", None)
        self._collate = collate
        self._seed = seed
        self._looks = _LOOKS
        self._drawn: set[str] = set()
        """Which generators the dataset and its collation were seen to draw from."""

    def __getitems__(self, request: Request) -> Collated:
        """Return one micro-batch, collated."""
        ids = request.ids
        if not self._looks and not self._drawn:
            return self._collate(self._read_many(ids) if self._read_many else [self._dataset[each] for each in ids])
        keys: list[int] = Places(seed=self._seed, epoch=request.epoch, indices=ids).keys().tolist()
        with untouched_host_generators(KINDS if self._looks else self._drawn):
            return self._seeded(ids, keys)

    def _seeded(self, ids: list[int], keys: list[int]) -> Collated:
        samples: list[Any] = []
        if self._read_many is not None:
            samples = self._under(keys[0], self._read_many, ids)
        else:
            for number, key in zip(ids, keys, strict=True):
                samples.append(self._under(key, self._dataset.__getitem__, number))
        collated: Collated = self._under(keys[0], self._collate, samples)
        self._looks = max(0, self._looks - 1)
        return collated

    def _under(self, key: int, read: Callable[[Any], Any], what: Any) -> Any:
        """Return `read(what)` under generators of `key`; the first times, notes which of them it drew from."""
        if not self._looks:
            seed_host_generators(key, self._drawn)
            return read(what)
        seed_host_generators(key)
        before = host_generators()
        value = read(what)
        self._drawn |= {kind for kind, state in host_generators().items() if state != before.get(kind)}
        return value


def as_read(batch: Collated) -> Collated:
    """Collate what is collated."""
    return batch
