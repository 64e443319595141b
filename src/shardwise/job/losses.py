"""Losses and metrics: a sum over a batch and its normalizer, and ready-made losses for tuple and dict batches.

Functions that call torch dispatch on the type of their first argument (functools.singledispatch, 0.3 us). An engine
with its own array type registers its implementations, so that the ready-made losses work in that engine, too.
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
    """A mean over a dataset: the sum over each batch, and the count that normalizes it.

    `sum(output, batch)` returns a scalar tensor, the sum over all rows of the batch.
    `count(batch)` returns the normalizer of that sum, such as the number of tokens without padding or the sum of their
    weights. It does not depend on the output, so that the count of all ranks is known before the forward pass.
    "samples" counts rows and needs no communication.
    """

    sum: Callable[[Any, Any], Any]
    count: Count = "samples"

    def __post_init__(self) -> None:
        if not callable(self.sum):
            raise JobError(
                f"{type(self).__name__}.sum must be a function, got {self.sum!r}",
                code="loss.sum-not-callable",
                fix="pass a function (output, batch) -> scalar",
            )
        if self.count != "samples" and not callable(self.count):
            raise JobError(
                f"{type(self).__name__}.count must be a function or 'samples', got {self.count!r}",
                code="loss.count-not-callable",
                fix='pass a function (batch) -> number, or "samples"',
            )

    def sum_of(self, output: Any, batch: Any) -> Any:
        """Return the sum over a batch; raises JobError unless it is a scalar tensor or, for a metric, a number."""
        total = self.sum(output, batch)
        if getattr(total, "ndim", None) == 0:
            return total
        if isinstance(total, int | float) and not isinstance(self, Loss):  # a metric has no backward
            return total
        shape = getattr(total, "shape", None)
        returned = type(total).__name__ if shape is None else f"a tensor of shape {list(shape)}"
        raise JobError(
            f"{type(self).__name__}.sum must return a scalar tensor, got {returned}",
            code="loss.sum-not-scalar",
            fix='return the sum over all rows, with reduction="sum" or .sum()',
        )

    def count_of(self, batch: Any, rows: int) -> float:
        """Return the normalizer of a batch with `rows` samples, without padding rows; it is not rounded."""
        if isinstance(self.count, str):
            return rows
        counted = self.count(batch)
        shape = getattr(counted, "shape", None)
        number = counted.item() if shape is not None and math.prod(shape) == 1 else counted
        if not isinstance(number, int | float) or not 0 <= number < math.inf:
            returned = f"a value of shape {list(shape)}" if shape else repr(number)
            raise JobError(
                f"{type(self).__name__}.count must return a number of at least 0, got {returned}",
                code="loss.count-not-number",
                fix="return the number that the sum over the batch is divided by",
            )
        return number


@dataclass(frozen=True, kw_only=True)
class Loss(Metric):
    """The training loss, `sum / count` over the global batch, independent of the number of ranks."""

    by_row: bool = True
    """Whether outputs have one entry per row, so that padding rows can be removed before the sum.

    False for models that return a mean loss, whose batches have no padding rows.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if getattr(self.sum, "reduction", "sum") != "sum":
            raise JobError(
                f"Loss.sum must return a sum, but {self.sum!r} has reduction {self.sum.reduction!r}",  # type: ignore[attr-defined]
                code="loss.sum-is-mean",
                fix="pass sw.losses.cross_entropy, or sw.Loss.from_mean(lambda output, batch: loss(output, batch[-1]))",
            )

    @classmethod
    def from_mean(cls, mean: Callable[[Any, Any], Any], count: Count = "samples") -> Loss:
        """Return the Loss of a function `mean(output, batch)` that returns the mean over a batch.

        `count` is the normalizer of that mean: "samples", or a function of the batch, such as one that counts the
        targets that are not ignored.
        """

        def total(output: Any, batch: Any) -> Any:
            counted = loss.count_of(batch, _num_rows(batch))
            value = mean(output, batch)
            if not counted and hasattr(value, "nan_to_num"):
                value = value.nan_to_num()  # the mean of an empty batch
            return value * counted

        loss = cls(sum=total, count=count)
        return loss


def _num_rows(batch: Any) -> int:
    """Return the number of rows of a batch: the length of its first tensor."""
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
"""Targets with this value are ignored, as by default in torch."""


