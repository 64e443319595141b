"""Losses and metrics as a sum over a batch and the count it is divided by."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from shardwise.errors import JobError

Count = Callable[[Any], Any] | Literal["samples"]


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A mean over a dataset: the sum over a batch, and what it counts.

    `sum(output, batch)` returns a scalar tensor, the plain sum over all rows of the batch.
    `count(batch)` returns how much that sum covers (tokens that are not padding, or the sum of their weights: a number
    that need not be whole); it never sees the output, so that the count of all ranks is known before the forward
    pass. "samples" counts rows and needs no communication.
    """

    sum: Callable[[Any, Any], Any]
    count: Count = "samples"

    def __post_init__(self) -> None:
        if not callable(self.sum):
            raise JobError(
                f"{type(self).__name__}.sum is {self.sum!r}",
                code="loss.sum-not-callable",
                fix="give a function (output, batch) -> scalar",
            )
        if self.count != "samples" and not callable(self.count):
            raise JobError(
                f"{type(self).__name__}.count is {self.count!r}",
                code="loss.count-not-callable",
                fix='give a function (batch) -> number, or "samples"',
            )

    def sum_of(self, output: Any, batch: Any) -> Any:
        """Return the sum over a batch, checked: a scalar tensor; of a metric a number will do too."""
        total = self.sum(output, batch)
        if getattr(total, "ndim", None) == 0:
            return total
        if isinstance(total, int | float) and not isinstance(self, Loss):  # nothing back-propagates from a metric
            return total
        shape = getattr(total, "shape", None)
        returned = type(total).__name__ if shape is None else f"a tensor of shape {list(shape)}"
        raise JobError(
            f"{type(self).__name__}.sum returned {returned} where a scalar tensor is expected",
            code="loss.sum-not-scalar",
            fix='return the sum over all rows: reduction="sum", or .sum() at the end',
        )

    def count_of(self, batch: Any, rows: int) -> float:
        """Return the count of a batch whose real rows are `rows`: an int where the job gives one, never rounded."""
        if isinstance(self.count, str):
            return rows
        counted = self.count(batch)
        shape = getattr(counted, "shape", None)
        number = counted.item() if shape is not None and math.prod(shape) == 1 else counted
        if not isinstance(number, int | float) or not 0 <= number < math.inf:
            what = f"a value of shape {list(shape)}" if shape else repr(number)
            raise JobError(
                f"{type(self).__name__}.count returned {what}",
                code="loss.count-not-number",
                fix="return one number per batch, 0 or more: what the sum over its rows is divided by",
            )
        return number


@dataclass(frozen=True, kw_only=True)
class Loss(Metric):
    """What training minimises: `sum / count` over the global batch, whatever the number of ranks."""

    by_row: bool = True
    """Whether outputs have one entry per row, so that filler rows can be cut off before the sum.

    False for models that return a finished mean: they always get exactly the real rows.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if getattr(self.sum, "reduction", "sum") != "sum":
            raise JobError(
                f"Loss.sum is {self.sum!r}, which takes the {self.sum.reduction} over a batch",  # type: ignore[attr-defined]
                code="loss.sum-is-mean",
                fix="give sw.losses.cross_entropy, or sw.Loss.from_mean(lambda output, batch: loss(output, batch[-1]))",
            )

    @classmethod
    def from_mean(cls, mean: Callable[[Any, Any], Any], count: Count = "samples") -> Loss:
        """Return the loss whose mean over a batch is `mean(output, batch)`, as most loss functions give it.

        `count(batch)` is what that mean divides by: "samples", its rows, or a function, such as one that counts the
        targets that are not ignored.
        """

        def total(output: Any, batch: Any) -> Any:
            counted = loss.count_of(batch, _num_rows(batch))
            value = mean(output, batch)
            if not counted and hasattr(value, "nan_to_num"):
                value = value.nan_to_num()  # the mean over nothing
            return value * counted

        loss = cls(sum=total, count=count)
        return loss


def _num_rows(batch: Any) -> int:
    """Return the rows of a batch: the length of its first array."""
    shape = getattr(batch, "shape", None)
    if shape:
        return int(shape[0])
    parts: list[Any] = []
    if isinstance(batch, Mapping):
        parts = list(batch.values())
    elif isinstance(batch, list | tuple):
        parts = list(batch)
    return next((rows for rows in map(_num_rows, parts) if rows), 0)
