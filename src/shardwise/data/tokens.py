"""Slices of sequences: each context-parallel rank's own tokens of a batch that all of them have read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.nn import functional

from shardwise.data.rows import map_tensors, tensors
from shardwise.errors import DataError, JobError, PlanError
from shardwise.job.losses import IGNORE

if TYPE_CHECKING:
    import torch

    from shardwise.job import Job, Loss, Metric

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
            "cp cuts sequences, and keyed masks know no slices of a sample",
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
