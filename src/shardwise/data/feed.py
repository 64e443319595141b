"""The feed, which prepares the micro-batches of a step and its global loss normalizer one step ahead."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import torch
import torch.distributed as dist

from shardwise.data.corpus import CorpusPosition
from shardwise.data.cursor import SamplePositions
from shardwise.data.rows import RowMarks, drop_padding_rows, fill_rows, move, non_tensors, settle_marks, tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from shardwise.data.cursor import Cursor
    from shardwise.data.sources.source import TokenSource
    from shardwise.job import Loss


class MicroBatch(msgspec.Struct, frozen=True, gc=False):
    """The input of one forward pass on one data-parallel rank."""

    batch: Any
    """The batch on the device, padded to `filled` rows by repeating rows."""
    rows: int
    """Number of rows without padding, which come first in the batch; 0 if the batch contains only padding."""
    filled: int
    positions: SamplePositions | None = None
    """Positions of the rows in the sample stream; None if the loader does not provide them."""
    whole: Any = None
    """With context parallelism, the batch with all tokens, on the host; else None."""
    marks: RowMarks | None = None
    """Which tensors of the batch contain rows; None if they are identified by their length."""

    @property
    def unsharded(self) -> Any:
        """The batch with all tokens."""
        return self.batch if self.whole is None else self.whole

    def first(self, rows: int) -> MicroBatch | None:
        """Return a micro-batch of the first `rows` rows; None if the batch has values that do not belong to one row."""
        marks = settle_marks(self.marks, self.batch, self.filled)
        by_row = [marked for marked, tensor in zip(marks, tensors(self.batch), strict=True) if tensor.ndim]
        rows = min(rows, self.rows)
        if not rows or not all(by_row) or non_tensors(self.batch) or self.whole is not None:
            return None
        batch = drop_padding_rows(self.batch, rows, self.filled, marks)
        return msgspec.structs.replace(self, batch=batch, rows=rows, filled=rows, positions=None)


class StepBatch(msgspec.Struct, frozen=True, gc=False):
    """The input of one optimizer step on one data-parallel rank."""

    micro_batches: list[MicroBatch]
    denominator: float
    """Loss normalizer over all data-parallel ranks; with `sync_every`, this replica's value x number of replicas."""
    samples: int
    """Number of samples over all data-parallel ranks, without padding."""
    cursor: Cursor
    """Position of the step's first sample in the sample stream."""


