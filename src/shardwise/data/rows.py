"""Batches as trees of tensors: select, pad and move their rows; slices of sequences for context-parallel ranks.

Which tensors of a tree hold one entry per row is decided by origin, not by one length: a table that happens to be as
long as one micro-batch is not a row tensor. Of a batch, row tensors are those whose length follows the number of
samples (`CountedCollate`); of a model's output, those computed from the batch (`OutputRows`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn import functional
from torch.utils.data import default_collate

from shardwise.errors import DataError, JobError, PlanError
from shardwise.job.generators import untouched_generators
from shardwise.job.losses import IGNORE

if TYPE_CHECKING:
    from shardwise.job import Job, Loss, Metric


def map_tensors(fn: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Apply `fn` to every tensor in nested dicts, lists, tuples and dataclasses; leave the rest alone."""
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
    """Every tensor of a tree, in order."""
    found: list[torch.Tensor] = []
    map_tensors(found.append, value)
    return found


def others(value: Any) -> list[Any]:
    """Every leaf of a tree that is neither a tensor nor None, in order."""
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
    return [leaf for item in items for leaf in others(item)]


def num_rows(batch: Any) -> int:
    """Rows of a batch: the first dimension of its first tensor that has one."""
    for tensor in tensors(batch):
        if tensor.ndim:
            return int(tensor.shape[0])
    raise DataError(
        f"a batch of type {type(batch).__name__} holds no tensor",
        code="data.batch-without-tensor",
        fix="collate samples into tensors",
    )


RowMarks = tuple[bool, ...]
"""For each tensor of a tree, in order: whether its first dimension counts rows."""


def mark_rows(value: Any, rows: int) -> RowMarks:
    """Mark the tensors of a tree that are as long as there are rows."""
    return tuple(_has_rows(tensor, rows) for tensor in tensors(value))


def settle_marks(marks: RowMarks | None, value: Any, rows: int) -> RowMarks:
    """Return the marks of a tree, less those of tensors that are not as long as there are rows; None: by length."""
    by_length = mark_rows(value, rows)
    if marks is None or len(marks) != len(by_length):
        return by_length
    return tuple(known and fits for known, fits in zip(marks, by_length, strict=True))


def map_rows(fn: Callable[[torch.Tensor], Any], value: Any, marks: RowMarks) -> Any:
    """Apply `fn` to the marked tensors of a tree."""
    each = iter(marks)
    return map_tensors(lambda tensor: fn(tensor) if next(each) else tensor, value)


def cut_rows(value: Any, rows: int, filled: int, marks: RowMarks | None = None) -> Any:
    """Keep the first `rows` of every row tensor: those marked or, without marks, those with `filled` rows."""
    return map_rows(lambda tensor: tensor[:rows], value, settle_marks(marks, value, filled))


def cut_output(output: Any, rows: int, filled: int, marks: RowMarks | None = None) -> Any:
    """Keep the first `rows` of a model's output; refuse one in which filler rows cannot be told from real ones."""
    marks = settle_marks(marks, output, filled)
    if not any(marks):
        raise JobError(
            f"a short step was filled to {filled} rows, and the model's output has no tensor with as many",
            code="model.output-without-rows",
            fix="return tensors of shape [rows, ...], or give Loss(..., by_row=False)",
        )
    return cut_rows(output, rows, filled, marks)


def fill_rows(value: Any, rows: int, filled: int, marks: RowMarks | None = None) -> Any:
    """Repeat the `rows` of every row tensor until there are `filled`; without marks, of those with `rows` rows."""
    order = torch.arange(filled) % rows
    return map_rows(lambda tensor: tensor[order], value, settle_marks(marks, value, rows))


def move(value: Any, device: torch.device, float_dtype: torch.dtype | None = None) -> Any:
    """Move every tensor to `device` without waiting; floating-point ones also to `float_dtype` if given."""

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        dtype = float_dtype if tensor.is_floating_point() else None
        return tensor.to(device, dtype, non_blocking=True)

    return map_tensors(moved, value)


def _has_rows(tensor: torch.Tensor, rows: int) -> bool:
    return tensor.ndim > 0 and tensor.shape[0] == rows


# Collating with a count: how many samples a batch holds, and which of its tensors have one entry for each.


class Collated(NamedTuple):
    """A batch with what only its collation knows; travels from DataLoader workers, pinned where asked."""

    batch: Any
    rows: int
    """Samples it was made of, whatever the length of its first tensor (which may hold nodes, or packed tokens)."""
    marks: RowMarks | None
    """Which of its tensors hold rows; None where only their length tells."""


class CountedCollate:
    """Collates samples as the job does, and marks row tensors by origin.

    A tensor holds rows if its length follows the number of samples: it is as long as the batch, and has length 1 when
    the first sample is collated alone. That second collation happens once per process, with all generators restored.
    """

    def __init__(self, collate: Callable[[list[Any]], Any] | None = None) -> None:
        self._collate = collate or stack_samples
        self._marks: RowMarks | None = None

    def __call__(self, samples: list[Any]) -> Collated:
        """Return the batch of `samples`, counted and marked."""
        batch = self._collate(samples)
        if self._marks is None and len(samples) > 1:
            alone = self._marks_of_one(samples[0])
            together = mark_rows(batch, len(samples))
            same = alone is not None and len(alone) == len(together)
            self._marks = tuple(map(all, zip(alone or (), together, strict=True))) if same else together
        return Collated(batch, len(samples), self._marks)

    def _marks_of_one(self, sample: Any) -> RowMarks | None:
        """Return the marks of a batch of one sample; None where the job's collate cannot make one."""
        with untouched_generators():
            try:
                return mark_rows(self._collate([sample]), 1)
            except Exception:  # noqa: BLE001 - user code, asked for a batch it may never have to make
                return None


