"""Loaders for custom training loops: this data-parallel rank's rows of every global batch.

The idea: the samples of a batch depend only on (seed, epoch, position) (data/cursor.py), and each data-parallel rank
reads its rows. The invariant: data-parallel ranks together read every sample of an epoch exactly once, at any number of
ranks, and the state of a loader is a position that does not depend on ranks, so any world size can resume from it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, default_collate

from shardwise.data.cursor import Cursor, Slices
from shardwise.data.loaders import IndexLoader, Request, SeededReads, StreamLoader, already_collated, dataset_length
from shardwise.data.rows import CountedCollate, move
from shardwise.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shardwise.data.feed import LoadedStep, StepLoader


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """The options for reading a dataset: the arguments of `sw.dataloader`, or the options of its DataLoader."""

    batch_size: int
    """Global batch size: samples over all data-parallel ranks."""
    shuffle: bool = True
    drop_last: bool | None = None
    """Whether to drop a short last batch; None raises if data-parallel ranks cannot share it evenly."""
    collate: Callable[[list[Any]], Any] | None = None
    num_workers: int = 0
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class DataRank:
    """A data-parallel rank and the device and dtype of its batches."""

    index: int
    size: int
    device: torch.device
    float_dtype: torch.dtype | None = None
    """The dtype to which floating-point tensors are converted; None disables the conversion."""
    group: dist.ProcessGroup | None = None
    """Host process group of the data-parallel ranks; None if there is only one."""

    def sum(self, value: float) -> float:
        """Return the sum of a number over the data-parallel ranks in its own type. Communicates over the group."""
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
    """A loader of this data-parallel rank's batches; every iteration over it reads the next epoch."""

    def __init__(self, dataset: Any, options: ReadOptions, rank: DataRank) -> None:
        self.scale = 1.0
        """Factor of the mean loss of the last batch, so that its average over data-parallel ranks is the mean over the
        global batch: 1 unless ranks have different numbers of rows."""
        self._dataset = dataset
        self._options = options
        self._rank = rank
        self._is_stream = isinstance(dataset, IterableDataset)
        self._length = 0 if self._is_stream else dataset_length(dataset)
        self._position = Cursor(seed=options.seed)
        self._is_resumed = False
        if rank.size > 1 and options.drop_last is None:
            self._check_last_batch()

    @property
    def epoch(self) -> int:
        """The epoch that is being read or, between two iterations, the next one."""
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
        for step in self._steps(first):
            if self._options.drop_last and step.samples < self._options.batch_size:
                break
            self._position = Cursor(seed=first.seed, epoch=first.epoch, index=step.cursor.index + step.samples)
            self.scale = step.rows[0] * self._rank.size / step.samples
            yield self._rank.to_device(step.batches[0])
        self._position = Cursor(seed=first.seed, epoch=first.epoch + 1)

    def mean(self, value: float) -> float:
        """Return the mean of a number over the data-parallel ranks. Communicates over them; call on every rank."""
        return self._rank.sum(value) / self._rank.size

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch; equal on every rank."""
        epoch, index = self._position.epoch, self._position.index
        if not self._is_stream and index >= min(self._length, len(self) * self._options.batch_size):
            epoch, index = epoch + 1, 0
        return {**self._identity(), "epoch": epoch, "index": index}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a position saved at any number of ranks; raise DataError if samples would differ."""
        for name, now in self._identity().items():
            if state.get(name) != now:
                raise DataError(
                    f"the loader state was saved with {name} {state.get(name)}, but this loader has {now}",
                    code="data.loader-state-mismatch",
                    fix="create the loader with the options of the saved one",
                )
        self._position = Cursor(seed=self._options.seed, epoch=state["epoch"], index=state["index"])
        self._is_resumed = True

    def _identity(self) -> dict[str, Any]:
        """Return the options that determine the order of samples."""
        options = self._options
        return {
            "seed": options.seed,
            "shuffle": options.shuffle,
            "batch_size": options.batch_size,
            "length": self._length,
        }

    def _steps(self, first: Cursor) -> Iterator[LoadedStep]:
        """Yield the batches of one epoch, starting at `first`. Communicates over the rank's group for a stream."""
        options, rank = self._options, self._rank
        done = first.index // options.batch_size
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
            yield step

    def _check_last_batch(self) -> None:
        """Raise DataError if ranks may have different numbers of rows of the last batch."""
        num_rest = self._length % self._options.batch_size
        if not self._is_stream and num_rest % self._rank.size == 0:
            return
        subject = f"the last batch has {num_rest} samples"
        if self._is_stream:
            subject = "an IterableDataset may end with a batch"
        raise DataError(
            f"{subject} that {self._rank.size} data-parallel ranks cannot share evenly, so the average of their mean"
            " losses would not be the mean over the batch",
            code="data.last-batch-uneven",
            fix="set drop_last=True, or drop_last=False and back-propagate loss * loader.scale",
        )


class EvaluationLoader:
    """A loader of this data-parallel rank's batches for evaluation: each sample once, in order, without padding.

    All ranks have the same number of batches and none is empty, so that forward passes that communicate (FSDP) match;
    batch sizes differ by at most one sample. Sums over batches and data-parallel ranks are sums over the dataset.
    """

    def __init__(self, dataset: Any, options: ReadOptions, rank: DataRank) -> None:
        if isinstance(dataset, IterableDataset):
            raise DataError(
                f"{type(dataset).__name__} is an IterableDataset, so ranks may have different numbers of batches",
                code="data.stream-evaluation",
                fix="pass a dataset with a length, or evaluate with a step of build_step",
            )
        self._rank = rank
        requests = [Request(0, ids) for ids in even_batches(dataset_length(dataset), options.batch_size, rank)]
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

    def sum(self, value: float) -> float:
        """Return the sum of a number over the data-parallel ranks. Communicates over them; call on every rank."""
        return self._rank.sum(value)

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's batches on its device."""
        for collated in self._batches:
            yield self._rank.to_device(collated.batch)


def even_batches(length: int, batch_size: int, rank: DataRank) -> list[list[int]]:
    """Return the sample ids of each batch of a rank; all ranks have the same number of batches and none is empty."""
    if length < rank.size:
        raise DataError(
            f"evaluation on {rank.size} data-parallel ranks requires at least as many samples, got {length}",
            code="data.too-few-samples",
            fix="use fewer ranks",
        )
    first, stop = length * rank.index // rank.size, length * (rank.index + 1) // rank.size
    # Computed for the smallest share: a rank with one more sample may have a batch with one more row.
    rows = -(-batch_size // rank.size)
    num_batches = -(-(length // rank.size) // rows)
    bounds = [first + (stop - first) * number // num_batches for number in range(num_batches + 1)]
    return [list(range(start, end)) for start, end in pairwise(bounds)]
