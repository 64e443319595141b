"""The loader of one data-parallel rank for map-style datasets, with reproducible random transforms."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from shardwise.data.cursor import Cursor, SamplePositions, sample_ids
from shardwise.data.feed import LoadedStep
from shardwise.data.rows import Collated, CountedCollate
from shardwise.errors import DataError, InputError
from shardwise.job.generators import (
    KINDS,
    host_generators,
    seed_host_generators,
    seeded_generators,
    untouched_host_generators,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence, Sized

    from torch.utils.data import Subset

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
        slices, batches = self._slices, raise_errors(self._batches)
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
        return map(self._reads.read, self._loader.requests())


class _BatchRequests:
    """A batch sampler that yields the requests of an IndexLoader."""

    def __init__(self, loader: IndexLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Request]:
        return self._loader.requests()


def worker_generator(seed: int, dp_rank: int, first_step: int) -> torch.Generator:
    """Return the generator that seeds torch, Python and NumPy in DataLoader workers.

    Seeds differ between data-parallel ranks and after a resume; the ranks of a model-parallel group use equal seeds.
    """
    return torch.Generator().manual_seed(hash((seed, dp_rank, first_step)) & (2**62 - 1))


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

    def __getitems__(self, request: Request) -> Collated | InputError:
        """Return the collated micro-batch of a request."""
        return read_in_worker(self.read, request)

    def read(self, request: Request) -> Collated:
        """Return the collated micro-batch of a request; errors of the dataset are raised."""
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


class CollatedReads(Dataset[Any]):
    """A dataset that reads and collates one micro-batch at a time, without seeds."""

    def __init__(self, dataset: Subset[Any], collate: Callable[[list[Any]], Collated]) -> None:
        self._dataset, self._collate = dataset, collate

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, ids: list[int]) -> Collated | InputError:
        """Return the collated micro-batch of these ids."""
        return read_in_worker(lambda ids: self._collate(self._dataset.__getitems__(ids)), ids)


def already_collated(batch: Collated) -> Collated:
    """Return the batch unchanged: the collate function of a DataLoader over SeededReads or CollatedReads."""
    return batch


# Errors of DataLoader workers. torch creates the exception of a worker again from its traceback, as a RuntimeError
# without the code and the exit code of ours: so a worker returns such an error as if it were a batch.


RequestT = TypeVar("RequestT")
BatchT = TypeVar("BatchT")


def read_in_worker(read: Callable[[RequestT], BatchT], request: RequestT) -> BatchT | InputError:
    """Return `read(request)` or, in a DataLoader worker, the InputError that it raised, for `raise_errors`."""
    try:
        return read(request)
    except InputError as error:
        if get_worker_info() is None:
            raise
        return error


def raise_errors(batches: Iterable[BatchT | InputError]) -> Iterator[BatchT]:
    """Yield batches, and raise the error that a DataLoader worker returned in the place of a batch."""
    for batch in batches:
        if isinstance(batch, InputError):
            raise batch
        yield batch
