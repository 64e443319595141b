"""A corpus of token sources as one stream of rows: shuffled by groups of chunks, mixed by proportions.

An epoch of a source permutes its chunks by a key, forms groups of a few chunks, and permutes the documents of a group
by another key: no list of the corpus is ever in memory, and 10^12 tokens cost no more than 10^6. The documents of a
group become rows (`row_groups.py`). The invariant: a position (the row of the mixture, and epoch, group and row of each
source) determines all rows after it, whatever the number of ranks and loader workers. A checkpoint stores a few
integers per source, and a resumed run prepares one group of each.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt
from torch import Tensor
from torch.utils.data import IterableDataset

from shardwise.data.row_groups import CHUNKS_PER_GROUP, chunks_of_group, join_rows, make_group, source_seed
from shardwise.data.row_reads import BatchMemory, RowRequest, read_packed, read_windows
from shardwise.data.sources.iterables import ShardedIterable, shard_changed
from shardwise.data.sources.source import ReadsAhead, without_rows
from shardwise.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from shardwise.data.mixture import Mixture
    from shardwise.data.row_groups import RowGroup, RowPieces
    from shardwise.data.sources.source import TokenSource


class SourcePosition(msgspec.Struct, frozen=True, kw_only=True):
    """The next row of one source."""

    epoch: int = 0
    group: int = 0
    row: int = 0
    digest: int = 0
    """Checksum of the group's documents if the source is read again from its start (ShardedIterable) and row > 0."""


class CorpusForm(msgspec.Struct, frozen=True, kw_only=True):
    """What the rows of a corpus depend on: positions of a corpus of another form have no meaning in this one."""

    length: int
    chunks_per_group: int
    sources: tuple[str, ...]
    """Name, identity and kind of rows of each source."""


class CorpusPosition(msgspec.Struct, frozen=True, kw_only=True):
    """The next row of a corpus: O(sources) integers, independent of ranks and loader workers."""

    row: int
    """Rows of the mixture that were read."""
    sources: tuple[SourcePosition, ...]
    """By source, in their order."""
    form: CorpusForm


@dataclass(frozen=True, kw_only=True)
class MixtureStage:
    """A mixture from one step of the training on, until the next stage."""

    first_step: int = 0
    mixture: Mixture


@dataclass(frozen=True, eq=False, kw_only=True)
class Corpus(IterableDataset[tuple[Tensor, ...]]):
    """Rows of `length` tokens from several sources, without end; `iter` yields those of the first stage.

    A row is (tokens, targets) or, if a source is packed, (tokens, position_ids, document_ids, targets), each int64
    [length]. A packed row consists of whole documents, or of pieces of documents that are longer than a row: a model
    must restrict attention to tokens with equal `document_ids`, as the decoders of `sw.models` do.
    """

    sources: Mapping[str, TokenSource]
    """Name -> source. The order of a source depends on its name."""
    stages: tuple[MixtureStage, ...]
    """The mixtures of the training in their order; the first one starts at step 0."""
    length: int
    packed: frozenset[str] = frozenset()
    """Names of the sources whose rows are packed documents; rows of others are windows over concatenated documents."""
    split_documents: bool = True
    """Whether packed documents that are longer than a row are split; else they are refused when they are read."""
    chunks_per_group: int = CHUNKS_PER_GROUP
    seed: int = 0
    """Key of the order of `iter`; a training uses the seed of its job."""

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        rows = CorpusRows(self, seed=self.seed)
        while True:
            order = self.stages[0].mixture.sources(rows.position.row, rows.position.row + 1)
            yield tuple(values[0] for values in self.read(rows.take(order)))

    def order(self, step: int, batch_size: int) -> npt.NDArray[np.int64]:
        """Return the number of the source of each row of a step; shares are exact from the start of each stage."""
        stage = next(stage for stage in reversed(self.stages) if stage.first_step <= step)
        first = (step - stage.first_step) * batch_size
        return stage.mixture.sources(first, first + batch_size)

    @property
    def form(self) -> CorpusForm:
        """What the rows depend on, except the proportions, which may change when a run is resumed."""
        names = []
        for name, source in self.sources.items():
            kind = "packed" if name in self.packed else "windows"
            names.append(f"{name}: {source.identity}, {kind}")
        return CorpusForm(length=self.length, chunks_per_group=self.chunks_per_group, sources=tuple(names))

    def read(self, request: RowRequest, memory: BatchMemory | None = None) -> list[Tensor]:
        """Return the fields of several rows, each [rows, length], in `memory` or in new tensors."""
        sources, memory = tuple(self.sources.values()), memory or BatchMemory()
        if not self.packed:
            return read_windows(request, sources, self.length, memory)
        is_packed = np.array([name in self.packed for name in self.sources])[request.sources]
        return read_packed(request, sources, self.length, memory, is_packed=is_packed)


