"""The loader of an IterableDataset of any kind, with a resume that is exact or refused.

Every process iterates over the whole stream and takes its share, so a step contains the next `batch_size` samples at
any number of ranks and workers. A resumed run finds its position in one of two ways. A dataset with `state_dict` and
`load_state_dict` is set to its state before the last step, and this step is read again; any other dataset, and every
dataset in loader workers, is read again from its start. In both ways checksums of the samples are compared with those
of the checkpoint: a stream that yields other samples the second time (random, a shuffle buffer, a changed file) is
refused, since samples would be lost or repeated. A state belongs to the stream and not to a rank, because all ranks
advance the stream by whole steps.
"""

from __future__ import annotations

import copy
import warnings
import zlib
from contextlib import contextmanager
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from shardwise.data.cursor import Cursor
from shardwise.data.feed import LoadedStep, StreamPosition
from shardwise.data.loaders import worker_generator
from shardwise.data.rows import Collated, CountedCollate, drop_padding_rows, non_tensors, tensors
from shardwise.errors import DataError
from shardwise.torch_private.distributed import no_worker_info

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_DIGEST_BYTES = 4096
"""Bytes of each tensor that its checksum covers: 4 us per sample instead of 0.3 ms for an image of 224 x 224."""
_MODULUS = 2**62
_LOADED_STATE = "_starting_state_dict"
"""Attribute of a dataset of Hugging Face: the state that was loaded last."""