def target_of(batch: Any, name: str) -> Any:
    """Return the target of an (inputs..., target) batch; `name` is the loss or metric in the error for dicts."""
    if isinstance(batch, list | tuple) or not isinstance(batch, Mapping):  # isinstance of an abstract class is slow
        return batch[-1]
    kind, names = "Loss", "sw.losses.labels, or sw.losses.next_token for decoders"
    if name.endswith("accuracy"):
        kind, names = "Metric", "sw.metrics.label_accuracy, or sw.metrics.next_token_accuracy for decoders"
    fix = f"return (inputs..., target) from the dataset, or replace {name} by a sw.{kind}(sum=..., count=...)"
    if "labels" in batch:
        fix = f'use {names}, which read batch["labels"]'
    raise JobError(
        f"the batch is a dict with the keys {some_of(map(str, batch), 6)}, but {name} reads the target from the last"
        " entry of a tuple",
        code="loss.batch-is-dict",
        fix=fix,
    )


def labels_of(batch: Any) -> Any:
    """Return batch["labels"], one label or a row of labels for each sample; raises JobError if it is not a tensor."""
    try:
        found = batch["labels"]
    except (KeyError, TypeError, IndexError):
        kind = f"a {type(batch).__name__}"
        if isinstance(batch, Mapping):
            kind = f"a dict with the keys {some_of(map(str, batch), 6)}"
        raise JobError(
            f'the batch is {kind}, but the loss or metric reads batch["labels"]',
            code="loss.batch-without-labels",
            fix='return dicts with "labels" from Job.data, as dataset.rename_column("label", "labels") does',
        ) from None
    if isinstance(found, list):
        raise JobError(
            'batch["labels"] is a list of columns, because the samples of Job.data have lists of numbers',
            code="loss.labels-not-tensor",
            fix=LISTS_FIX,
        )
    return found


LISTS_FIX = 'return dataset.with_format("torch") from Job.data, or set Job(collate=transformers.default_data_collator)'
"""Fix for samples with Python lists, which torch's default_collate transposes."""


@singledispatch
def class_sum(output: Any, target: Any) -> Any:
    """Return the summed cross entropy of logits [rows, classes, ...], as torch's cross_entropy expects them."""
    import torch  # found in sys.modules: 0.1 us, where importing a name from a submodule costs 1 us

    return torch.nn.functional.cross_entropy(output, target, reduction="sum")


@singledispatch
def token_sum(logits: Any, targets: Any) -> Any:
    """Return the summed cross entropy of logits [..., classes] over all targets [...] except -100."""
    import torch

    return torch.nn.functional.cross_entropy(
        logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORE, reduction="sum"
    )


@singledispatch
def pad_ignored(labels: Any, number: int) -> Any:
    """Return labels [rows, length] with `number` ignored labels added to the end of each row."""
    import torch

    return torch.nn.functional.pad(labels, (0, number), value=IGNORE)


@singledispatch
def finite(value: Any) -> Any:
    """Return a tensor with NaN replaced by 0."""
    return value.nan_to_num()


def find_implementations(kind: type) -> None:
    """Find the implementations for one type of array now: torch.compile of torch 2.11 breaks the graph at the search.

    functools.singledispatch searches in the first call with a type, and remembers what it found.
    """
    for function in (class_sum, token_sum, pad_ignored, finite):
        function.dispatch(kind)


def _class_sum(output: Any, batch: Any) -> Any:
    return class_sum(output, target_of(batch, "cross_entropy"))


def _token_targets(output: Any, batch: Any) -> tuple[Any, Any]:
    return logits_of(output), target_of(batch, "token_cross_entropy")


def _token_sum(output: Any, batch: Any) -> Any:
    return token_sum(*_token_targets(output, batch))


def count_tokens(batch: Any) -> int:
    """Return the number of targets that are not ignored."""
    return int((target_of(batch, "token_cross_entropy") != IGNORE).sum())


def _squared_sum(output: Tensor, batch: tuple[Tensor, ...]) -> Tensor:
    target: Tensor = target_of(batch, "squared_error")
    return (output - target).square().sum()


def _element_count(batch: Any) -> int:
    return int(target_of(batch, "squared_error").numel())


cross_entropy = Loss(sum=_class_sum)
"""Cross entropy per row: output [rows, classes], target [rows]."""

token_cross_entropy = Loss(sum=_token_sum, count=count_tokens)
"""Cross entropy per token: logits [rows, length, vocabulary], target [rows, length]; -100 is ignored."""


