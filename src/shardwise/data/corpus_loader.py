"""The loader of a Corpus: plans the rows of all ranks, reads those of one data-parallel rank, and stores positions."""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset

from shardwise.data.corpus import Corpus, CorpusPosition, CorpusRows, Row
from shardwise.data.cursor import Cursor
from shardwise.data.feed import LoadedStep
from shardwise.data.loaders import worker_generator

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor

    from shardwise.data.cursor import Slices

Batch = list["Tensor"]
"""The fields of rows, int64 [rows, length]."""


class _PlannedStep(NamedTuple):
    before: CorpusPosition
    after: CorpusPosition


class CorpusLoader:
    """Loads the steps of one data-parallel rank from a Corpus.

    Every rank plans the rows of the whole global batch from document lengths, and reads the tokens of its own rows, in
    DataLoader workers if there are any. All steps are full, because a corpus begins a new epoch of a source in the
    middle of a batch.
    """

    def __init__(
        self,
        corpus: Corpus,
        slices: Slices,
        *,
        seed: int,
        first_step: int,
        num_steps: int,
        position: CorpusPosition | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        """Create a loader of the steps in range(`first_step`, `num_steps`).

        `position` is the position of `first_step`; without it, the rows of earlier steps are planned and skipped.
        """
        self._corpus, self._slices, self._seed = corpus, slices, seed
        self._range = range(first_step, num_steps)
        self._position = position
        self.is_packed = bool(corpus.packed)
        self.vocab_sizes = {name: source.vocab_size for name, source in corpus.sources.items()}
        self._rows = CorpusRows(corpus, seed=seed, position=position)  # now, since it refuses a changed corpus
        self._planned: deque[_PlannedStep] = deque()
        """Steps whose rows were requested and not yet returned, since workers read ahead."""
        reads = _RowReads(corpus)
        self._batches: Iterable[Batch]
        if num_workers == 0 and not pin_memory:
            self._batches = _InProcessReads(self, reads)
        else:
            self._batches = DataLoader(
                reads,
                batch_sampler=_RowRequests(self),
                collate_fn=_already_collated,
                num_workers=num_workers,
                pin_memory=pin_memory,
                generator=worker_generator(seed, slices.dp_rank, first_step),
            )

    def steps(self) -> Iterator[LoadedStep]:
        """Yield the steps of this rank in order, each with the position after it."""
        slices, batches = self._slices, iter(self._batches)
        rows = [slices.micro_batch] * slices.accumulation
        for _ in self._range:
            loaded = list(islice(batches, slices.accumulation))
            before, after = self._planned.popleft()
            epoch = min((source.epoch for source in before.sources), default=0)
            first = before.row + slices.dp_rank * slices.micro_batch * slices.accumulation
            yield LoadedStep(
                loaded,
                rows,
                slices.batch_size,
                Cursor(seed=self._seed, epoch=epoch, index=before.row),
                range(first, first + sum(rows), slices.micro_batch),
                position=after,
            )

    def requests(self) -> Iterator[list[Row]]:
        """Yield the rows of every micro-batch of this rank in order."""
        slices = self._slices
        own = slices.micro_batch * slices.accumulation
        mine = range(slices.dp_rank * own, (slices.dp_rank + 1) * own)
        rows = self._rows
        if self._position is None:
            for step in range(self._range.start):
                rows.take(self._corpus.order(step, slices.batch_size), range(0))
        for step in self._range:
            before = rows.position
            taken = rows.take(self._corpus.order(step, slices.batch_size), mine)
            self._planned.append(_PlannedStep(before, rows.position))
            for start in range(0, own, slices.micro_batch):
                yield taken[start : start + slices.micro_batch]


class _RowReads(Dataset[Any]):
    """Reads the rows of one micro-batch."""

    def __init__(self, corpus: Corpus) -> None:
        self._corpus = corpus

    def __getitems__(self, rows: list[Row]) -> Batch:
        """Return the fields of these rows as tensors."""
        return [torch.from_numpy(values) for values in self._corpus.read(rows)]


class _InProcessReads:
    """Batches read in this process, like a DataLoader without workers but faster."""

    def __init__(self, loader: CorpusLoader, reads: _RowReads) -> None:
        self._loader, self._reads = loader, reads

    def __iter__(self) -> Iterator[Batch]:
        return map(self._reads.__getitems__, self._loader.requests())


class _RowRequests:
    """A batch sampler that yields the requests of a CorpusLoader."""

    def __init__(self, loader: CorpusLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[list[Row]]:
        return self._loader.requests()


def _already_collated(batch: Batch) -> Batch:
    return batch