def stack_samples(samples: list[Any]) -> Any:
    """What torch's default_collate makes of samples; for tuples of tensors without its look at every type."""
    first = samples[0]
    if type(first) is tuple and all(type(value) is torch.Tensor for value in first):
        return [torch.stack(values) for values in zip(*samples, strict=True)]
    return default_collate(samples)


# Slices of sequences: each context-parallel rank's own tokens of a batch that all of them have read.


TOKENS = 1
"""The dimension of [rows, tokens, ...] that is cut."""


def check_token_loss(job: Job) -> None:
    """Refuse a job whose loss or metrics are not sums over tokens, or whose masks know no slices."""
    for name, measure in {"loss": job.loss, **job.metrics}.items():
        if isinstance(measure.count, str):
            raise PlanError(
                f"cp cuts sequences, and the job's {name} counts samples, not tokens",
                code="support.cp-loss-by-sample",
                fix="use a loss by token such as sw.losses.token_cross_entropy, or cp 1",
            )
    if job.masks == "keyed":
        raise PlanError(
            "keyed masks do not support context parallelism, which splits sequences",
            code="support.cp-keyed-masks",
            fix="use cp 1, or --set masks=drawn",
        )


@dataclass(frozen=True, kw_only=True)
class TokenCut:
    """Cuts batches on the host into slices of equal length along their tokens; all ranks cut alike."""

    index: int
    """Which slice is this rank's."""
    size: int
    loss: Loss
    metrics: Mapping[str, Metric]

    def __call__(self, batch: Any) -> Any:
        """Return this rank's slice of every tensor [rows, tokens, ...]; refuses what cannot be cut rightly.

        Where the loss shifts labels by one position they reach one token further, so that none is lost between two
        slices. Where the model computes its own loss, the batch also says what share of the mean its slice is.
        """
        length = _slice_length(batch, self.size)
        given = batch if self.loss.by_row else _with_next_labels(batch)
        for reach in (0, 1) if _token_labels(batch) is not None else (0,):
            slices = [_slice(given, index, length, reach=reach) for index in range(self.size)]
            if not self.loss.by_row or _adds_up(self.loss, batch, slices):
                self._check_metrics(batch, slices)
                return slices[self.index]
        raise JobError(
            "cp cuts sequences, and the loss counts more on whole ones than on their slices",
            code="support.cp-loss-whole-sequences",
            fix="give a target for each token (sw.losses.token_cross_entropy, next_token), or use cp 1",
        )

    def _check_metrics(self, batch: Any, slices: list[Any]) -> None:
        for name, metric in self.metrics.items():
            if not _adds_up(metric, batch, slices):
                raise JobError(
                    f"cp cuts sequences, and metric {name} counts more on whole ones than on their slices",
                    code="support.cp-metric-whole-sequences",
                    fix="give a metric by token, or use cp 1",
                )


def _slice_length(batch: Any, size: int) -> int:
    """Return the tokens of a slice; refuses batches that cannot be cut."""
    lengths = {int(tensor.shape[TOKENS]) for tensor in tensors(batch) if tensor.ndim > TOKENS}
    if len(lengths) != 1:
        raise DataError(
            f"cp cuts dimension 1 of every tensor of a batch, and their sizes there are {sorted(lengths)}",
            code="data.cp-unequal-lengths",
            fix="give tensors [rows, tokens, ...] with one number of tokens, or use cp 1",
        )
    (tokens,) = lengths
    if tokens % size or tokens < 2 * size:
        raise PlanError(
            f"sequences of {tokens} tokens do not give cp={size} equal slices of at least 2",
            code="plan.cp-sequence-not-divisible",
            fix=f"use sequences of {max(2 * size, tokens + -tokens % size)} tokens, or another cp",
        )
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if mask is not None and not mask.all():
        raise DataError(
            "a batch masks tokens by attention_mask, and cp attends without a mask",
            code="support.cp-attention-mask",
            fix="pack sequences to one length and leave attention_mask out, or use cp 1",
        )
    return tokens // size


def _slice(batch: Any, index: int, length: int, *, reach: int = 0) -> Any:
    """Return one slice; labels `reach` tokens further, ignored ones beyond the end."""

    def cut(tensor: torch.Tensor, more: int = 0) -> torch.Tensor:
        return tensor.narrow(TOKENS, index * length, length + more).contiguous()

    sliced = map_tensors(lambda tensor: cut(tensor) if tensor.ndim > TOKENS else tensor, batch)
    if reach:
        sliced["labels"] = cut(functional.pad(batch["labels"], (0, reach), value=IGNORE), reach)
    return sliced


def _adds_up(measure: Metric, batch: Any, slices: list[Any]) -> bool:
    """Whether a measure counts on all slices together what it counts on the whole: what it adds up is by token."""
    return math.isclose(measure.count_of(batch, 0), sum(measure.count_of(part, 0) for part in slices))


def _token_labels(batch: Any) -> torch.Tensor | None:
    """Return batch["labels"] if they are [rows, tokens]."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    return labels if labels is not None and labels.ndim > TOKENS else None


def _with_next_labels(batch: Any) -> dict[str, Any]:
    """Add what transformers' loss of a decoder needs to be a share of the whole mean."""
    labels = _token_labels(batch)
    if labels is None:
        raise JobError(
            "cp cuts sequences, and the model computes a loss of its own from no labels by token in the batch",
            code="support.cp-loss-without-labels",
            fix="return logits and give sw.losses.token_cross_entropy, or use cp 1",
        )
    following = functional.pad(labels, (0, 1), value=IGNORE)[:, 1:]
    return {**batch, "shift_labels": following, "num_items_in_batch": (following != IGNORE).sum()}