def weighted_cross_entropy(weights: Tensor) -> Loss:
    """Return cross entropy with class weights over the global batch, as torch's cross_entropy(weight=...).

    The count is the sum of the weights of the targets, so that the mean does not depend on ranks or micro-batches.
    """

    def total(output: Tensor, batch: Any) -> Tensor:
        import torch

        return torch.nn.functional.cross_entropy(output, batch[-1], weight=weights.to(output), reduction="sum")

    def count(batch: Any) -> Tensor:
        targets = batch[-1]
        return weights.double().to(targets.device)[targets[targets != IGNORE]].sum()

    return Loss(sum=total, count=count)


squared_error = Loss(sum=_squared_sum, count=_element_count)
"""Squared error, averaged over all elements of the target."""


def count_labels(batch: Any) -> int:
    """Return the number of entries of batch["labels"] that are not ignored."""
    return int((labels_of(batch) != IGNORE).sum())


def count_next_labels(batch: Any) -> int:
    """Return the number of labels that a decoder predicts: those not ignored, without the first position."""
    return int((labels_of(batch)[:, 1:] != IGNORE).sum())


def _labels(output: Any, batch: Any) -> tuple[Any, Any]:
    return logits_of(output), labels_of(batch)


def _label_sum(output: Any, batch: Any) -> Any:
    return token_sum(*_labels(output, batch))


def _next_label_sum(output: Any, batch: Any) -> Any:
    return token_sum(*next_labels(output, batch))


def next_labels(output: Any, batch: Any) -> tuple[Any, Any]:
    """Return the logits of a decoder and, for each position, the label of the next position or the ignore index.

    Labels are padded so that all logits are used: a slice of the logits and its gradient would both be copied, which
    are gigabytes for a large vocabulary.
    """
    logits = logits_of(output)
    labels = labels_of(batch)[:, 1:]
    num_missing = logits.shape[1] - labels.shape[1]  # 0 for a context-parallel slice, which has one label more
    return logits, pad_ignored(labels, num_missing) if num_missing > 0 else labels


def without_labels(model: Any, batch: Any) -> Any:
    """Run a transformers model on a dict batch without its labels, so that only Job.loss computes a loss."""
    return model(**{name: value for name, value in batch.items() if name != "labels"})


def packed(model: Any, batch: Any) -> Any:
    """Run a transformers decoder on packed rows, whose documents it finds by position_ids that start again at 0.

    Without a cache: with one, transformers ignores the boundaries, and documents attend to each other.
    """
    tokens, position_ids, *_ = batch
    return model(input_ids=tokens, position_ids=position_ids, use_cache=False)


labels = Loss(sum=_label_sum, count=count_labels)
"""Cross entropy for transformers models: output.logits [..., classes], batch["labels"] [...]; -100 is ignored."""

next_token = Loss(sum=_next_label_sum, count=count_next_labels)
"""Next-token cross entropy for decoders: output.logits [rows, length, vocabulary], labels of the next position."""

TOKEN_LOSSES: Mapping[Loss, Callable[[Any, Any], tuple[Any, Any]]] = {
    token_cross_entropy: _token_targets,
    labels: _labels,
    next_token: next_labels,
}
"""Losses that are `token_sum` of logits and targets, with the function (output, batch) that returns these."""


def returned_by_model(count: Callable[[Any], Any]) -> Loss:
    """Return the Loss of models that return their own mean loss (a scalar, or an output with `.loss`).

    `count(batch)` returns the normalizer of that mean, which weights batches of different sizes. With a model of
    another framework it is called both with torch tensors and with that framework's arrays.
    """

    def total(output: Any, batch: Any) -> Any:
        mean = output if getattr(output, "ndim", None) == 0 else _loss_of(output)
        number = loss.count_of(batch, 0)
        return mean * number if number else finite(mean) * 0  # the mean of an empty batch is NaN

    loss = Loss(sum=total, count=count, by_row=False)
    return loss


def _loss_of(output: Any) -> Any:
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if loss is None:
        raise JobError(
            f"the model returned {type(output).__name__} without a loss",
            code="loss.model-without-loss",
            fix="return a scalar or an object with .loss (transformers models need labels in the batch)",
        )
    return loss


def logits_of(output: Any) -> Any:
    """Return the logits of a model's output: the output itself if it is a tensor, else its `logits`."""
    if hasattr(output, "flatten"):  # the output is the logits
        return output
    logits = output.get("logits") if isinstance(output, dict) else getattr(output, "logits", None)
    if not hasattr(logits, "flatten"):
        raise JobError(
            f"the model returned {type(output).__name__} without logits",
            code="loss.model-without-logits",
            fix="use a model with a head (AutoModelForCausalLM, ...), or a custom Loss(sum=..., count=...)",
        )
    return logits