class StreamPosition(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The position of an IterableDataset after a step; equal on all ranks."""

    epoch: int
    """Epoch and sample index at the beginning of the step."""
    index: int
    digest: int
    """Checksum of the samples from the start of the stream to the end of the step or, with a state, of the step."""
    state: str = ""
    """State of the dataset at the beginning of the step, as JSON; empty if the stream is read from its start."""


DataPosition = CorpusPosition | StreamPosition
"""The position of the training data after a step, which a checkpoint stores; a dataset with a length has none."""


class LoadedStep(msgspec.Struct, frozen=True, gc=False):
    """The micro-batches of one step as a loader returns them: on the host, without padding."""

    batches: list[Any]
    rows: list[int]
    """Number of rows of each batch; a batch with 0 rows contains one padding row."""
    samples: int
    """Number of samples over all data-parallel ranks."""
    cursor: Cursor
    """Position of the step's first sample in the sample stream."""
    starts: Sequence[int] | None = None
    """Position in the epoch of the first sample of each batch; None if the loader does not provide it."""
    marks: RowMarks | None = None
    """Which tensors of a batch contain rows; None if they are identified by their length."""
    position: DataPosition | None = None
    """Position of the data after this step, for checkpoints; None if the number of the step determines it."""


class StepLoader(Protocol):
    """A loader of the training steps of one data-parallel rank."""

    def steps(self) -> Iterable[LoadedStep]:
        """Yield the steps in order, over all epochs."""


class Feed:
    """Iterates over `StepBatch`es: loads one step ahead and reduces its loss normalizer during the current step."""

    def __init__(
        self,
        loader: StepLoader,
        loss: Loss,
        *,
        micro_batch: int,
        device: torch.device,
        fill: bool = True,
        float_dtype: torch.dtype | None = None,
        group: dist.ProcessGroup | None = None,
        replicas: int = 1,
        token_shard: Callable[[Any], Any] | None = None,
        position: DataPosition | None = None,
    ) -> None:
        """Create a feed over `loader`.

        `group` is the host process group of the data-parallel ranks that reduce gradients in every step; None for one
        rank. It contains all data-parallel ranks, or those of one of `replicas`, which are assumed to have equal
        counts. `token_shard` slices this rank's tokens from a batch, while the loss normalizer is computed on the whole
        batch. `fill` pads short micro-batches to the full shape, which requires a loss with `by_row`. `position` is the
        position of the data at the first step.
        """
        self._loader = loader
        self._loss = loss
        self._micro_batch = micro_batch if fill and loss.by_row else 1
        self._device = device
        self._float_dtype = float_dtype
        self._is_in_place = device.type == "cpu" and float_dtype is None
        self._group = group
        self._replicas = replicas
        self._token_shard = token_shard
        self.position = position
        """Position of the data after the last step that was returned, which a checkpoint stores."""
        self.waited_s = 0.0
        """Seconds in which steps waited for the loader; on a GPU, only if it had no work left when they ended."""

    @property
    def packs_documents(self) -> bool:
        """Whether rows are packed documents of a corpus; those of other datasets are recognized by their values."""
        return getattr(self._loader, "packs_documents", False)

    @property
    def sources(self) -> Mapping[str, TokenSource]:
        """The sources of a corpus by name; none of another dataset."""
        return getattr(self._loader, "sources", {})

    def limit_ids(self, vocab_size: int) -> None:
        """Refuse token ids of a corpus from `vocab_size` on; other datasets are not checked."""
        limit = getattr(self._loader, "limit_ids", None)
        if limit is not None:
            limit(vocab_size)

    def __iter__(self) -> Iterator[StepBatch]:
        """Yield the `StepBatch` of each step. Communicates over the feed's group; iterate on every rank."""
        ahead: _Pending | None = None
        steps = iter(self._loader.steps())
        while (loaded := self._load(steps)) is not None:
            pending = self._prepare(loaded)
            if ahead is not None:
                self.position = ahead.loaded.position
                yield ahead.finish()
            ahead = pending
        if ahead is not None:
            self.position = ahead.loaded.position
            yield ahead.finish()

    def _load(self, steps: Iterator[LoadedStep]) -> LoadedStep | None:
        """Return the next step of the loader, None after the last, and add the time to `waited_s`."""
        began = time.perf_counter()
        loaded = next(steps, None)
        # The host enqueues work ahead of a GPU: a batch that arrives before the work ends delays nothing.
        if self._device.type != "cuda" or torch.cuda.current_stream(self._device).query():
            self.waited_s += time.perf_counter() - began
        return loaded

    def _prepare(self, loaded: LoadedStep) -> _Pending:
        pairs = list(zip(loaded.batches, loaded.rows, strict=True))
        positions = _positions(loaded)
        micro_batches = [self._fill(*pair, where, loaded.marks) for pair, where in zip(pairs, positions, strict=True)]
        if isinstance(self._loss.count, str) and self._replicas == 1:
            return _Pending(loaded, micro_batches, loaded.samples)
        count = self._replicas * sum(self._loss.count_of(batch, rows) for batch, rows in pairs if rows)
        if self._group is None:
            return _Pending(loaded, micro_batches, count)
        total = torch.tensor(count, dtype=torch.float64)  # counts may be fractions; integers are exact up to 2^53
        work = dist.all_reduce(total, group=self._group, async_op=True)
        return _Pending(loaded, micro_batches, total, work)

    def _fill(self, batch: Any, rows: int, positions: SamplePositions | None, marks: RowMarks | None) -> MicroBatch:
        """Return a micro-batch, padded to the plan's micro-batch size if the batch is short."""
        filled = max(rows, 1)
        if filled < self._micro_batch:
            batch = fill_rows(batch, filled, self._micro_batch, marks)
            filled = self._micro_batch
        if self._token_shard is None:
            return MicroBatch(self._move(batch), rows, filled, positions, None, marks)
        return MicroBatch(self._move(self._token_shard(batch)), rows, filled, positions, batch, marks)

    def _move(self, batch: Any) -> Any:
        """Move a batch to the device and dtype of the model; a no-op on the CPU without a dtype."""
        if self._is_in_place:
            return batch
        return move(batch, self._device, self._float_dtype)


def _positions(loaded: LoadedStep) -> list[SamplePositions] | list[None]:
    if loaded.starts is None:
        return [None] * len(loaded.rows)
    seed, epoch = loaded.cursor.seed, loaded.cursor.epoch
    spans = zip(loaded.starts, loaded.rows, strict=True)
    return [SamplePositions(seed=seed, epoch=epoch, indices=range(start, start + rows)) for start, rows in spans]


class _Pending(msgspec.Struct, frozen=True, gc=False):
    """A step whose loss normalizer may still be reduced asynchronously."""

    loaded: LoadedStep
    micro_batches: list[MicroBatch]
    count: float | torch.Tensor
    work: dist.Work | None = None

    def finish(self) -> StepBatch:
        """Wait for the reduction and return the step."""
        if self.work is not None:
            self.work.wait()
        return StepBatch(self.micro_batches, float(self.count), self.loaded.samples, self.loaded.cursor)