class CorpusRows:
    """Iterates over the rows of a corpus from a position, on every rank alike; it reads lengths, not tokens."""

    def __init__(self, corpus: Corpus, *, seed: int, position: CorpusPosition | None = None) -> None:
        self._form = corpus.form
        self._row = 0
        starts: Sequence[SourcePosition] = [SourcePosition()] * len(corpus.sources)
        if position is not None:
            check_form(position.form, self._form)
            self._row, starts = position.row, position.sources
        self._sources = [
            _SourceRows(corpus, name, seed=seed, position=start)
            for name, start in zip(corpus.sources, starts, strict=True)
        ]

    @property
    def position(self) -> CorpusPosition:
        """The position of the next row."""
        return CorpusPosition(row=self._row, sources=tuple(each.position for each in self._sources), form=self._form)

    def skip(self, order: npt.NDArray[np.int64]) -> None:
        """Advance by one row of each source in `order`."""
        self._row += len(order)
        numbers, counts = np.unique(order, return_counts=True)
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            self._sources[number].take(count, range(0))

    def take(self, order: npt.NDArray[np.int64], wanted: range | None = None) -> RowRequest:
        """Advance by one row of each source in `order` and return the rows, or only those with an index in `wanted`."""
        self._row += len(order)
        if wanted is None:
            wanted = range(len(order))
        parts, places = [], []
        for number in sorted(set(order.tolist())):
            here = np.flatnonzero(order == number)
            first, stop = np.searchsorted(here, (wanted.start, wanted.stop)).tolist()
            parts += self._sources[number].take(len(here), range(first, stop))
            places.append(here[first:stop])
        kept = order[wanted.start : wanted.stop]
        if len(parts) == 1:
            return RowRequest(parts[0], kept)
        return RowRequest(join_rows(parts).select(np.argsort(np.concatenate(places))), kept)


def check_form(saved: CorpusForm, now: CorpusForm) -> None:
    """Raise DataError if rows would be repeated or left out because the corpus differs from that of the checkpoint."""
    for name in ("sources", "length", "chunks_per_group"):
        before, after = getattr(saved, name), getattr(now, name)
        if before != after:
            raise DataError(
                f"the corpus has {name} {after}, but that of the checkpoint has {before}",
                code="data.corpus-changed",
                fix="resume with the corpus of the run, or start a new run from these weights",
            )


class _SourceRows:
    """The rows of one source, one group at a time."""

    def __init__(self, corpus: Corpus, name: str, *, seed: int, position: SourcePosition) -> None:
        self.name, self._corpus, self._source = name, corpus, corpus.sources[name]
        self._seed = source_seed(name, seed)
        self._num_groups = -(-self._source.num_chunks // corpus.chunks_per_group)
        self.position = position
        self._group: RowGroup | None = None
        self._requested: set[tuple[int, int]] = set()
        """Epoch and number of the groups that are downloaded, if the source is remote: this one and the next."""
        self._digest = 0
        """Checksum of the group."""
        if position.digest:
            self._load()  # now, since it refuses documents that changed since the checkpoint

    def take(self, count: int, wanted: range) -> list[RowPieces]:
        """Advance by `count` rows and return those with an index in `wanted`, by group."""
        found, done = [], 0
        while done < count:
            group, first = self._load(), self.position.row
            num_rows = min(count - done, group.num_rows - first)
            low, high = max(wanted.start - done, 0), min(wanted.stop - done, num_rows)
            if low < high:
                found.append(group.read_order(first + low, first + high))
            self._advance(num_rows)
            done += num_rows
        return found

    def _advance(self, num_rows: int) -> None:
        """Advance by rows of the current group."""
        epoch, group, row = self.position.epoch, self.position.group, self.position.row + num_rows
        if self._group is not None and row == self._group.num_rows:
            self._next_group()
        else:
            self.position = SourcePosition(epoch=epoch, group=group, row=row, digest=self._digest)

    def _load(self) -> RowGroup:
        """Return the group of the position; groups without tokens are skipped."""
        num_tried = 0
        while self._group is None:
            place = self.position
            self._read_ahead(place)
            chunks = self._chunks(place.epoch, place.group)
            group = make_group(
                self._source,
                chunks,
                length=self._corpus.length,
                packed=self.name in self._corpus.packed,
                split_documents=self._corpus.split_documents,
                seed=self._seed,
                number=place.epoch * self._num_groups + place.group,
            )
            self._digest = self._checksum(chunks)
            if place.digest and place.digest != self._digest:
                raise shard_changed(f"group {place.group} of source {self.name}", "before the checkpoint")
            if group.num_rows:
                self._group = group
                break
            num_tried += 1
            if num_tried == 2 * self._num_groups:  # its only document may be early in this epoch and late in the next
                raise without_rows(self.name)
            self._next_group()
        return self._group

    def _checksum(self, chunks: npt.NDArray[np.int64]) -> int:
        """Return a checksum of the documents of chunks; 0 if the identity of the source covers its documents."""
        if not isinstance(self._source, ShardedIterable):
            return 0
        digests = [self._source.digest(chunk) for chunk in chunks.tolist()]
        return zlib.crc32(np.array(digests, dtype=np.int64).tobytes()) or 1

    def _read_ahead(self, place: SourcePosition) -> None:
        """Begin to download this group and the next one."""
        if not isinstance(self._source, ReadsAhead):
            return
        following = self._after(place)
        groups = {(place.epoch, place.group): place, (following.epoch, following.group): following}
        for key, each in groups.items():
            if key not in self._requested:
                self._source.prefetch(self._chunks(each.epoch, each.group).tolist())
        self._requested = set(groups)

    def _next_group(self) -> None:
        self._group = None
        self.position = self._after(self.position)

    def _after(self, position: SourcePosition) -> SourcePosition:
        """Return the position at the start of the next group."""
        if position.group + 1 == self._num_groups:
            return SourcePosition(epoch=position.epoch + 1)
        return SourcePosition(epoch=position.epoch, group=position.group + 1)

    def _chunks(self, epoch: int, group: int) -> npt.NDArray[np.int64]:
        size = self._corpus.chunks_per_group
        return chunks_of_group(self._source.num_chunks, group, size=size, seed=self._seed, epoch=epoch)
