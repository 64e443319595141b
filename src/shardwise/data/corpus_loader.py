"""The loaders of a Corpus: plan the rows of all ranks, read those of one data-parallel rank, and store positions."""

from __future__ import annotations

import sys
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from torch.utils.data import DataLoader, Dataset

from shardwise.data.corpus import Corpus, CorpusPosition, CorpusRows, check_form
from shardwise.data.cursor import Cursor, Slices
from shardwise.data.feed import LoadedStep
from shardwise.data.loaders import raise_errors, read_in_worker, worker_generator
from shardwise.data.row_reads import BatchMemory, find_unknown_id
from shardwise.data.sources.source import outside_vocabulary, vocabulary_too_large
from shardwise.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torch import Tensor

    from shardwise.data.row_reads import RowRequest
    from shardwise.data.sharded_loader import DataRank, ReadOptions
    from shardwise.data.sources.source import TokenSource
    from shardwise.errors import InputError

Batch = list["Tensor"]
"""The fields of rows, int64 [rows, length]."""


class _PlannedStep(NamedTuple):
    before: CorpusPosition
    after: CorpusPosition


class CorpusLoader:
    """Loads the steps of one data-parallel rank from a Corpus.

    Every rank plans the rows of the whole global batch from document lengths, and reads the tokens of its own rows, in
    DataLoader workers if there are any. All steps are full, because a corpus begins a new epoch of a source in the
    middle of a batch.
    """

    def __init__(
        self,
        corpus: Corpus,
        slices: Slices,
        *,
        seed: int,
        first_step: int,
        num_steps: int,
        position: CorpusPosition | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        """Create a loader of the steps in range(`first_step`, `num_steps`).

        `position` is the position of `first_step`; without it, the rows of earlier steps are planned and skipped.
        """
        self._corpus, self._slices, self._seed = corpus, slices, seed
        self._range = range(first_step, num_steps)
        self._position = position
        self._rows = CorpusRows(corpus, seed=seed, position=position)  # now, since it refuses a changed corpus
        self._planned: deque[_PlannedStep] = deque()
        """Steps whose rows were requested and not yet returned, since workers read ahead."""
        self._reads = _RowReads(corpus)
        self._batches: Iterable[Batch]
        if num_workers == 0:  # a batch of 64 x 1,024 tokens is read in 0.25 ms, less than a worker needs to send it
            self._batches = _InProcessReads(self, self._reads, pin_memory=pin_memory)
        else:
            self._batches = DataLoader(
                self._reads,
                batch_sampler=_RowRequests(self),  # type: ignore[arg-type]
                collate_fn=_already_collated,
                num_workers=num_workers,
                pin_memory=pin_memory,
                generator=worker_generator(seed, slices.dp_rank, first_step),
            )

    @property
    def packs_documents(self) -> bool:
        """Whether rows of a source are packed documents."""
        return bool(self._corpus.packed)

    @property
    def sources(self) -> Mapping[str, TokenSource]:
        """The sources of the corpus by name."""
        return self._corpus.sources

    def limit_ids(self, vocab_size: int) -> None:
        """Raise DataError if the vocabulary of a source is larger than `vocab_size`; else check ids when they are read.

        Only sources that do not know their vocabulary are checked again.
        """
        for name, source in self._corpus.sources.items():
            size = getattr(source, "vocab_size", None)
            if size is not None and size > vocab_size:
                raise vocabulary_too_large(name, size, vocab_size)
            if size is None:
                self._reads.vocab_size = vocab_size

    def steps(self) -> Iterator[LoadedStep]:
        """Yield the steps of this rank in order, each with the position after it."""
        slices, batches = self._slices, raise_errors(self._batches)
        rows = [slices.micro_batch] * slices.accumulation
        for _ in self._range:
            loaded = list(islice(batches, slices.accumulation))
            before, after = self._planned.popleft()
            epoch = min((source.epoch for source in before.sources), default=0)
            first = before.row + slices.dp_rank * slices.micro_batch * slices.accumulation
            yield LoadedStep(
                loaded,
                rows,
                slices.batch_size,
                Cursor(seed=self._seed, epoch=epoch, index=before.row),
                range(first, first + sum(rows), slices.micro_batch),
                position=after,
            )

    def requests(self) -> Iterator[RowRequest]:
        """Yield the rows of every micro-batch of this rank in order."""
        slices = self._slices
        own = slices.micro_batch * slices.accumulation
        mine = range(slices.dp_rank * own, (slices.dp_rank + 1) * own)
        rows = self._rows
        if self._position is None:
            for step in range(self._range.start):
                rows.skip(self._corpus.order(step, slices.batch_size))
        for step in self._range:
            before = rows.position
            taken = rows.take(self._corpus.order(step, slices.batch_size), mine)
            self._planned.append(_PlannedStep(before, rows.position))
            for start in range(0, own, slices.micro_batch):
                yield taken.span(start, start + slices.micro_batch)


class _RowReads(Dataset[Any]):
    """Reads the rows of one micro-batch, in this process or in a DataLoader worker."""

    def __init__(self, corpus: Corpus) -> None:
        self._corpus = corpus
        self.vocab_size: int | None = None
        """Vocabulary size of the model, if a source does not know the ids that occur in it."""

    def __getitems__(self, request: RowRequest) -> Batch | InputError:
        """Return the fields of these rows in new tensors."""
        return read_in_worker(lambda request: self.read(request, BatchMemory()), request)

    def read(self, request: RowRequest, memory: BatchMemory) -> Batch:
        """Return the fields of these rows; raises DataError if a token id is outside the model's vocabulary."""
        fields = self._corpus.read(request, memory)
        unknown = None if self.vocab_size is None else find_unknown_id(fields, self.vocab_size)
        if unknown is not None and self.vocab_size is not None:
            row, token_id = unknown
            name = list(self._corpus.sources)[int(request.sources[row])]
            raise outside_vocabulary(name, token_id, self.vocab_size)
        return fields


class _InProcessReads:
    """Batches read in this process, into pinned memory if a GPU will copy them."""

    def __init__(self, loader: CorpusLoader, reads: _RowReads, *, pin_memory: bool) -> None:
        self._loader, self._reads = loader, reads
        self._memory = BatchMemory(pin_memory=pin_memory)

    def __iter__(self) -> Iterator[Batch]:
        for request in self._loader.requests():
            yield self._reads.read(request, self._memory)


class _RowRequests:
    """A batch sampler that yields the requests of a CorpusLoader."""

    def __init__(self, loader: CorpusLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[RowRequest]:
        return self._loader.requests()


def _already_collated(batch: Batch) -> Batch:
    return batch


# Custom training loops.


class ShardedCorpusLoader:
    """A loader of this data-parallel rank's batches of a corpus for a custom loop, in the order of `train`.

    It has no end and no epochs: `step` is the number of updates whose batches were yielded, also before a resume, and
    proportions change with it. An update has `accumulation` batches: back-propagate `loss * loader.scale`, and call
    `optimizer.step()` if `loader.is_update`. Every iteration continues after the last complete update. The rows of an
    update do not depend on the number of ranks.
    """

    def __init__(self, corpus: Corpus, options: ReadOptions, rank: DataRank) -> None:
        if options.collate is not None:
            raise DataError(
                "collate is set, but a corpus returns whole batches",
                code="data.corpus-collate",
                fix="remove collate=, or change batches in the loop",
            )
        self.step = 0
        self.scale = 1 / options.accumulation
        self.is_update = True
        self._corpus, self._options, self._rank = corpus, options, rank
        self._position = CorpusRows(corpus, seed=options.seed).position

    def __len__(self) -> int:
        """Raise TypeError, because sources begin their next epochs without end."""
        raise TypeError("a corpus has no length")

    def __iter__(self) -> Iterator[Batch]:
        """Yield this rank's batches without end, from the first one after the last complete update."""
        options, rank = self._options, self._rank
        loader = CorpusLoader(
            self._corpus,
            Slices(
                batch_size=options.batch_size * options.accumulation,
                accumulation=options.accumulation,
                dp_rank=rank.index,
                dp_size=rank.size,
                length=sys.maxsize,
            ),
            seed=options.seed,
            first_step=self.step,
            num_steps=sys.maxsize,
            position=self._position,
            num_workers=options.num_workers,
            pin_memory=rank.device.type == "cuda",
        )
        for update in loader.steps():
            for number, batch in enumerate(update.batches, start=1):
                self.is_update = number == options.accumulation
                if self.is_update and isinstance(update.position, CorpusPosition):
                    self.step, self._position = self.step + 1, update.position
                yield rank.to_device(batch)

    def sum(self, value: float | Tensor) -> float:
        """Return the sum of `value` over the data-parallel ranks. Communicates; call on every rank."""
        return self._rank.sum(value)

    def mean(self, value: float | Tensor) -> float:
        """Return the unweighted mean of `value` over the data-parallel ranks. Communicates; call on every rank."""
        return self._rank.sum(value) / self._rank.size

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last complete update; equal on every rank."""
        return {**self._identity(), "step": self.step, "corpus": msgspec.to_builtins(self._position)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state saved with any number of ranks; raise DataError if rows would differ."""
        if "corpus" not in state:
            raise DataError(
                "the loader state was saved with another dataset, but this loader has a corpus",
                code="data.corpus-changed",
                fix="resume with the data of the run, or leave the loader out of the state that is loaded",
            )
        for name, now in self._identity().items():
            if state[name] != now:
                raise DataError(
                    f"the loader state was saved with {name} {state[name]}, but this loader has {now}",
                    code="data.loader-state-mismatch",
                    fix=f"create the loader with {name} {state[name]}",
                )
        position = msgspec.convert(state["corpus"], CorpusPosition)
        check_form(position.form, self._corpus.form)
        self.step, self._position, self.is_update = state["step"], position, True

    def _identity(self) -> dict[str, Any]:
        """Return the options that determine the order of rows."""
        options = self._options
        return {"seed": options.seed, "batch_size": options.batch_size, "accumulation": options.accumulation}
