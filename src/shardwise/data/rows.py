"""Batches as trees of tensors: select, pad and move their rows, and slice sequences for context-parallel ranks.

A row tensor has one entry per sample in dimension 0. The size alone does not identify it, because a lookup table can
have the size of a micro-batch by coincidence. The row tensors of a batch are those whose size follows the number of
samples (`CountedCollate`); the row tensors of a model's output are computed from the batch (`OutputRows`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn import functional
from torch.utils.data import TensorDataset, default_collate, get_worker_info

from shardwise.errors import DataError, JobError, PlanError
from shardwise.job.generators import untouched_generators
from shardwise.job.losses import IGNORE

if TYPE_CHECKING:
    from shardwise.job import Job, Loss, Metric


def map_tensors(fn: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Apply `fn` to every tensor in nested dicts, lists, tuples and dataclasses; other values are unchanged."""
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, Mapping):
        mapped = {key: map_tensors(fn, item) for key, item in value.items()}
        return mapped if type(value) is dict else type(value)(mapped)  # type: ignore[call-arg]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(fn, item) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(fn, item) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **{name: map_tensors(fn, item) for name, item in fields.items()})
    return value


def tensors(value: Any) -> list[torch.Tensor]:
    """Return all tensors of a nested value, in order."""
    found: list[torch.Tensor] = []
    map_tensors(found.append, value)
    return found


