"""Loaders of one reader's steps, on torch's DataLoader: datasets by index, and streams."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from shardwise.data.cursor import Cursor, sample_ids
from shardwise.data.feed import LoadedStep
from shardwise.data.rows import cut_rows
from shardwise.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sized

    from shardwise.data.slices import Slices

_BLOCK = 4096
"""Places permuted at once: 0.1 us a sample in blocks, 100 us a call."""


class IndexLoader:
    """Steps of a dataset that is read by index: every sample of an epoch exactly once over all readers."""

    def __init__(
        self,
        dataset: Dataset[Any],
        slices: Slices,
        *,
        seed: int,
        first_step: int,
        num_steps: int,
        collate: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        """Read steps `first_step` up to `num_steps`, both counted from the start of training."""
        self._slices = slices
        self._seed = seed
        self._range = range(first_step, num_steps)
        self._loader = DataLoader(
            dataset,
            batch_sampler=_Places(self),
            collate_fn=collate,
            num_workers=num_workers,
            pin_memory=pin_memory,
            generator=torch.Generator().manual_seed(seed),  # leaves the global generator alone
        )

    def steps(self) -> Iterator[LoadedStep]:
        """Yield the steps."""
        slices, batches = self._slices, iter(self._loader)
        for number in self._range:
            epoch, step = divmod(number, slices.steps_per_epoch)
            rows = [stop - start for start, stop in slices.places(step)]
            loaded = list(islice(batches, slices.accumulation))
            cursor = Cursor(seed=self._seed, epoch=epoch, index=step * slices.batch_size)
            yield LoadedStep(loaded, rows, slices.rows_of_step(step), cursor)

    def micro_batch_ids(self) -> Iterator[list[int]]:
        """Yield the sample ids of every micro-batch, in order; a spare one where a micro-batch is empty."""
        slices, number = self._slices, self._range.start
        steps_per_block = max(1, _BLOCK // (slices.micro_batch * slices.accumulation))
        while number < self._range.stop:
            epoch, step = divmod(number, slices.steps_per_epoch)
            last = min(step + steps_per_block, slices.steps_per_epoch, step + self._range.stop - number)
            spans = [span for each in range(step, last) for span in slices.places(each)]
            # A reader without rows still runs: the step's first sample stands in, and never counts.
            spans = [(a, b) if a < b else (a // slices.batch_size * slices.batch_size,) * 2 for a, b in spans]
            sizes = [max(1, b - a) for a, b in spans]
            places = np.concatenate([np.arange(a, a + size) for (a, _), size in zip(spans, sizes, strict=True)])
            ids = sample_ids(places, seed=self._seed, epoch=epoch, length=slices.length).tolist()
            start = 0
            for size in sizes:
                yield ids[start : start + size]
                start += size
            number += last - step


class _Places:
    """A batch sampler over an IndexLoader."""

    def __init__(self, loader: IndexLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[list[int]]:
        return self._loader.micro_batch_ids()


class StreamLoader:
    """Steps of an IterableDataset, dealt out sample by sample to readers and their DataLoader workers.

    Limits: every reader walks the whole stream and keeps its share; the order is the stream's own (no shuffle);
    a stream has no length, so training is counted in steps, and it cannot be resumed without reading it again.
    """

    def __init__(
        self,
        dataset: IterableDataset[Any],
        *,
        reader: int,
        readers: int,
        micro_batch: int,
        accumulation: int,
        num_steps: int,
        seed: int,
        group: dist.ProcessGroup | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
    ) -> None:
        self._loader = DataLoader(
            ReaderShare(dataset, reader, readers),
            batch_size=micro_batch,
            collate_fn=collate,
            num_workers=num_workers,
            generator=torch.Generator().manual_seed(seed),
        )
        self._accumulation = accumulation
        self._num_steps = num_steps
        self._seed = seed
        self._group = group

    def steps(self) -> Iterator[LoadedStep]:
        """Yield steps, the stream again from its start when all readers are through; communicates over the group."""
        epoch, index, done = 0, 0, 0
        batches, spare = iter(self._loader), None
        while done < self._num_steps:
            loaded = list(islice(batches, self._accumulation))
            rows = [num_rows(batch) for batch in loaded]
            samples = self._sum(sum(rows))
            if samples == 0:
                if index == 0:
                    raise DataError("the training stream gave no sample", fix="check the dataset")
                epoch, index, batches = epoch + 1, 0, iter(self._loader)
                continue
            spare = cut_rows(loaded[0], 1, rows[0]) if loaded else spare
            if spare is None:
                raise DataError("the training stream has fewer samples than readers", fix="use fewer ranks")
            missing = self._accumulation - len(loaded)
            yield LoadedStep(
                loaded + [spare] * missing,
                rows + [0] * missing,
                samples,
                Cursor(seed=self._seed, epoch=epoch, index=index),
            )
            index, done = index + samples, done + 1

    def _sum(self, value: int) -> int:
        """Sum over readers; communicates over the group."""
        if self._group is None:
            return value
        total = torch.tensor(value)
        dist.all_reduce(total, group=self._group)
        return int(total)


class ReaderShare(IterableDataset[Any]):
    """One reader's share of a stream, cut further by DataLoader worker."""

    def __init__(self, dataset: IterableDataset[Any], reader: int, readers: int) -> None:
        self._dataset = dataset
        self._reader = reader
        self._readers = readers

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        workers, number = (worker.num_workers, worker.id) if worker is not None else (1, 0)
        return islice(iter(self._dataset), self._reader * workers + number, None, self._readers * workers)


def num_rows(batch: Any) -> int:
    """Rows of a collated batch: the first dimension of its first tensor."""
    while not isinstance(batch, torch.Tensor):
        batch = next(iter(batch.values() if hasattr(batch, "values") else batch))
    return int(batch.shape[0])


def dataset_length(dataset: Sized) -> int:
    """Number of samples of a dataset that is read by index."""
    try:
        return len(dataset)
    except TypeError:
        raise DataError(
            f"{type(dataset).__name__} has no length", fix="give it __len__, or make it an IterableDataset"
        ) from None
