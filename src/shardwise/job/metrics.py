"""Ready-made metrics for evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.errors import JobError
from shardwise.job.losses import (
    IGNORE,
    Metric,
    count_labels,
    count_next_labels,
    labels_of,
    logits_of,
    next_labels,
    target_of,
)


def _correct_rows(output: Any, batch: Any) -> Any:
    if not isinstance(batch, Mapping):
        return _num_correct(logits_of(output), target_of(batch, "accuracy"))
    labels = labels_of(batch)
    if labels.ndim > 1:
        raise JobError(
            f'accuracy reads one class per row, but batch["labels"] has shape {list(labels.shape)}',
            code="loss.labels-per-token",
            fix="use sw.metrics.next_token_accuracy for decoders, or sw.metrics.label_accuracy for masked tokens",
        )
    return _num_correct(logits_of(output), labels)


def _correct_tokens(output: Any, batch: Any) -> Any:
    return _num_correct(output, target_of(batch, "token_accuracy"))


def _count_tokens(batch: Any) -> int:
    return int((target_of(batch, "token_accuracy") != IGNORE).sum())


def _correct_labels(output: Any, batch: Any) -> Any:
    return _num_correct(logits_of(output), labels_of(batch))


def _correct_next_labels(output: Any, batch: Any) -> Any:
    return _num_correct(*next_labels(output, batch))


def _num_correct(logits: Any, target: Any) -> Any:
    return (logits.argmax(-1) == target).sum()


accuracy = Metric(sum=_correct_rows)
"""Fraction of rows whose highest logit is the target's: the last entry of a tuple, or batch["labels"] of a dict."""

token_accuracy = Metric(sum=_correct_tokens, count=_count_tokens)
"""Fraction of tokens whose highest logit is that of the target in a tuple batch; targets of -100 are ignored."""

label_accuracy = Metric(sum=_correct_labels, count=count_labels)
"""Fraction of batch["labels"] (classes, masked tokens) that have the highest logit, as counted by sw.losses.labels."""

next_token_accuracy = Metric(sum=_correct_next_labels, count=count_next_labels)
"""Fraction of next tokens that have the decoder's highest logit, as counted by sw.losses.next_token."""
