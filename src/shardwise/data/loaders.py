"""Loaders of one data-parallel rank's steps on torch's DataLoader: datasets by index, streams, seeded transforms."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from shardwise.data.cursor import Cursor, Places, sample_ids
from shardwise.data.feed import LoadedStep
from shardwise.data.rows import Collated, CountedCollate, cut_rows
from shardwise.errors import DataError
from shardwise.job.generators import (
    KINDS,
    host_generators,
    seed_host_generators,
    seeded_generators,
    untouched_host_generators,
)
from shardwise.torch_private.runtime import no_worker_info

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence, Sized

    from shardwise.data.cursor import Slices
    from shardwise.job import Job


_BLOCK = 16384
"""Places permuted at once: under 0.1 us a sample in blocks, 100 us a call."""


class IndexLoader:
    """Steps of a map-style dataset: every sample of an epoch exactly once over all data-parallel ranks."""

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
        shuffle: bool = True,
    ) -> None:
        """Read steps `first_step` up to `num_steps`, both counted from the start of training."""
        self._slices = slices
        self._shuffle = shuffle
        self._seed = seed
        self._range = range(first_step, num_steps)
        self._batches: Iterable[Collated]
        reads = SeededReads(dataset, CountedCollate(collate), seed)
        if num_workers == 0 and not pin_memory:
            self._batches = _Here(self, reads)
        else:
            self._batches = DataLoader(
                reads,
                batch_sampler=_BatchRequests(self),  # type: ignore[arg-type]
                collate_fn=as_read,  # type: ignore[arg-type]
                num_workers=num_workers,
                pin_memory=pin_memory,
                generator=_worker_generator(seed, slices.dp_rank, first_step),
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
                first = cursor.index + slices.dp_rank * own_rows
                rows, starts = whole_rows, range(first, first + own_rows, slices.micro_batch)
            else:
                places = slices.places(step)
                rows, starts = [stop - start for start, stop in places], [start for start, _ in places]
            loaded = [next(batches) for _ in rows]
            given = [each.batch for each in loaded]
            yield LoadedStep(given, rows, slices.rows_of_step(step), cursor, starts, loaded[0].marks)

    def requests(self) -> Iterator[Request]:
        """Yield the sample ids of every micro-batch, in order; a spare one where a micro-batch is empty."""
        slices, number = self._slices, self._range.start
        rows = slices.micro_batch * slices.accumulation
        whole_steps, mine = slices.length // slices.batch_size, slices.dp_rank * rows + np.arange(rows)
        while number < self._range.stop:
            epoch, step = divmod(number, slices.steps_per_epoch)
            if step == whole_steps:
                yield from self._short_step_ids(epoch, step)
                number += 1
                continue
            last = min(step + max(1, _BLOCK // rows), whole_steps, step + self._range.stop - number)
            places = np.arange(step, last)[:, None] * slices.batch_size + mine
            ids = self._ids(places.ravel(), epoch)
            for each in ids.reshape(-1, slices.micro_batch).tolist():
                yield Request(epoch, each)
            number += last - step

    def _short_step_ids(self, epoch: int, step: int) -> Iterator[Request]:
        """The last step of an epoch. A rank without rows still runs: on the step's first sample."""
        slices = self._slices
        for start, stop in slices.places(step):
            places = np.arange(start, stop) if start < stop else np.array([step * slices.batch_size])
            yield Request(epoch, self._ids(places, epoch).tolist())

    def _ids(self, places: npt.NDArray[np.int64], epoch: int) -> npt.NDArray[np.int64]:
        if not self._shuffle:
            return places
        return sample_ids(places, seed=self._seed, epoch=epoch, length=self._slices.length)


class _Here:
    """Batches read in this process: what a DataLoader without workers gives, 15 us a step sooner."""

    def __init__(self, loader: IndexLoader, reads: SeededReads) -> None:
        self._loader = loader
        self._reads = reads

    def __iter__(self) -> Iterator[Collated]:
        return map(self._reads.__getitems__, self._loader.requests())


class _BatchRequests:
    """A batch sampler over an IndexLoader."""

    def __init__(self, loader: IndexLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Request]:
        return self._loader.requests()


