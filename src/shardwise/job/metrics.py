"""Ready-made metrics for evaluation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardwise.job.loss import Metric
from shardwise.job.losses import IGNORE

if TYPE_CHECKING:
    from torch import Tensor


def _correct_rows(output: Tensor, batch: tuple[Tensor, ...]) -> Tensor:
    return (output.argmax(-1) == batch[-1]).sum()


def _token_count(batch: Any) -> int:
    return int((batch[-1] != IGNORE).sum())


accuracy = Metric(sum=_correct_rows)
"""Share of rows whose highest score is the target."""

token_accuracy = Metric(sum=_correct_rows, count=_token_count)
"""Share of tokens, -100 ignored, whose highest score is the target."""
