"""Loaders for custom training loops, which yield this data-parallel rank's rows of every global batch.

The idea: the samples of a batch depend only on (seed, epoch, position) (data/cursor.py), and each data-parallel rank
reads its rows. The invariant: data-parallel ranks together read every sample of an epoch exactly once, at any number of
ranks, and the state of a loader is a position that does not depend on ranks, so any world size can resume from it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, default_collate

from shardwise.data.cursor import Cursor, Slices
from shardwise.data.feed import StreamPosition
from shardwise.data.loaders import IndexLoader, Request, SeededReads, already_collated, dataset_length, raise_errors
from shardwise.data.rows import CountedCollate, move
from shardwise.data.streams import StreamLoader
from shardwise.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shardwise.data.feed import LoadedStep, StepLoader


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """The options for reading a dataset, from the arguments of `sw.dataloader` or from a DataLoader."""

    batch_size: int
    """Global batch size: samples over all data-parallel ranks."""
    shuffle: bool = True
    drop_last: bool | None = None
    """Whether to drop a short last batch; None raises DataError if data-parallel ranks cannot split it evenly."""
    collate: Callable[[list[Any]], Any] | None = None
    num_workers: int = 0
    seed: int = 0
    accumulation: int = 1
    """Number of batches per optimizer update."""

    def __post_init__(self) -> None:
        if self.accumulation < 1:
            raise DataError(
                f"accumulation must be at least 1, got {self.accumulation}",
                code="data.accumulation-not-positive",
                fix="set accumulation=1",
            )


@dataclass(frozen=True, kw_only=True)
class DataRank:
    """A data-parallel rank and the device and dtype of its batches."""

    index: int
    size: int
    device: torch.device
    float_dtype: torch.dtype | None = None
    """The dtype to which floating-point tensors are converted; None disables the conversion."""
    group: dist.ProcessGroup | None = None
    """Host process group of the data-parallel ranks; None for a single data-parallel rank."""

    def sum(self, value: float | torch.Tensor) -> float:
        """Return the sum of a number over the data-parallel ranks, in its type. Communicates over the group."""
        if isinstance(value, torch.Tensor):
            value = value.item()
        if self.group is None:
            return value
        total = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(total, group=self.group)
        return type(value)(total.item())

    def to_device(self, batch: Any) -> Any:
        """Return a batch on this rank's device."""
        return move(batch, self.device, self.float_dtype)


def options_of(loader: DataLoader[Any], seed: int) -> ReadOptions:
    """Return the options of a DataLoader; raise DataError if it cannot be split over data-parallel ranks."""
    is_stream = isinstance(loader.dataset, IterableDataset)
    sampler = loader.sampler
    is_random = isinstance(sampler, RandomSampler) and not sampler.replacement
    if is_random:
        is_random = sampler.num_samples == dataset_length(loader.dataset)  # type: ignore[attr-defined, arg-type]
    problem = ""
    if loader.batch_size is None:
        problem = "has no fixed batch size"
    elif not (is_stream or is_random or isinstance(sampler, SequentialSampler)):
        problem = f"has the sampler {type(sampler).__name__}"
    elif loader.worker_init_fn is not None:
        problem = "has a worker_init_fn"
    if problem or loader.batch_size is None:
        raise DataError(
            f"the DataLoader {problem}, so it cannot be split over data-parallel ranks",
            code="data.loader-not-divisible",
            fix="pass the dataset to sw.dataloader, with batch_size=, shuffle= and collate=",
        )
    return ReadOptions(
        batch_size=loader.batch_size,
        shuffle=is_random,
        drop_last=loader.drop_last or None,
        collate=None if loader.collate_fn is default_collate else loader.collate_fn,
        num_workers=loader.num_workers,
        seed=seed,
    )


