"""Loaders of one data-parallel rank for map-style and iterable datasets, with reproducible random transforms."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from shardwise.data.cursor import Cursor, SamplePositions, sample_ids
from shardwise.data.feed import LoadedStep
from shardwise.data.rows import Collated, CountedCollate, drop_padding_rows
from shardwise.errors import DataError
from shardwise.job.generators import (
    KINDS,
    host_generators,
    seed_host_generators,
    seeded_generators,
    untouched_host_generators,
)
from shardwise.torch_private.distributed import no_worker_info

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence, Sized

    from shardwise.data.cursor import Slices
    from shardwise.job import Job


_BLOCK = 16384
"""Positions permuted per call: a call costs 100 us, and a block of this size less than 0.1 us per sample."""


class IndexLoader:
    """Loader of a map-style dataset: data-parallel ranks together read every sample of an epoch exactly once."""

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
        """Create a loader of the steps in range(`first_step`, `num_steps`), counted from the start of training."""
        self._slices = slices
        self._shuffle = shuffle
        self._seed = seed
        self._range = range(first_step, num_steps)
        self._batches: Iterable[Collated]
        reads = SeededReads(dataset, CountedCollate(collate), seed)
        if num_workers == 0 and not pin_memory:
            self._batches = _InProcessBatches(self, reads)
        else:
            self._batches = DataLoader(
                reads,
                batch_sampler=_BatchRequests(self),  # type: ignore[arg-type]
                collate_fn=already_collated,  # type: ignore[arg-type]
                num_workers=num_workers,
                pin_memory=pin_memory,
                generator=worker_generator(seed, slices.dp_rank, first_step),
            )

    def steps(self) -> Iterator[LoadedStep]:
        """Yield the steps of this rank in order."""
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
                positions = slices.spans(step)
                rows, starts = [stop - start for start, stop in positions], [start for start, _ in positions]
            loaded = list(islice(batches, len(rows)))
            micro_batches = [each.batch for each in loaded]
            yield LoadedStep(micro_batches, rows, slices.rows_of_step(step), cursor, starts, loaded[0].marks)

    def requests(self) -> Iterator[Request]:
        """Yield the sample ids of every micro-batch in order; an empty micro-batch requests one padding sample."""
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
            positions = np.arange(step, last)[:, None] * slices.batch_size + mine
            ids = self._ids(positions.ravel(), epoch)
            for each in ids.reshape(-1, slices.micro_batch).tolist():
                yield Request(epoch, each)
            number += last - step

    def _short_step_ids(self, epoch: int, step: int) -> Iterator[Request]:
        """Yield the requests of a short last step; a rank without rows reads the step's first sample as padding."""
        slices = self._slices
        for start, stop in slices.spans(step):
            positions = np.arange(start, stop)
            if start == stop:
                positions = np.array([step * slices.batch_size])
            yield Request(epoch, self._ids(positions, epoch).tolist())

    def _ids(self, positions: npt.NDArray[np.int64], epoch: int) -> npt.NDArray[np.int64]:
        if not self._shuffle:
            return positions
        return sample_ids(positions, seed=self._seed, epoch=epoch, length=self._slices.length)


class _InProcessBatches:
    """Batches read in this process, like a DataLoader without workers but 15 us per step faster."""

    def __init__(self, loader: IndexLoader, reads: SeededReads) -> None:
        self._loader = loader
        self._reads = reads

    def __iter__(self) -> Iterator[Collated]:
        return map(self._reads.__getitems__, self._loader.requests())


class _BatchRequests:
    """A batch sampler that yields the requests of an IndexLoader."""

    def __init__(self, loader: IndexLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Request]:
        return self._loader.requests()


class StreamLoader:
    """Loader of an IterableDataset, split once over data-parallel ranks and their DataLoader workers.

    A step contains the next `batch_size` samples of the stream, for any number of ranks, workers and micro-batches.
    Limitations: every process iterates over the whole stream and selects its share; samples are not shuffled; a stream
    has no length, so the training length is set in steps; and a resumed run reads the stream from its start.
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
            generator=worker_generator(seed, dp_rank, first_step),
        )
        self._accumulation = accumulation
        self._first_step = first_step
        self._num_steps = num_steps
        self._seed = seed
        self._group = group

    def steps(self) -> Iterator[LoadedStep]:
        """Yield the steps of this rank; the stream restarts after it ends on all ranks. Communicates over the group."""
        epoch, index, done = 0, 0, 0
        batches, padding = iter(self._loader), None
        while done < self._num_steps:
            loaded: list[Collated] = list(islice(batches, self._accumulation))
            rows = [each.rows for each in loaded]
            samples = self._sum(sum(rows))
            if samples == 0:
                if index == 0:
                    raise DataError(
                        "the training IterableDataset yielded no samples",
                        code="data.no-samples",
                        fix="return a dataset that yields at least one sample per data-parallel rank",
                    )
                epoch, index, batches = epoch + 1, 0, iter(self._loader)
                continue
            marks = None
            if loaded:
                padding, marks = _first_row(loaded[0]), loaded[0].marks
            if padding is None:
                raise DataError(
                    "the training IterableDataset yielded fewer samples than the number of data-parallel ranks",
                    code="data.too-few-samples",
                    fix="use fewer data-parallel ranks, or a larger dataset",
                )
            missing = self._accumulation - len(loaded)
            if done >= self._first_step:  # a resumed run reads the earlier samples again without using them
                yield LoadedStep(
                    [each.batch for each in loaded] + [padding] * missing,
                    rows + [0] * missing,
                    samples,
                    Cursor(seed=self._seed, epoch=epoch, index=index),
                    marks=marks,
                )
            index, done = index + samples, done + 1

    def _sum(self, value: int) -> int:
        """Return the sum of `value` over data-parallel ranks. Communicates over the group."""
        if self._group is None:
            return value
        total = torch.tensor(value)
        dist.all_reduce(total, group=self._group)
        return int(total)


def worker_generator(seed: int, dp_rank: int, first_step: int) -> torch.Generator:
    """Return the generator that seeds torch, Python and NumPy in DataLoader workers.

    Seeds differ between data-parallel ranks and after a resume; the ranks of a model-parallel group use equal seeds.
    """
    return torch.Generator().manual_seed(hash((seed, dp_rank, first_step)) & (2**62 - 1))


class StreamShare(IterableDataset[Any]):
    """The samples of an IterableDataset that one data-parallel rank reads, or one of its DataLoader workers.

    The stream must be identical in every process, so `get_worker_info()` returns None inside the dataset: samples are
    split only here. Workers read whole micro-batches in round-robin order, as DataLoader collects them, so batches do
    not depend on the number of workers.
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
    """Iterate over a dataset as if outside a DataLoader worker."""
    with no_worker_info():
        samples = iter(dataset)
    while True:
        with no_worker_info():  # a generator function runs when its first sample is requested
            try:
                sample = next(samples)
            except StopIteration:
                return
        yield sample