class StreamLoader:
    """Loader of an IterableDataset, split once over data-parallel ranks and their DataLoader workers.

    A step contains the next `batch_size` samples of the stream, for any number of ranks, workers and micro-batches.
    Limitations: every process iterates over the whole stream and selects its share; samples are not shuffled; and a
    stream has no length, so the training length is set in steps.
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
        position: StreamPosition | None = None,
        use_state: bool = True,
        note: Callable[[str], None] = warnings.warn,
    ) -> None:
        """Create a loader of the steps in range(`first_step`, `num_steps`); `position` is that of `first_step`.

        With `use_state`, a dataset with `state_dict` and `load_state_dict` resumes by its state if `num_workers` is 0.
        `note` receives a message if ranks read different streams.
        """
        check_not_split("the training data", dataset)
        self._by_state = (
            _has_state(dataset) and use_state and num_workers == 0 and (position is None or bool(position.state))
        )
        if position is not None and position.state and not self._by_state:
            raise DataError(
                f"the checkpoint has a state of {type(dataset).__name__}, which loader workers cannot restore",
                code="data.stream-state-workers",
                fix="set num_workers=0, as when the checkpoint was saved",
            )
        self._dataset, self._dp_rank, self._dp_size = dataset, dp_rank, dp_size
        self._micro_batch, self._accumulation = micro_batch, accumulation
        self._collate = _DigestedCollate(collate)
        self._num_workers, self._position, self._seed, self._group = num_workers, position, seed, group
        self._first_step, self._num_steps = first_step, num_steps
        self._note: Callable[[str], None] | None = note

    def steps(self) -> Iterator[LoadedStep]:
        """Yield the steps of this rank; the stream restarts after it ends on all ranks. Communicates over the group."""
        with preserved(self._dataset) as dataset:
            yield from self._steps_by_state(dataset) if self._by_state else self._steps_from_start(dataset)

    def _steps_from_start(self, dataset: IterableDataset[Any]) -> Iterator[LoadedStep]:
        """Yield the steps from `first_step` on; earlier samples are read, compared with the checkpoint and dropped."""
        loader = DataLoader(
            _DigestedShare(dataset, dp_rank=self._dp_rank, dp_size=self._dp_size, micro_batch=self._micro_batch),
            batch_size=self._micro_batch,
            collate_fn=self._collate,
            num_workers=self._num_workers,
            generator=worker_generator(self._seed, self._dp_rank, self._first_step),
        )
        epoch, index, done, digest = 0, 0, 0, 0
        batches, padding = iter(loader), None
        while done < self._num_steps:
            found: list[_Digested] = list(islice(batches, self._accumulation))
            loaded = [each.collated for each in found]
            samples, added = self._sum(sum(each.rows for each in loaded), sum(each.digest for each in found))
            self._compare_ranks(found[0].head if found else 0)
            if samples == 0:
                _check_not_empty(index)
                epoch, index, batches = epoch + 1, 0, iter(loader)
                continue
            if loaded:
                padding = _first_row(loaded[0])
            if padding is None:
                raise _too_few_samples()
            if done == self._first_step and self._position is not None:
                self._check_same(self._position.digest, digest)
            digest = (digest + added) % _MODULUS
            if done >= self._first_step:
                position = StreamPosition(epoch=epoch, index=index, digest=digest)
                yield self._loaded_step(loaded, padding, samples, position)
            index, done = index + samples, done + 1

    def _steps_by_state(self, dataset: Any) -> Iterator[LoadedStep]:
        """Yield the steps from `first_step` on; without a position, earlier samples are read and dropped."""
        state = beginning = _encoded(dataset, _first_state(dataset))
        epoch, index, done, expected = 0, 0, 0, None
        if self._position is not None:
            state = self._position.state
            dataset.load_state_dict(msgspec.json.decode(state))
            epoch, index = self._position.epoch, self._position.index
            done, expected = self._first_step - 1, self._position.digest
        stream = _whole_stream(dataset)
        while done < self._num_steps:
            samples = list(islice(stream, self._micro_batch * self._accumulation * self._dp_size))
            if not samples:
                _check_not_empty(index)
                epoch, index, state = epoch + 1, 0, beginning
                # Without this, a resumed dataset of Hugging Face begins each epoch at the state that it resumed from.
                dataset.load_state_dict(msgspec.json.decode(beginning))
                stream = _whole_stream(dataset)
                continue
            loaded, digest = self._own(samples)
            self._compare_ranks(digest)
            if expected is not None:
                self._check_same(expected, digest)
                expected = None
            if done >= self._first_step:
                position = StreamPosition(epoch=epoch, index=index, digest=digest, state=state)
                padding = None
                if len(loaded) < self._accumulation:  # the stream ended
                    padding = _first_row(self._collate(samples[:1]).collated)
                yield self._loaded_step(loaded, padding, len(samples), position)
            index, done, state = index + len(samples), done + 1, _encoded(dataset, dataset.state_dict())

    def _own(self, samples: list[Any]) -> tuple[list[Collated], int]:
        """Return the micro-batches of this rank, and the checksum of the samples of all ranks."""
        own = samples[self._dp_rank :: self._dp_size]
        starts = range(0, len(own), self._micro_batch)
        loaded = [self._collate(own[start : start + self._micro_batch]).collated for start in starts]
        return loaded, sum(map(sample_digest, samples)) % _MODULUS

    def _loaded_step(self, loaded: list[Collated], padding: Any, samples: int, position: StreamPosition) -> LoadedStep:
        missing = self._accumulation - len(loaded)
        return LoadedStep(
            [each.batch for each in loaded] + [padding] * missing,
            [each.rows for each in loaded] + [0] * missing,
            samples,
            Cursor(seed=self._seed, epoch=position.epoch, index=position.index),
            marks=loaded[0].marks if loaded else None,
            position=position,
        )

    def _check_same(self, expected: int, found: int) -> None:
        if expected != found:
            raise DataError(
                f"{type(self._dataset).__name__} yielded other samples than before the checkpoint",
                code="data.stream-changed",
                fix="make it deterministic and do not shuffle it with a buffer, or start a new run from these weights",
            )

    def _compare_ranks(self, digest: int) -> None:
        """Note once if ranks read different samples at the start of the stream. Communicates over the group.

        `digest` is the checksum of these samples, and 0 if this rank has none.
        """
        note, self._note = self._note, None
        if note is None or self._group is None:
            return
        digests = self._sum(*(digest if rank == self._dp_rank else 0 for rank in range(self._dp_size)))
        if len({digest for digest in digests if digest}) > 1 and self._dp_rank == 0:
            note(
                f"data-parallel ranks read different first samples of {type(self._dataset).__name__}: unless they are"
                " random, the stream is split by rank and shardwise splits it again, so that samples are lost; return"
                " the same stream on every rank"
            )

    def _sum(self, *values: int) -> tuple[int, ...]:
        """Return the sums of `values` over data-parallel ranks. Communicates over the group."""
        if self._group is None:
            return values
        total = torch.tensor(values)
        dist.all_reduce(total, group=self._group)
        return tuple(total.tolist())


@contextmanager
def preserved(dataset: Any) -> Iterator[Any]:
    """Yield a dataset to iterate over, and set it to its present state afterwards if it has states.

    Another iteration in this process then begins at the same sample: a training after `plan`, or a second training.
    """
    if not _has_state(dataset):
        yield dataset
        return
    state = copy.deepcopy(_first_state(dataset))
    try:
        yield dataset
    finally:
        dataset.load_state_dict(state)


def _has_state(dataset: Any) -> bool:
    return callable(getattr(dataset, "state_dict", None)) and callable(getattr(dataset, "load_state_dict", None))


def check_not_split(name: str, dataset: Any) -> None:
    """Raise DataError if a dataset of Hugging Face is one rank's part of a stream."""
    part = getattr(dataset, "_distributed", None)
    if part is not None and part.world_size > 1:
        raise DataError(
            f"{name} is part {part.rank} of {part.world_size} of a stream, which shardwise would split again",
            code="data.stream-split",
            fix="pass the dataset without split_dataset_by_node",
        )


