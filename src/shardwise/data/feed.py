"""The feed: every micro-batch of a step, its real rows and the global denominator, one step ahead."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import torch
import torch.distributed as dist

from shardwise.data.cursor import Places
from shardwise.data.rows import RowMarks, fill_rows, move

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from shardwise.data.cursor import Cursor
    from shardwise.job import Loss


class MicroBatch(msgspec.Struct, frozen=True, gc=False):
    """What one forward pass of one data-parallel rank sees."""

    batch: Any
    """On the device; filled to `filled` rows by repeating real ones."""
    rows: int
    """Real rows, first in the batch; 0 when this rank has none but must still take part."""
    filled: int
    places: Places | None = None
    """Of the real rows; None where they are not known."""
    whole: Any = None
    """On the host, with all tokens, where `batch` is a slice of them; else None."""
    marks: RowMarks | None = None
    """Which tensors of the batch hold rows; None where only their length tells."""

    @property
    def uncut(self) -> Any:
        """The batch with all of its tokens."""
        return self.batch if self.whole is None else self.whole


class StepBatch(msgspec.Struct, frozen=True, gc=False):
    """Everything one optimizer step needs."""

    micro_batches: list[MicroBatch]
    denominator: float
    """The loss normalizer over all data-parallel ranks; of replicas that train apart, as if all counted alike."""
    samples: int
    """Real samples, over all data-parallel ranks."""
    cursor: Cursor
    """Where this step begins in the stream."""


class LoadedStep(msgspec.Struct, frozen=True, gc=False):
    """Micro-batches of one step as a loader gives them: on the host, unfilled, uncounted."""

    batches: list[Any]
    rows: list[int]
    """Real rows of each batch; where it is 0 the batch holds one spare row."""
    samples: int
    """Real samples over all data-parallel ranks."""
    cursor: Cursor
    """Where this step begins in the stream."""
    starts: Sequence[int] | None = None
    """Where in the order of the epoch each batch begins; None where a loader does not know."""
    marks: RowMarks | None = None
    """Which tensors of a batch hold rows; None where only their length tells."""


class StepLoader(Protocol):
    """Gives the steps of training in order, for one data-parallel rank."""

    def steps(self) -> Iterable[LoadedStep]:
        """Yield steps, epoch after epoch."""


class Feed:
    """Iterates over StepBatch: loads a step ahead and sums its count over ranks while the last one trains."""

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
        cut: Callable[[Any], Any] | None = None,
    ) -> None:
        """`group` joins on the host the data-parallel ranks that sum gradients in every step; None for one.

        Those are all of them, or those of one of `replicas`, whose others are taken to count alike. `cut` takes this
        rank's tokens from a batch; what the loss counts is counted on the whole. `fill` brings short micro-batches to
        the full shape, which losses by row allow.
        """
        self._loader = loader
        self._loss = loss
        self._micro_batch = micro_batch if fill and loss.by_row else 1
        self._device = device
        self._float_dtype = float_dtype
        self._group = group
        self._replicas = replicas
        self._cut = cut

    def __iter__(self) -> Iterator[StepBatch]:
        """Yield steps; communicates the counts over the feed's own group, one step ahead."""
        ahead: _Pending | None = None
        for loaded in self._loader.steps():
            pending = self._prepare(loaded)
            if ahead is not None:
                yield ahead.finish()
            ahead = pending
        if ahead is not None:
            yield ahead.finish()

    def _prepare(self, loaded: LoadedStep) -> _Pending:
        pairs = list(zip(loaded.batches, loaded.rows, strict=True))
        places = _places(loaded)
        micro_batches = [self._fill(*pair, where, loaded.marks) for pair, where in zip(pairs, places, strict=True)]
        if isinstance(self._loss.count, str) and self._replicas == 1:
            return _Pending(loaded, micro_batches, loaded.samples)
        count = self._replicas * sum(self._loss.count_of(batch, rows) for batch, rows in pairs if rows)
        if self._group is None:
            return _Pending(loaded, micro_batches, count)
        total = torch.tensor(count, dtype=torch.float64)  # counts may be fractions; whole ones are exact to 2^53
        work = dist.all_reduce(total, group=self._group, async_op=True)
        return _Pending(loaded, micro_batches, total, work)

    def _fill(self, batch: Any, rows: int, places: Places | None, marks: RowMarks | None) -> MicroBatch:
        """Fill a short batch to the plan's shape."""
        filled = max(rows, 1)
        if filled < self._micro_batch:
            batch = fill_rows(batch, filled, self._micro_batch, marks)
            filled = self._micro_batch
        if self._cut is None:
            return MicroBatch(self._move(batch), rows, filled, places, None, marks)
        return MicroBatch(self._move(self._cut(batch)), rows, filled, places, batch, marks)

    def _move(self, batch: Any) -> Any:
        """Loaders give what the CPU can use as it is."""
        if self._device.type == "cpu" and self._float_dtype is None:
            return batch
        return move(batch, self._device, self._float_dtype)


def _places(loaded: LoadedStep) -> list[Places] | list[None]:
    if loaded.starts is None:
        return [None] * len(loaded.rows)
    seed, epoch = loaded.cursor.seed, loaded.cursor.epoch
    spans = zip(loaded.starts, loaded.rows, strict=True)
    return [Places(seed=seed, epoch=epoch, indices=range(start, start + rows)) for start, rows in spans]


class _Pending(msgspec.Struct, frozen=True, gc=False):
    """A step whose count may still be on its way."""

    loaded: LoadedStep
    micro_batches: list[MicroBatch]
    count: float | torch.Tensor
    work: dist.Work | None = None

    def finish(self) -> StepBatch:
        """Wait for the counts of the other data-parallel ranks."""
        if self.work is not None:
            self.work.wait()
        return StepBatch(self.micro_batches, float(self.count), self.loaded.samples, self.loaded.cursor)