class ShardedLoader:
    """A loader of this data-parallel rank's batches; every iteration over it reads the next epoch.

    Back-propagate `loss * loader.scale`, where `loss` is the mean over the rows of the current batch: the gradient is
    then the mean over all samples of the update, from all ranks and all of its `accumulation` batches. `scale` is 1
    if an update has one batch and ranks split it evenly. `is_update` is True for the last batch of an update, and
    always for the last batch of an epoch: call `optimizer.step()` then. `scale` and `is_update` remain valid after a
    resume within an epoch, whereas `enumerate` restarts at 0. `epoch` is the current epoch; `sum` and `mean` combine
    values of the ranks.
    """

    def __init__(self, dataset: Any, options: ReadOptions, rank: DataRank) -> None:
        self.scale = 1.0
        self.is_update = True
        self._dataset = dataset
        self._options = options
        self._rank = rank
        self._is_stream = isinstance(dataset, IterableDataset)
        self._length = 0 if self._is_stream else dataset_length(dataset)
        self._position = Cursor(seed=options.seed)
        self._is_resumed = False
        self._stream: StreamPosition | None = None
        """Position of an IterableDataset after the last update."""
        if rank.size > 1 and options.drop_last is None and options.accumulation == 1:
            self._check_last_batch()

    @property
    def epoch(self) -> int:
        """The current epoch or, after its last batch, the next epoch."""
        return self._position.epoch

    def __len__(self) -> int:
        """Return the number of batches of an epoch; raise TypeError for an IterableDataset."""
        if self._is_stream:
            raise TypeError(f"{type(self._dataset).__name__} is an IterableDataset, which has no length")
        num_full, num_rest = divmod(self._length, self._options.batch_size)
        if num_rest and not self._options.drop_last:
            return num_full + 1
        return num_full

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's batches of one epoch; after `load_state_dict`, only the rest of the saved epoch."""
        if self._position.index and not self._is_resumed:
            self._position = Cursor(seed=self._options.seed, epoch=self._position.epoch + 1)
        self._is_resumed = False
        first = self._position
        for step, samples, is_update in self._by_update(self._steps(first)):
            self._position = Cursor(seed=first.seed, epoch=first.epoch, index=step.cursor.index + step.samples)
            self.scale = step.rows[0] * self._rank.size / samples
            self.is_update = is_update
            if is_update and isinstance(step.position, StreamPosition):
                self._stream = step.position
            yield self._rank.to_device(step.batches[0])
        self._position, self._stream = Cursor(seed=first.seed, epoch=first.epoch + 1), None

    def sum(self, value: float | torch.Tensor) -> float:
        """Return the sum of `value` over the data-parallel ranks. Communicates; call on every rank."""
        return self._rank.sum(value)

    def mean(self, value: float | torch.Tensor) -> float:
        """Return the unweighted mean of `value` over the data-parallel ranks. Communicates; call on every rank.

        Ranks may have different numbers of rows: the mean of `loss * scale` is the mean loss over their samples.
        """
        return self._rank.sum(value) / self._rank.size

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch and the sample index after the last update; equal on every rank.

        Gradients are not saved, so a resumed loader repeats the batches of an update that was not complete.
        """
        epoch, index = self._position.epoch, self._position.index
        if not self.is_update:
            index -= index % (self._options.batch_size * self._options.accumulation)
        elif not self._is_stream and index >= self._num_samples():
            epoch, index = epoch + 1, 0
        state = {**self._identity(), "epoch": epoch, "index": index}
        if self._stream is not None:
            state["samples_checksum"] = self._stream.digest
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state saved with any number of ranks; raise DataError if samples would differ."""
        saved = {"accumulation": 1, **state}  # states of earlier versions have no accumulation
        for name, now in self._identity().items():
            if saved.get(name) != now:
                raise DataError(
                    f"the loader state was saved with {name} {saved.get(name)}, but this loader has {now}",
                    code="data.loader-state-mismatch",
                    fix=f"create the loader with {name} {saved.get(name)}",
                )
        self._position = Cursor(seed=self._options.seed, epoch=state["epoch"], index=state["index"])
        self._is_resumed = self.is_update = True
        self._stream = None
        if "samples_checksum" in state:
            self._stream = StreamPosition(epoch=0, index=state["index"], digest=state["samples_checksum"])

    def _num_samples(self) -> int:
        """Return the number of samples of an epoch, without those that `drop_last` drops."""
        return min(self._length, len(self) * self._options.batch_size)

    def _identity(self) -> dict[str, Any]:
        """Return the options that determine the order of samples."""
        options = self._options
        return {
            "seed": options.seed,
            "shuffle": options.shuffle,
            "batch_size": options.batch_size,
            "length": self._length,
            "accumulation": options.accumulation,
        }

    def _by_update(self, steps: Iterator[LoadedStep]) -> Iterator[tuple[LoadedStep, int, bool]]:
        """Yield each batch, the number of samples of its update, and whether it is the last batch of the update."""
        accumulation = self._options.accumulation
        if self._is_stream:  # its end is unknown, so all batches of an update are read first
            while group := list(islice(steps, accumulation)):
                samples = sum(step.samples for step in group)
                for step in group:
                    yield step, samples, step is group[-1]
            return
        full, end = accumulation * self._options.batch_size, self._num_samples()
        for step in steps:
            first = step.cursor.index - step.cursor.index % full
            stop = min(first + full, end)
            yield step, stop - first, step.cursor.index + step.samples == stop

    def _steps(self, first: Cursor) -> Iterator[LoadedStep]:
        """Yield the batches of one epoch, starting at `first`. Communicates over the rank's group for a stream."""
        options, rank = self._options, self._rank
        done = -(-first.index // options.batch_size)
        loader: StepLoader
        if self._is_stream:
            loader = StreamLoader(
                self._dataset,
                dp_rank=rank.index,
                dp_size=rank.size,
                micro_batch=options.batch_size // rank.size,
                accumulation=1,
                first_step=done,
                num_steps=sys.maxsize,
                seed=options.seed,
                group=rank.group,
                collate=options.collate,
                num_workers=options.num_workers,
                position=self._stream,
                use_state=False,
            )
        else:
            slices = Slices(
                batch_size=options.batch_size,
                accumulation=1,
                dp_rank=rank.index,
                dp_size=rank.size,
                length=self._length,
            )
            before = first.epoch * slices.steps_per_epoch
            loader = IndexLoader(
                self._dataset,
                slices,
                seed=options.seed,
                first_step=before + done,
                num_steps=before + len(self),
                collate=options.collate,
                num_workers=options.num_workers,
                pin_memory=rank.device.type == "cuda",
                shuffle=options.shuffle,
            )
        for step in loader.steps():
            if self._is_stream and step.cursor.epoch:
                return  # the stream restarted
            if options.drop_last and step.samples < options.batch_size:
                return
            yield step

    def _check_last_batch(self) -> None:
        """Raise DataError if the last batch may have different numbers of rows on different ranks."""
        num_rest = self._length % self._options.batch_size
        if not self._is_stream and num_rest % self._rank.size == 0:
            return
        subject = f"the last batch has {num_rest} samples"
        if self._is_stream:
            subject = "an IterableDataset may end with a batch"
        raise DataError(
            f"{subject} that {self._rank.size} data-parallel ranks cannot split evenly, so the average of their mean"
            " losses would not be the mean over the batch",
            code="data.last-batch-uneven",
            fix="pass drop_last=True to sw.dataloader, or pass drop_last=False and back-propagate loss * loader.scale",
        )


class EvaluationLoader:
    """A loader of this data-parallel rank's batches for evaluation, which reads each sample once, in order, unpadded.

    All ranks have the same number of batches and none is empty, so that the collectives of forward (FSDP) match;
    batch sizes differ by at most one sample. Sums over batches and data-parallel ranks are sums over the dataset:
    `sum` returns this sum, and `mean` divides it by the number of samples.
    """

    def __init__(self, dataset: Any, options: ReadOptions, rank: DataRank) -> None:
        if isinstance(dataset, IterableDataset):
            raise DataError(
                f"{type(dataset).__name__} is an IterableDataset, so ranks may have different numbers of batches",
                code="data.stream-evaluation",
                fix="pass a dataset with a length, or evaluate with the Step that build_step returns",
            )
        self._rank = rank
        self._length = dataset_length(dataset)
        requests = [Request(0, ids) for ids in even_batches(self._length, options.batch_size, rank)]
        self._batches: DataLoader[Any] = DataLoader(
            SeededReads(dataset, CountedCollate(options.collate), options.seed),
            batch_sampler=requests,  # type: ignore[arg-type]
            collate_fn=already_collated,  # type: ignore[arg-type]
            num_workers=options.num_workers,
            pin_memory=rank.device.type == "cuda",
            generator=torch.Generator(),  # the global generator is for training: evaluation must not change dropout
        )

    def __len__(self) -> int:
        """Return the number of batches, which is equal on every rank."""
        return len(self._batches)

    def sum(self, value: float | torch.Tensor) -> float:
        """Return the sum of `value` over the data-parallel ranks. Communicates; call on every rank."""
        return self._rank.sum(value)

    def mean(self, value: float | torch.Tensor) -> float:
        """Return the mean over all samples of the dataset, where `value` is the sum over this rank's samples.

        Communicates; call on every rank. `test.mean(correct)` is the accuracy.
        """
        return self._rank.sum(value) / self._length

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's batches on its device."""
        for collated in raise_errors(self._batches):
            yield self._rank.to_device(collated.batch)


def even_batches(length: int, batch_size: int, rank: DataRank) -> list[list[int]]:
    """Return the sample ids of each batch of a rank; all ranks have the same number of batches and none is empty."""
    if length < rank.size:
        raise DataError(
            f"evaluation on {rank.size} data-parallel ranks requires at least {rank.size} samples, got {length}",
            code="data.too-few-samples",
            fix="use fewer data-parallel ranks, or a larger dataset",
        )
    first, stop = length * rank.index // rank.size, length * (rank.index + 1) // rank.size
    # Based on the ranks with the fewest samples; a rank with one more sample may have a batch with one more row.
    rows = -(-batch_size // rank.size)
    num_batches = -(-(length // rank.size) // rows)
    bounds = [first + (stop - first) * number // num_batches for number in range(num_batches + 1)]
    return [list(range(start, end)) for start, end in pairwise(bounds)]