def non_tensors(value: Any) -> list[Any]:
    """Return all leaves of a nested value that are neither tensors nor None, in order."""
    if value is None or isinstance(value, torch.Tensor):
        return []
    if isinstance(value, Mapping):
        items = list(value.values())
    elif isinstance(value, list | tuple):
        items = list(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = [getattr(value, field.name) for field in dataclasses.fields(value)]
    else:
        return [value]
    return [leaf for item in items for leaf in non_tensors(item)]


def num_rows(batch: Any) -> int:
    """Return the number of rows of a batch: the size of dimension 0 of its first tensor that is not a scalar."""
    for tensor in tensors(batch):
        if tensor.ndim:
            return int(tensor.shape[0])
    raise DataError(
        f"a batch of type {type(batch).__name__} must contain a tensor that is not a scalar",
        code="data.batch-without-tensor",
        fix="return tensors of shape [rows, ...] from the collate function",
    )


RowMarks = tuple[bool, ...]
"""Whether each tensor of a nested value, in order, is a row tensor."""


def mark_rows(value: Any, rows: int) -> RowMarks:
    """Return marks of the tensors in a nested value whose dimension 0 has the size `rows`."""
    return tuple(_has_rows(tensor, rows) for tensor in tensors(value))


def settle_marks(marks: RowMarks | None, value: Any, rows: int) -> RowMarks:
    """Return `marks` restricted to tensors with `rows` rows; if `marks` is None, mark all tensors with `rows` rows."""
    by_length = mark_rows(value, rows)
    if marks is None or len(marks) != len(by_length):
        return by_length
    return tuple(known and fits for known, fits in zip(marks, by_length, strict=True))


def map_rows(fn: Callable[[torch.Tensor], Any], value: Any, marks: RowMarks) -> Any:
    """Apply `fn` to the marked tensors of a nested value; other tensors are unchanged."""
    each = iter(marks)
    return map_tensors(lambda tensor: fn(tensor) if next(each) else tensor, value)


def drop_padding_rows(value: Any, rows: int, filled: int, marks: RowMarks | None = None) -> Any:
    """Truncate the marked tensors to `rows` rows; without marks, truncate the tensors with `filled` rows."""
    return map_rows(lambda tensor: tensor[:rows], value, settle_marks(marks, value, filled))


def drop_padding_outputs(output: Any, rows: int, filled: int, marks: RowMarks | None = None) -> Any:
    """Truncate a model's output to `rows` rows; raise JobError if no tensor has `filled` rows."""
    marks = settle_marks(marks, output, filled)
    if not any(marks):
        raise JobError(
            f"a short micro-batch was padded to {filled} rows, but no tensor of the model's output has {filled} rows",
            code="model.output-without-rows",
            fix="return tensors of shape [rows, ...], or set Loss(..., by_row=False)",
        )
    return drop_padding_rows(output, rows, filled, marks)


def fill_rows(value: Any, rows: int, filled: int, marks: RowMarks | None = None) -> Any:
    """Pad the marked tensors to `filled` rows by repetition; without marks, pad the tensors with `rows` rows."""
    order = torch.arange(filled) % rows
    return map_rows(lambda tensor: tensor[order], value, settle_marks(marks, value, rows))


def move(value: Any, device: torch.device, float_dtype: torch.dtype | None = None) -> Any:
    """Move every tensor to `device` asynchronously, and floating-point tensors to `float_dtype` if it is set."""

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        dtype = float_dtype if tensor.is_floating_point() else None
        return tensor.to(device, dtype, non_blocking=True)

    return map_tensors(moved, value)


def _has_rows(tensor: torch.Tensor, rows: int) -> bool:
    return tensor.ndim > 0 and tensor.shape[0] == rows


# Collation that also returns the number of samples of a batch and its row tensors.


class Collated(NamedTuple):
    """A batch with its number of samples and row marks, as DataLoader workers return it."""

    batch: Any
    rows: int
    """Number of samples, which may differ from the length of the first tensor (graph nodes or packed tokens)."""
    marks: RowMarks | None
    """Which tensors contain rows; None if they are identified by their length."""


class CountedCollate:
    """Collates samples with the job's collate function and marks the tensors that contain rows.

    A tensor contains rows if its length follows the number of samples: it has the length of the batch, and length 1 if
    the first sample is collated alone. The second collation happens once per process and restores all generators.
    """

    def __init__(self, collate: Callable[[list[Any]], Any] | None = None) -> None:
        self._collate = collate or stack_samples
        self._marks: RowMarks | None = None

    def __call__(self, samples: list[Any]) -> Collated:
        """Return the batch of `samples` with its number of samples and row marks."""
        batch = self._collate(samples)
        if self._marks is None and len(samples) > 1:
            single = self._marks_of_one(samples[0])
            self._marks = mark_rows(batch, len(samples))
            if single is not None and len(single) == len(self._marks):
                self._marks = tuple(map(all, zip(single, self._marks, strict=True)))
        return Collated(batch, len(samples), self._marks)

    def gather(self, tensors: tuple[torch.Tensor, ...], ids: list[int]) -> Collated:
        """Return the rows `ids` of `tensors` as a batch, with their number and the row marks of an earlier call."""
        rows = torch.tensor(ids)
        return Collated([tensor.index_select(0, rows) for tensor in tensors], len(ids), self._marks)

    def row_tensors(self, dataset: Any) -> tuple[torch.Tensor, ...] | None:
        """Return the tensors of a TensorDataset whose rows `gather` can index; None for any other dataset.

        One index_select per tensor returns the same batch as stacking its samples, which costs 3 us per sample.
        """
        if self._collate is not stack_samples or type(dataset) is not TensorDataset:
            return None
        for tensor in dataset.tensors:
            is_plain = type(tensor) is torch.Tensor and tensor.device.type == "cpu" and tensor.layout is torch.strided
            if not is_plain or not tensor.is_contiguous() or tensor.requires_grad:
                return None
        return dataset.tensors

    def _marks_of_one(self, sample: Any) -> RowMarks | None:
        """Return the marks of a batch of one sample; None if the job's collate function raises for it."""
        with untouched_generators():
            try:
                return mark_rows(self._collate([sample]), 1)
            except Exception:  # noqa: BLE001 - user code may not support a batch of one sample
                return None


def stack_samples(samples: list[Any]) -> Any:
    """Collate like torch's default_collate, with a faster path for tuples of tensors outside of DataLoader workers."""
    first = samples[0]
    if get_worker_info() is not None:
        return default_collate(samples)  # which stacks tensors in shared memory: images need one copy less
    if type(first) is tuple and all(type(value) is torch.Tensor for value in first):
        return [torch.stack(values) for values in zip(*samples, strict=True)]
    return default_collate(samples)


# Slices of sequences for context-parallel ranks, which all read the same batch and keep their own tokens.


TOKENS = 1
"""The dimension of [rows, tokens, ...] that is sharded."""


def check_token_loss(job: Job) -> None:
    """Raise PlanError if context parallelism does not support the job's loss, metrics or counter-based dropout."""
    for name, measure in {"loss": job.loss, **job.metrics}.items():
        if isinstance(measure.count, str):
            raise PlanError(
                f"context parallelism requires a per-token {name}, but the job's {name} is per sample",
                code="support.cp-loss-by-sample",
                fix=f"use a per-token {name} such as sw.losses.token_cross_entropy, or set cp=1",
            )
    if job.masks == "keyed":
        raise PlanError(
            "counter-based dropout (masks=keyed) does not support context parallelism, which splits sequences",
            code="support.cp-keyed-masks",
            fix="set cp=1, or pass --set masks=drawn",
        )


@dataclass(frozen=True, kw_only=True)
class TokenShard:
    """Splits batches on the host into equal slices along the token dimension, and returns this rank's slice."""

    index: int
    """Index of this rank's slice."""
    size: int
    loss: Loss
    metrics: Mapping[str, Metric]

    def __call__(self, batch: Any) -> Any:
        """Return this rank's slice of every tensor [rows, tokens, ...]; raise JobError if the loss cannot be split.

        If the loss shifts labels by one position, label slices include one more token, so that no label is lost between
        two slices. If the model computes its own loss, the slice also contains the loss normalizer of the whole batch.
        """
        length = _slice_length(batch, self.size)
        source = batch if self.loss.by_row else _with_next_labels(batch)
        num_extras = (0,) if _token_labels(batch) is None else (0, 1)
        for num_extra in num_extras:
            slices = [_slice(source, index, length, num_extra_labels=num_extra) for index in range(self.size)]
            if not self.loss.by_row or _adds_up(self.loss, batch, slices):
                self._check_metrics(batch, slices)
                return slices[self.index]
        raise JobError(
            "context parallelism splits sequences, but the loss counts more tokens on whole sequences than on slices",
            code="support.cp-loss-whole-sequences",
            fix="provide a target for each token (sw.losses.token_cross_entropy, next_token), or set cp=1",
        )

    def _check_metrics(self, batch: Any, slices: list[Any]) -> None:
        for name, metric in self.metrics.items():
            if not _adds_up(metric, batch, slices):
                raise JobError(
                    f"context parallelism splits sequences, but metric {name} counts more tokens on whole sequences"
                    " than on slices",
                    code="support.cp-metric-whole-sequences",
                    fix="use a metric per token, or set cp=1",
                )


def _slice_length(batch: Any, size: int) -> int:
    """Return the number of tokens of a slice; raise if the batch cannot be split into equal slices."""
    lengths = {int(tensor.shape[TOKENS]) for tensor in tensors(batch) if tensor.ndim > TOKENS}
    if len(lengths) != 1:
        raise DataError(
            f"context parallelism splits dimension 1 of every tensor, but its sizes differ: {sorted(lengths)}",
            code="data.cp-unequal-lengths",
            fix="return tensors [rows, tokens, ...] with the same number of tokens, or set cp=1",
        )
    (tokens,) = lengths
    if tokens % size or tokens < 2 * size:
        raise PlanError(
            f"sequences of {tokens} tokens cannot be split into cp={size} equal slices of at least 2 tokens",
            code="plan.cp-sequence-not-divisible",
            fix=f"use sequences of {max(2 * size, tokens + -tokens % size)} tokens, or set a different cp",
        )
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if mask is not None and not mask.all():
        raise DataError(
            "the attention_mask of the batch masks tokens, which context parallelism does not support",
            code="support.cp-attention-mask",
            fix="pack sequences to a fixed length without attention_mask, or set cp=1",
        )
    return tokens // size


def _slice(batch: Any, index: int, length: int, *, num_extra_labels: int = 0) -> Any:
    """Return slice `index` of a batch; labels include `num_extra_labels` more tokens, padded with the ignore index."""

    def narrow(tensor: torch.Tensor, num_extra: int = 0) -> torch.Tensor:
        if tensor.ndim <= TOKENS:
            return tensor
        return tensor.narrow(TOKENS, index * length, length + num_extra).contiguous()

    sliced = map_tensors(narrow, batch)
    if num_extra_labels:
        labels = functional.pad(batch["labels"], (0, num_extra_labels), value=IGNORE)
        sliced["labels"] = narrow(labels, num_extra_labels)
    return sliced


def _adds_up(measure: Metric, batch: Any, slices: list[Any]) -> bool:
    """Return whether the token counts of a loss or metric on all slices sum to its count on the whole batch."""
    return math.isclose(measure.count_of(batch, 0), sum(measure.count_of(part, 0) for part in slices))


def _token_labels(batch: Any) -> torch.Tensor | None:
    """Return batch["labels"] if they have the shape [rows, tokens], else None."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    return labels if labels is not None and labels.ndim > TOKENS else None


def _with_next_labels(batch: Any) -> dict[str, Any]:
    """Add the shifted labels and the token count that a transformers decoder needs to compute its share of the loss."""
    labels = _token_labels(batch)
    if labels is None:
        raise JobError(
            "context parallelism requires labels [rows, tokens] in the batch if the model computes its own loss",
            code="support.cp-loss-without-labels",
            fix="return logits and use sw.losses.token_cross_entropy, or set cp=1",
        )
    following = functional.pad(labels, (0, 1), value=IGNORE)[:, 1:]
    return {**batch, "shift_labels": following, "num_items_in_batch": (following != IGNORE).sum()}
