"""Ready-made losses: batches are (inputs..., target) tuples, or dicts for models that compute their own loss."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardwise.errors import JobError
from shardwise.job.loss import Loss

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

IGNORE = -100
"""Targets with this value count for nothing, as in torch."""


def _class_sum(output: Tensor, batch: Any) -> Tensor:
    import torch  # found in sys.modules: 0.1 us, where importing a name from a submodule costs 1 us

    return torch.nn.functional.cross_entropy(output, batch[-1], reduction="sum")


def _token_sum(output: Tensor, batch: Any) -> Tensor:
    import torch

    return torch.nn.functional.cross_entropy(
        output.flatten(0, 1), batch[-1].flatten(), ignore_index=IGNORE, reduction="sum"
    )


def count_tokens(batch: Any) -> int:
    """Number of targets that are not ignored."""
    return int((batch[-1] != IGNORE).sum())


def _squared_sum(output: Tensor, batch: tuple[Tensor, ...]) -> Tensor:
    return (output - batch[-1]).square().sum()


def _element_count(batch: Any) -> int:
    return int(batch[-1].numel())


cross_entropy = Loss(sum=_class_sum)
"""One class per row: output [rows, classes], target [rows]."""

token_cross_entropy = Loss(sum=_token_sum, count=count_tokens)
"""One class per token: output [rows, length, vocabulary], target [rows, length], -100 ignored."""

squared_error = Loss(sum=_squared_sum, count=_element_count)
"""Mean over all elements of the target."""


def returned_by_model(count: Callable[[Any], Any]) -> Loss:
    """Accept a model that returns its own mean loss (a scalar, or an output with `.loss`).

    `count(batch)` must say how many things that mean covers, or ranks with uneven batches could not be weighed.
    """

    def total(output: Any, batch: Any) -> Any:
        mean = output if getattr(output, "ndim", None) == 0 else _loss_of(output)
        number = int(count(batch))
        return mean * number if number else mean.nan_to_num() * 0  # a mean over nothing is NaN

    return Loss(sum=total, count=count, by_row=False)


def _loss_of(output: Any) -> Any:
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if loss is None:
        raise JobError(
            f"the model returned {type(output).__name__} without a loss",
            fix="return a scalar or an object with .loss (transformers needs labels in the batch)",
        )
    return loss
