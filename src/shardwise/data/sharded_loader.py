"""Loaders of a training loop of one's own: this data-parallel rank's rows of every global batch.

The idea: which samples form a batch is a function of (seed, epoch, position) alone (data/cursor.py); a data-parallel
rank takes its rows of it. The invariant: over all data-parallel ranks every sample of an epoch is read exactly once,
at any number of ranks, and the state of a loader is a position without a rank, so another world size resumes from it.
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
from shardwise.data.loaders import IndexLoader, Request, SeededReads, StreamLoader, as_read, dataset_length
from shardwise.data.rows import CountedCollate, move
from shardwise.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shardwise.data.feed import LoadedStep, StepLoader


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """How a dataset is read: what `sw.dataloader` was given, or what the DataLoader that it was given says."""

    batch_size: int
    """Samples of a batch over all data-parallel ranks."""
    shuffle: bool = True
    drop_last: bool | None = None
    """Whether a short last batch is left out; None refuses one that data-parallel ranks cannot share evenly."""
    collate: Callable[[list[Any]], Any] | None = None
    num_workers: int = 0
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class DataRank:
    """Who reads: one of the data-parallel ranks, and where its batches go."""

    index: int
    size: int
    device: torch.device
    float_dtype: torch.dtype | None = None
    """What floating-point tensors become; None leaves them as they are."""
    group: dist.ProcessGroup | None = None
    """Joins the data-parallel ranks on the host; None for one."""

    def sum(self, value: float) -> float:
        """Return the sum of a number over the data-parallel ranks, whole where it is; communicates over their group."""
        if self.group is None:
            return value
        total = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(total, group=self.group)
        return type(value)(total.item())

    def place(self, batch: Any) -> Any:
        """Return a batch on this rank's device."""
        return move(batch, self.device, self.float_dtype)


