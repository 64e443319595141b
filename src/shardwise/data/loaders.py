"""Loaders of one reader's steps, on torch's DataLoader: datasets by index, and streams."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info

from shardwise.data.cursor import Cursor, sample_ids
from shardwise.data.feed import LoadedStep
from shardwise.data.rows import cut_rows, num_rows
from shardwise.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence, Sized

    from shardwise.data.slices import Slices
    from shardwise.job import Job

_BLOCK = 16384
"""Places permuted at once: under 0.1 us a sample in blocks, 100 us a call."""


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
        self._batches: Iterable[Any]
        collate = collate or stack_samples
        if num_workers == 0 and not pin_memory:
            self._batches = _Here(self, dataset, collate)
        else:
            self._batches = DataLoader(
                dataset,
                batch_sampler=_Places(self),
                collate_fn=collate,
                num_workers=num_workers,
                pin_memory=pin_memory,
                generator=torch.Generator().manual_seed(seed),  # leaves the global generator alone
            )

    def steps(self) -> Iterator[LoadedStep]:
        """Yield the steps."""
        slices, batches = self._slices, iter(self._batches)
        whole_steps, whole_rows = slices.length // slices.batch_size, [slices.micro_batch] * slices.accumulation
        own_rows = slices.micro_batch * slices.accumulation
        for number in self._range:
            epoch, step = divmod(number, slices.steps_per_epoch)
            cursor = Cursor(seed=self._seed, epoch=epoch, index=step * slices.batch_size)
            starts: Sequence[int]
            if step < whole_steps:
                first = cursor.index + slices.reader * own_rows
                rows, starts = whole_rows, range(first, first + own_rows, slices.micro_batch)
            else:
                places = slices.places(step)
                rows, starts = [stop - start for start, stop in places], [start for start, _ in places]
            loaded = [next(batches) for _ in rows]
            yield LoadedStep(loaded, rows, slices.rows_of_step(step), cursor, starts)

    def micro_batch_ids(self) -> Iterator[list[int]]:
        """Yield the sample ids of every micro-batch, in order; a spare one where a micro-batch is empty."""
        slices, number = self._slices, self._range.start
        rows = slices.micro_batch * slices.accumulation
        whole_steps, mine = slices.length // slices.batch_size, slices.reader * rows + np.arange(rows)
        while number < self._range.stop:
            epoch, step = divmod(number, slices.steps_per_epoch)
            if step == whole_steps:
                yield from self._short_step_ids(epoch, step)
                number += 1
                continue
            last = min(step + max(1, _BLOCK // rows), whole_steps, step + self._range.stop - number)
            places = np.arange(step, last)[:, None] * slices.batch_size + mine
            ids = sample_ids(places.ravel(), seed=self._seed, epoch=epoch, length=slices.length)
            yield from ids.reshape(-1, slices.micro_batch).tolist()
            number += last - step

    def _short_step_ids(self, epoch: int, step: int) -> Iterator[list[int]]:
        """The last step of an epoch. A reader without rows still runs: the step's first sample stands in."""
        slices = self._slices
        for start, stop in slices.places(step):
            places = np.arange(start, stop) if start < stop else np.array([step * slices.batch_size])
            yield sample_ids(places, seed=self._seed, epoch=epoch, length=slices.length).tolist()


def stack_samples(samples: list[Any]) -> Any:
    """What torch's default_collate makes of samples; for tuples of tensors without its look at every type."""
    first = samples[0]
    if type(first) is tuple and all(type(value) is torch.Tensor for value in first):
        return [torch.stack(values) for values in zip(*samples, strict=True)]
    return default_collate(samples)


class _Here:
    """Batches read in this process: what a DataLoader without workers gives, 15 us a step sooner."""

    def __init__(self, loader: IndexLoader, dataset: Dataset[Any], collate: Callable[[list[Any]], Any]) -> None:
        self._loader = loader
        self._dataset = dataset
        self._collate = collate

    def __iter__(self) -> Iterator[Any]:
        dataset, collate = self._dataset, self._collate
        read_many = getattr(dataset, "__getitems__", None)
        for ids in self._loader.micro_batch_ids():
            yield collate(read_many(ids) if read_many else [dataset[each] for each in ids])


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
        first_step: int = 0,
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
        self._first_step = first_step
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
            if done >= self._first_step:  # a stream is read again up to there
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


def dataset_of(job: Job, split: str) -> Any:
    """Return the job's dataset for a split, None where it has none; a DataLoader is refused."""
    dataset = job.data(split)
    if isinstance(dataset, DataLoader):
        raise DataError(
            f"Job.data returned a DataLoader for split {split!r}, and the job makes its own on every rank",
            fix="return its dataset; batch_size=, num_workers= and collate= belong to the Job",
        )
    return dataset


def dataset_length(dataset: Sized) -> int:
    """Number of samples of a dataset that is read by index."""
    try:
        return len(dataset)
    except TypeError:
        raise DataError(
            f"{type(dataset).__name__} has no length", fix="give it __len__, or make it an IterableDataset"
        ) from None
