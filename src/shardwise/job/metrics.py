"""Ready-made metrics for evaluation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.job.losses import Metric, count_tokens, target_of

if TYPE_CHECKING:
    from torch import Tensor


def _correct_rows(output: Tensor, batch: tuple[Tensor, ...]) -> Tensor:
    target: Tensor = target_of(batch, "accuracy")
    return (output.argmax(-1) == target).sum()


accuracy = Metric(sum=_correct_rows)
"""Share of rows whose highest score is the target."""

token_accuracy = Metric(sum=_correct_rows, count=count_tokens)
"""Share of tokens, -100 ignored, whose highest score is the target."""