def options_of(loader: DataLoader[Any], seed: int) -> ReadOptions:
    """Return how a DataLoader reads; refuses what cannot be divided over data-parallel ranks."""
    is_stream = isinstance(loader.dataset, IterableDataset)
    sampler = loader.sampler
    is_random = isinstance(sampler, RandomSampler) and not sampler.replacement
    if is_random:
        is_random = sampler.num_samples == dataset_length(loader.dataset)  # type: ignore[attr-defined, arg-type]
    problem = ""
    if loader.batch_size is None:
        problem = "makes no batches of a fixed size"
    elif not (is_stream or is_random or isinstance(sampler, SequentialSampler)):
        problem = f"has the sampler {type(sampler).__name__}"
    elif loader.worker_init_fn is not None:
        problem = "has a worker_init_fn"
    if problem or loader.batch_size is None:
        raise DataError(
            f"the DataLoader {problem}, which cannot be divided over data-parallel ranks",
            code="data.loader-not-divisible",
            fix="give sw.dataloader the dataset, with batch_size=, shuffle= and collate=",
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
    """This data-parallel rank's batches of an epoch, the next epoch in every new loop over it."""

    def __init__(self, dataset: Any, options: ReadOptions, rank: DataRank) -> None:
        self.scale = 1.0
        """What a mean loss of the batch last given is multiplied with, so that its average over data-parallel ranks is
        the mean over the global batch: 1 unless ranks have different numbers of its rows."""
        self._dataset = dataset
        self._options = options
        self._rank = rank
        self._is_stream = isinstance(dataset, IterableDataset)
        self._length = 0 if self._is_stream else dataset_length(dataset)
        self._position = Cursor(seed=options.seed)
        self._is_resumed = False
        if rank.size > 1 and options.drop_last is None:
            self._refuse_uneven()

    @property
    def epoch(self) -> int:
        """The epoch that the next loop reads, or the one that this loop is in."""
        return self._position.epoch

    def __len__(self) -> int:
        """Return the batches of an epoch; a stream has no length."""
        if self._is_stream:
            raise TypeError(f"{type(self._dataset).__name__} is a stream, which has no length")
        whole, rest = divmod(self._length, self._options.batch_size)
        return whole + (1 if rest and not self._options.drop_last else 0)

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's batches: the rest of the epoch after `load_state_dict`, else a whole one."""
        if self._position.index and not self._is_resumed:
            self._position = Cursor(seed=self._options.seed, epoch=self._position.epoch + 1)
        self._is_resumed = False
        first = self._position
        for step in self._steps(first):
            if self._options.drop_last and step.samples < self._options.batch_size:
                break
            self._position = Cursor(seed=first.seed, epoch=first.epoch, index=step.cursor.index + step.samples)
            self.scale = step.rows[0] * self._rank.size / step.samples
            yield self._rank.place(step.batches[0])
        self._position = Cursor(seed=first.seed, epoch=first.epoch + 1)

    def mean(self, value: float) -> float:
        """Return the mean of a number over the data-parallel ranks; communicates over them, call it on every rank."""
        return self._rank.sum(value) / self._rank.size

    def state_dict(self) -> dict[str, Any]:
        """Return the position behind the batch last given; the same on every rank."""
        position = self._position
        if not self._is_stream:
            last = min(self._length, len(self) * self._options.batch_size)
            position = position if position.index < last else Cursor(seed=position.seed, epoch=position.epoch + 1)
        return {**self._identity(), "epoch": position.epoch, "index": position.index}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position, saved at any number of ranks; refuses that of other samples."""
        for name, now in self._identity().items():
            if state.get(name) != now:
                raise DataError(
                    f"the state of a loader has {name} {state.get(name)}, this loader has {now}: other samples would"
                    " come",
                    code="data.loader-state-mismatch",
                    fix="make the loader as the one that was saved",
                )
        self._position = Cursor(seed=self._options.seed, epoch=state["epoch"], index=state["index"])
        self._is_resumed = True

    def _identity(self) -> dict[str, Any]:
        """Return what decides, beside the position, which samples come."""
        options = self._options
        return {
            "seed": options.seed,
            "shuffle": options.shuffle,
            "batch_size": options.batch_size,
            "length": self._length,
        }

    def _steps(self, first: Cursor) -> Iterator[LoadedStep]:
        """Yield the batches of one epoch from `first` on; of a stream communicates over the rank's group."""
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
                return  # the stream began again
            yield step

    def _refuse_uneven(self) -> None:
        """Refuse a last batch of which ranks would have different numbers of rows, where nobody said what to do."""
        rest = self._length % self._options.batch_size
        if not self._is_stream and rest % self._rank.size == 0:
            return
        what = "a stream may end with a batch" if self._is_stream else f"the last batch has {rest} samples"
        raise DataError(
            f"{what} that {self._rank.size} data-parallel ranks cannot share evenly, so the average of their mean"
            " losses would not be the mean over the batch",
            code="data.last-batch-uneven",
            fix="give drop_last=True, or drop_last=False and back-propagate loss * loader.scale",
        )


class EvaluationLoader:
    """This data-parallel rank's batches of a dataset for evaluation: every sample once, in order, nothing repeated.

    All ranks get the same number of batches, none empty, so that forward passes which communicate (FSDP) stay
    together; batch sizes differ by one sample at most. Sums over batches, summed over data-parallel ranks, are sums
    over the dataset.
    """

    def __init__(self, dataset: Any, options: ReadOptions, rank: DataRank) -> None:
        if isinstance(dataset, IterableDataset):
            raise DataError(
                f"{type(dataset).__name__} is a stream, of which ranks may have different numbers of batches",
                code="data.stream-evaluation",
                fix="give a dataset with a length, or evaluate in a step of build_step",
            )
        self._rank = rank
        requests = [Request(0, ids) for ids in even_batches(dataset_length(dataset), options.batch_size, rank)]
        self._batches: DataLoader[Any] = DataLoader(
            SeededReads(dataset, CountedCollate(options.collate), options.seed),
            batch_sampler=requests,  # type: ignore[arg-type]
            collate_fn=as_read,  # type: ignore[arg-type]
            num_workers=options.num_workers,
            pin_memory=rank.device.type == "cuda",
            generator=torch.Generator(),  # the global one is training's: dropout must not notice an evaluation
        )

    def __len__(self) -> int:
        """Return the number of batches, the same on every rank."""
        return len(self._batches)

    def sum(self, value: float) -> float:
        """Return the sum of a number over the data-parallel ranks; communicates over them, call it on every rank."""
        return self._rank.sum(value)

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's batches."""
        for collated in self._batches:
            yield self._rank.place(collated.batch)


def even_batches(length: int, batch_size: int, rank: DataRank) -> list[list[int]]:
    """Return the sample ids of each of a rank's batches; all ranks have the same number of batches, none empty."""
    if length < rank.size:
        raise DataError(
            f"{length} samples cannot be evaluated on {rank.size} data-parallel ranks",
            code="data.too-few-samples",
            fix="use fewer ranks",
        )
    first, stop = length * rank.index // rank.size, length * (rank.index + 1) // rank.size
    # Of the smallest share: a rank with one sample more may have a batch that is larger by one, none has an empty one.
    rows = -(-batch_size // rank.size)
    num_batches = -(-(length // rank.size) // rows)
    own = stop - first
    bounds = [first + own * number // num_batches for number in range(num_batches + 1)]
    return [list(range(start, end)) for start, end in pairwise(bounds)]