def _first_row(collated: Collated) -> Any:
    return drop_padding_rows(collated.batch, 1, collated.rows, collated.marks)


def dataset_of(job: Job, split: str) -> Any:
    """Return the job's dataset for a split, or None if it has none; raise DataError for a DataLoader.

    `Job.data` runs under generators seeded by the job's seed, so random splits are the same on every rank.
    """
    with seeded_generators(job.seed):
        dataset = job.data(split)
    if isinstance(dataset, DataLoader):
        raise DataError(
            f"Job.data must return a dataset, got a DataLoader for split {split!r}",
            code="data.dataloader-given",
            fix="return its dataset, and set batch_size=, num_workers= and collate= in the Job",
        )
    return dataset


def dataset_length(dataset: Sized) -> int:
    """Return the number of samples of a map-style dataset."""
    try:
        return len(dataset)
    except TypeError:
        raise DataError(
            f"dataset {type(dataset).__name__} must define __len__ or be an IterableDataset",
            code="data.dataset-without-length",
            fix="define __len__, or derive the class from torch.utils.data.IterableDataset",
        ) from None


# Reading a dataset by index with random transforms that depend only on the sample.
#
# Random augmentation uses the global generators of torch, Python and NumPy. They are seeded before each sample by the
# job's seed, the epoch and the sample's index, and restored afterwards because the model may use them too. Samples
# therefore do not depend on ranks, DataLoader workers or a resume, and peers along tp, cp and pp read the same values.
# The first micro-batches show which generators a dataset uses; later only these generators are seeded, which takes 20
# us per sample.


_NUM_OBSERVED = 4
"""Micro-batches in each process during which the use of generators is observed."""


class Request(NamedTuple):
    """A request for one micro-batch: its epoch and sample ids."""

    epoch: int
    ids: list[int]


class SeededReads(Dataset[Any]):
    """A dataset that reads and collates one micro-batch at a time, with generators seeded per sample."""

    def __init__(self, dataset: Any, collate: CountedCollate, seed: int) -> None:
        self._dataset = dataset
        self._read_many: Callable[[list[int]], list[Any]] | None = getattr(dataset, "__getitems__", None)
        self._collate = collate
        self._tensors = collate.row_tensors(dataset)
        self._seed = seed
        self._num_observed = _NUM_OBSERVED
        self._used_generators: set[str] = set()
        """Names of the generators that the dataset and the collate function used during observation."""

    def __getitems__(self, request: Request) -> Collated:
        """Return the collated micro-batch of a request."""
        ids = request.ids
        if not self._num_observed and not self._used_generators:
            if self._tensors is not None:
                return self._collate.gather(self._tensors, ids)
            if self._read_many is not None:
                return self._collate(self._read_many(ids))
            return self._collate([self._dataset[each] for each in ids])
        keys: list[int] = SamplePositions(seed=self._seed, epoch=request.epoch, indices=ids).keys().tolist()
        with untouched_host_generators(KINDS if self._num_observed else self._used_generators):
            return self._seeded(ids, keys)

    def _seeded(self, ids: list[int], keys: list[int]) -> Collated:
        samples: list[Any] = []
        if self._read_many is not None:
            samples = self._with_seed(keys[0], self._read_many, ids)
        else:
            for number, key in zip(ids, keys, strict=True):
                samples.append(self._with_seed(key, self._dataset.__getitem__, number))
        collated: Collated = self._with_seed(keys[0], self._collate, samples)
        self._num_observed = max(0, self._num_observed - 1)
        return collated

    def _with_seed(self, key: int, read: Callable[[Any], Any], argument: Any) -> Any:
        """Return `read(argument)` under generators seeded by `key`; during observation, record the generators used."""
        if not self._num_observed:
            seed_host_generators(key, self._used_generators)
            return read(argument)
        seed_host_generators(key)
        before = host_generators()
        value = read(argument)
        self._used_generators |= {kind for kind, state in host_generators().items() if state != before.get(kind)}
        return value


def already_collated(batch: Collated) -> Collated:
    """Return the batch unchanged: the collate function of a DataLoader over SeededReads."""
    return batch