class StreamLoader:
    """Steps of an IterableDataset, split once over data-parallel ranks and their DataLoader workers.

    A step is as many samples of the stream as the global batch holds, in order, at any number of ranks, workers and
    micro-batches. Limits: every process walks the whole stream and keeps its share; the order is the stream's own (no
    shuffle); a stream has no length, so training is counted in steps, and resuming reads it again from its start.
    """

    def __init__(
        self,
        dataset: IterableDataset[Any],
        *,
        dp_rank: int,
        dp_size: int,
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
            StreamShare(dataset, dp_rank=dp_rank, dp_size=dp_size, micro_batch=micro_batch),
            batch_size=micro_batch,
            collate_fn=CountedCollate(collate),
            num_workers=num_workers,
            generator=_worker_generator(seed, dp_rank, first_step),
        )
        self._accumulation = accumulation
        self._first_step = first_step
        self._num_steps = num_steps
        self._seed = seed
        self._group = group

    def steps(self) -> Iterator[LoadedStep]:
        """Yield steps, the stream again from its start when all ranks are through; communicates over the group."""
        epoch, index, done = 0, 0, 0
        batches, spare = iter(self._loader), None
        while done < self._num_steps:
            loaded: list[Collated] = list(islice(batches, self._accumulation))
            rows = [each.rows for each in loaded]
            samples = self._sum(sum(rows))
            if samples == 0:
                if index == 0:
                    raise DataError(
                        "the training stream gave no sample", code="data.no-samples", fix="check the dataset"
                    )
                epoch, index, batches = epoch + 1, 0, iter(self._loader)
                continue
            spare = _first_row(loaded[0]) if loaded else spare
            if spare is None:
                raise DataError(
                    "the training stream has fewer samples than data-parallel ranks",
                    code="data.too-few-samples",
                    fix="use fewer ranks",
                )
            missing = self._accumulation - len(loaded)
            if done >= self._first_step:  # a stream is read again up to there
                yield LoadedStep(
                    [each.batch for each in loaded] + [spare] * missing,
                    rows + [0] * missing,
                    samples,
                    Cursor(seed=self._seed, epoch=epoch, index=index),
                    marks=loaded[0].marks if loaded else None,
                )
            index, done = index + samples, done + 1

    def _sum(self, value: int) -> int:
        """Sum over data-parallel ranks; communicates over the group."""
        if self._group is None:
            return value
        total = torch.tensor(value)
        dist.all_reduce(total, group=self._group)
        return int(total)


def _worker_generator(seed: int, dp_rank: int, first_step: int) -> torch.Generator:
    """Return the generator that seeds torch, Python and NumPy in DataLoader workers, in place of the global one.

    Data-parallel ranks draw different numbers, their tensor-parallel and pipeline peers the same; after a resume, new.
    """
    return torch.Generator().manual_seed(hash((seed, dp_rank, first_step)) & (2**62 - 1))


class StreamShare(IterableDataset[Any]):
    """One data-parallel rank's share of a stream and, in a DataLoader worker, that worker's micro-batches of it.

    The stream itself must be the same everywhere, so a dataset that would split itself by `get_worker_info()` gets None
    from it: samples are split here, once. Workers take whole micro-batches in turn, which DataLoader collects in turn,
    so that their number changes no batch.
    """

    def __init__(self, dataset: IterableDataset[Any], *, dp_rank: int, dp_size: int, micro_batch: int) -> None:
        self._dataset = dataset
        self._dp_rank = dp_rank
        self._dp_size = dp_size
        self._micro_batch = micro_batch

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        samples = islice(_whole_stream(self._dataset), self._dp_rank, None, self._dp_size)
        if worker is None:
            return samples
        return self._micro_batches_of(samples, worker.id, worker.num_workers)

    def _micro_batches_of(self, samples: Iterator[Any], worker: int, num_workers: int) -> Iterator[Any]:
        for number, sample in enumerate(samples):
            if number // self._micro_batch % num_workers == worker:
                yield sample


def _whole_stream(dataset: IterableDataset[Any]) -> Iterator[Any]:
    """Iterate over a dataset as if no DataLoader worker did."""
    with no_worker_info():
        samples = iter(dataset)
    while True:
        with no_worker_info():  # a generator asks when its first sample is fetched
            try:
                sample = next(samples)
            except StopIteration:
                return
        yield sample


def _first_row(collated: Collated) -> Any:
    return cut_rows(collated.batch, 1, collated.rows, collated.marks)


def dataset_of(job: Job, split: str) -> Any:
    """Return the job's dataset for a split, None where it has none; a DataLoader is refused.

    What `Job.data` draws (a random split, an order) is drawn from the job's seed, so every rank has the same dataset.
    """
    with seeded_generators(job.seed):
        dataset = job.data(split)
    if isinstance(dataset, DataLoader):
        raise DataError(
            f"Job.data returned a DataLoader for split {split!r}, and the job makes its own on every rank",
            code="data.dataloader-given",
            fix="return its dataset; batch_size=, num_workers= and collate= belong to the Job",
        )
    return dataset


def dataset_length(dataset: Sized) -> int:
    """Number of samples of a dataset that is read by index."""
    try:
        return len(dataset)
    except TypeError:
        raise DataError(
            f"{type(dataset).__name__} has no length",
            code="data.dataset-without-length",
            fix="give it __len__, or make it an IterableDataset",
        ) from None


# Reads of a dataset by index: what a sample's transforms draw depends on the sample alone.
#
# Random augmentation draws from the global generators of torch, Python and NumPy. They are seeded before each
# sample by the job's seed, the epoch and the sample's index, and put back afterwards where the model draws from the
# same ones. So neither ranks nor DataLoader workers nor a resume change a sample, and peers that read the same
# samples (along tp, cp and pp) get the same values. The first micro-batches show which generators a dataset draws
# from, if any: only those are seeded from then on, since it takes 20 us a sample.


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