def _first_state(dataset: Any) -> Any:
    """Return the state at which the next iteration begins.

    A dataset of Hugging Face begins at the state that was loaded last, or at its start if that is None, whereas its
    `state_dict` is that of its last iteration.
    """
    if hasattr(dataset, _LOADED_STATE):
        return getattr(dataset, _LOADED_STATE)
    return dataset.state_dict()


def _encoded(dataset: Any, state: Any) -> str:
    """Return a state of a dataset as JSON, which also copies it."""
    try:
        return msgspec.json.encode(state).decode()
    except (TypeError, ValueError) as error:
        raise DataError(
            f"the state of {type(dataset).__name__} cannot be stored as JSON ({error})",
            code="data.stream-state-not-json",
            fix="return a dict of numbers, texts, lists and dicts from state_dict",
        ) from None


def _check_not_empty(index: int) -> None:
    if index == 0:
        raise DataError(
            "the training IterableDataset yielded no samples",
            code="data.no-samples",
            fix="return a dataset that yields at least one sample per data-parallel rank",
        )


def _too_few_samples() -> DataError:
    return DataError(
        "the training IterableDataset yielded fewer samples than the number of data-parallel ranks",
        code="data.too-few-samples",
        fix="use fewer data-parallel ranks, or a larger dataset",
    )


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
        samples = self._samples()
        if worker is None:
            return samples
        return self._micro_batches_of(samples, worker.id, worker.num_workers)

    def _samples(self) -> Iterator[Any]:
        return islice(_whole_stream(self._dataset), self._dp_rank, None, self._dp_size)

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


# Checksums of samples: a sum over samples, so that it depends neither on their order nor on the ranks that read them.


class _FirstSample(NamedTuple):
    sample: Any
    head: int
    """Checksum of the first samples of the stream, one for each data-parallel rank."""


class _Digested(NamedTuple):
    collated: Collated
    digest: int
    """Sum of the checksums of the samples."""
    head: int
    """That of `_FirstSample`; 0 for other batches than the first."""


class _DigestedShare(StreamShare):
    """The samples of one rank, the first of them with the checksum of the first samples of all ranks."""

    def _samples(self) -> Iterator[Any]:
        stream = _whole_stream(self._dataset)
        head = list(islice(stream, self._dp_size))
        own = chain(head[self._dp_rank :][:1], islice(stream, self._dp_rank, None, self._dp_size))
        for sample in islice(own, 1):
            yield _FirstSample(sample, sum(map(sample_digest, head)))
        yield from own


class _DigestedCollate:
    """Collates samples and returns checksums beside the batch."""

    def __init__(self, collate: Callable[[list[Any]], Any] | None) -> None:
        self._collate = CountedCollate(collate)

    def __call__(self, samples: list[Any]) -> _Digested:
        head = 0
        if isinstance(samples[0], _FirstSample):
            first, head = samples[0]
            samples = [first, *samples[1:]]
        digest = sum(map(sample_digest, samples))
        return _Digested(self._collate(samples), digest, head)


def sample_digest(sample: Any) -> int:
    """Return a checksum of a sample: of the first bytes of its tensors and arrays, and of its numbers and texts."""
    value = 0
    for tensor in tensors(sample):
        value = zlib.crc32(_first_bytes(tensor.detach()), zlib.crc32(repr(tensor.shape).encode(), value))
    for leaf in non_tensors(sample):
        value = zlib.crc32(_leaf_bytes(leaf), value)
    return value


def _first_bytes(tensor: torch.Tensor) -> bytes:
    if tensor.layout is not torch.strided:
        return b""
    first = tensor.reshape(-1)[: _DIGEST_BYTES // tensor.element_size()].cpu()
    return first.contiguous().view(torch.uint8).numpy().tobytes()


def _leaf_bytes(leaf: Any) -> bytes:
    """Return bytes of a number, text or array; of other objects only their type, since their text may be an address."""
    if isinstance(leaf, np.ndarray) and leaf.dtype != object:
        return leaf.reshape(-1)[: _DIGEST_BYTES // max(1, leaf.itemsize)].tobytes()
    if isinstance(leaf, str | bytes | bool | int | float | complex | np.generic):
        return repr(leaf).encode()
    return type(leaf).__name__.encode()
