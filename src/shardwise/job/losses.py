"""Loss, a sum over a batch and the count it is divided by, and ready-made losses for tuple and dict batches.

What torch computes dispatches on the type of its first argument (functools.singledispatch, 0.3 us): an engine with
arrays of its own registers its form of each, so that a loss built on these works in that engine, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import singledispatch
from typing import TYPE_CHECKING, Any, Literal

from shardwise.errors import JobError, some_of

if TYPE_CHECKING:
    from torch import Tensor

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


IGNORE = -100
"""Targets with this value count for nothing, as in torch."""


def target_of(batch: Any, reader: str) -> Any:
    """Return the target of an (inputs..., target) batch; `reader` names the loss or metric that reads it."""
    if isinstance(batch, list | tuple) or not isinstance(batch, Mapping):  # an abstract class is slow to ask
        return batch[-1]
    fix = f"return (inputs..., target) from the dataset, or write a sw.Loss(sum=..., count=...) in place of {reader}"
    if "labels" in batch:
        fix = 'use sw.losses.labels, or sw.losses.next_token for decoders: they read batch["labels"]'
    raise JobError(
        f"the batch is a dict with the keys {some_of(map(str, batch), 6)}, and {reader} reads its target from the last"
        " entry of a tuple",
        code="loss.batch-is-dict",
        fix=fix,
    )


@singledispatch
def class_sum(output: Any, target: Any) -> Any:
    """Return the summed cross entropy of logits whose classes are the second dimension, as torch has them."""
    import torch  # found in sys.modules: 0.1 us, where importing a name from a submodule costs 1 us

    return torch.nn.functional.cross_entropy(output, target, reduction="sum")


@singledispatch
def token_sum(logits: Any, targets: Any) -> Any:
    """Return the summed cross entropy of logits [..., classes] over all targets [...] but -100."""
    import torch

    return torch.nn.functional.cross_entropy(
        logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORE, reduction="sum"
    )


@singledispatch
def finite(value: Any) -> Any:
    """Return a tensor with 0 for NaN."""
    return value.nan_to_num()


def _class_sum(output: Any, batch: Any) -> Any:
    return class_sum(output, target_of(batch, "cross_entropy"))


def _token_sum(output: Any, batch: Any) -> Any:
    return token_sum(output, target_of(batch, "token_cross_entropy"))


def count_tokens(batch: Any) -> int:
    """Number of targets that are not ignored."""
    return int((target_of(batch, "token_cross_entropy") != IGNORE).sum())


def _squared_sum(output: Tensor, batch: tuple[Tensor, ...]) -> Tensor:
    target: Tensor = target_of(batch, "squared_error")
    return (output - target).square().sum()


def _element_count(batch: Any) -> int:
    return int(target_of(batch, "squared_error").numel())


cross_entropy = Loss(sum=_class_sum)
"""One class per row: output [rows, classes], target [rows]."""

token_cross_entropy = Loss(sum=_token_sum, count=count_tokens)
"""One class per token: output [rows, length, vocabulary], target [rows, length], -100 ignored."""


def weighted_cross_entropy(weights: Tensor) -> Loss:
    """One class per row, each weighted by its class: what torch's cross_entropy(weight=...) is over the global batch.

    The count is the sum of the weights of the targets, so that neither ranks nor micro-batches change the mean.
    """

    def total(output: Tensor, batch: Any) -> Tensor:
        import torch

        return torch.nn.functional.cross_entropy(output, batch[-1], weight=weights.to(output), reduction="sum")

    def count(batch: Any) -> Tensor:
        targets = batch[-1]
        return weights.double().to(targets.device)[targets[targets != IGNORE]].sum()

    return Loss(sum=total, count=count)


squared_error = Loss(sum=_squared_sum, count=_element_count)
"""Mean over all elements of the target."""


def count_labels(batch: Any) -> int:
    """Number of entries of batch["labels"] that are not ignored."""
    return int((batch["labels"] != IGNORE).sum())


def count_next_labels(batch: Any) -> int:
    """The same for decoders, whose label at a position is what the position before it must say."""
    return int((batch["labels"][:, 1:] != IGNORE).sum())


def _label_sum(output: Any, batch: Any) -> Any:
    return token_sum(_logits_of(output), batch["labels"])


def _next_label_sum(output: Any, batch: Any) -> Any:
    labels = batch["labels"][:, 1:]  # as many as logits where they reach one further, as those of a slice of tokens do
    return token_sum(_logits_of(output)[:, : labels.shape[1]], labels)


def without_labels(model: Any, batch: Any) -> Any:
    """Run a transformers model on a dict batch without its labels, as Job.forward: only Job.loss computes a loss."""
    return model(**{name: value for name, value in batch.items() if name != "labels"})


labels = Loss(sum=_label_sum, count=count_labels)
"""One class per label, for transformers models: output.logits [..., classes], batch["labels"] [...], -100 ignored."""

next_token = Loss(sum=_next_label_sum, count=count_next_labels)
"""The same for decoders: output.logits [rows, length, vocabulary] against the labels one position on."""


def returned_by_model(count: Callable[[Any], Any]) -> Loss:
    """Accept a model that returns its own mean loss (a scalar, or an output with `.loss`).

    `count(batch)` returns how many entries that mean covers, or uneven batches of ranks could not be weighed. With a
    model of another framework it is called with batches of torch tensors and of that framework's arrays.
    """

    def total(output: Any, batch: Any) -> Any:
        mean = output if getattr(output, "ndim", None) == 0 else _loss_of(output)
        number = loss.count_of(batch, 0)
        return mean * number if number else finite(mean) * 0  # a mean over nothing is NaN

    loss = Loss(sum=total, count=count, by_row=False)
    return loss


def _loss_of(output: Any) -> Any:
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if loss is None:
        raise JobError(
            f"the model returned {type(output).__name__} without a loss",
            code="loss.model-without-loss",
            fix="return a scalar or an object with .loss (transformers needs labels in the batch)",
        )
    return loss


def _logits_of(output: Any) -> Any:
    if hasattr(output, "flatten"):  # it is the logits
        return output
    logits = output.get("logits") if isinstance(output, dict) else getattr(output, "logits", None)
    if not hasattr(logits, "flatten"):
        raise JobError(
            f"the model returned {type(output).__name__} without logits",
            code="loss.model-without-logits",
            fix="use a model with a head (AutoModelForCausalLM, ...), or a custom Loss(sum=..., count=...)",
        )
    return logits
