"""Linear cross entropy, computed from hidden states with the logits of one chunk of tokens at a time.

The forward pass computes both gradients while it has the logits of a chunk: (softmax - one_hot(target)) times the
weight for the hidden states, and times the hidden states for the weight. Backward only multiplies them by the gradient
of the sum, which includes the loss normalizer and the loss scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwise.planner.model.forms import chunk_rows

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, kw_only=True)
class VocabularyShard:
    """This rank's shard of a vocabulary that is split over `group`."""

    group: dist.ProcessGroup
    first: int
    """The first class of the shard."""
    vocabulary: int
    """The size of the full vocabulary."""


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    ignore: int,
    shard: VocabularyShard | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Return the sum of the cross entropies of the logits `hidden @ weight.T + bias`.

    `hidden` is [..., width], `weight` [vocabulary, width], and `targets` [...]; targets equal to `ignore` do not
    contribute. `chunk` is the number of tokens per chunk. With `shard`, weight and bias are this rank's rows, the other
    arguments and the result are equal on all ranks, and the function communicates over the group of `shard`. Matrix
    products run in autocast's dtype, the rest in fp32 or wider. The result is differentiable once.
    """
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    rows = hidden.reshape(-1, hidden.shape[-1])
    chunk = chunk or chunk_rows(len(rows), weight.shape[0])
    options = _Options(dtype=dtype, ignore=ignore, chunk=chunk, shard=shard)
    total: Tensor = _LinearCrossEntropy.apply(rows, weight, bias, targets.reshape(-1), options)  # type: ignore[no-untyped-call]
    return total


@dataclass(frozen=True, kw_only=True)
class _Options:
    dtype: torch.dtype
    """The dtype of matrix products."""
    ignore: int
    chunk: int
    shard: VocabularyShard | None

    @property
    def wide(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)


class _Gradients:
    """Gradients of the summed loss, accumulated chunk by chunk; None for inputs that require no gradient."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, needs: tuple[bool, ...]) -> None:
        wide = torch.promote_types(weight.dtype, torch.float32)
        self.hidden = torch.empty_like(hidden) if needs[0] else None
        self.weight = torch.zeros_like(weight, dtype=wide) if needs[1] else None
        self.bias = torch.zeros_like(bias, dtype=wide) if bias is not None and needs[2] else None

    @property
    def all(self) -> tuple[Tensor | None, ...]:
        return self.hidden, self.weight, self.bias

    def add(self, here: slice, gradient: Tensor, x: Tensor, weight: Tensor, kept: Tensor) -> None:
        """Add the gradient of one chunk's logits; rows with `kept` = 0 do not contribute."""
        if self.hidden is not None:
            self.hidden[here] = torch.mm(gradient, weight).mul_(kept)
        if self.weight is not None:
            # Masking the narrow factor is cheap; masking the logits would cost fifty times as much.
            self.weight += torch.mm(gradient.t(), x * kept)
        if self.bias is not None:
            self.bias += torch.mm(kept.t(), gradient)[0]


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 - autograd functions accept no keyword arguments
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, options: _Options
    ) -> Tensor:
        gradients = _Gradients(hidden, weight, bias, ctx.needs_input_grad)
        losses = hidden.new_empty(len(hidden), dtype=options.wide)
        with torch.autocast(hidden.device.type, enabled=False):
            own = weight.to(options.dtype)
            for here in _chunks(len(hidden), options.chunk):
                x = hidden[here].to(options.dtype)
                kept = targets[here] != options.ignore
                losses[here], gradient = _losses(
                    _logits(x, own, bias, options.wide),
                    targets[here],
                    kept,
                    options,
                    trains=any(ctx.needs_input_grad[:3]),
                )
                if gradient is not None:
                    gradients.add(here, gradient, x, own, kept[:, None].to(options.dtype))
                del gradient  # frees it before the next chunk's logits are computed
        if gradients.hidden is not None and options.shard is not None:
            dist.all_reduce(gradients.hidden, group=options.shard.group)
        ctx.save_for_backward(*gradients.all)
        ctx.dtypes = [None if each is None else each.dtype for each in (hidden, weight, bias)]
        return losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        found = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return (*(None if each is None else _scaled(each, grad, dtype) for each, dtype in found), None, None)


def _chunks(rows: int, size: int) -> Iterator[slice]:
    return (slice(start, min(rows, start + size)) for start in range(0, rows, size))


def _logits(x: Tensor, weight: Tensor, bias: Tensor | None, wide: torch.dtype) -> Tensor:
    """Return the logits of one chunk; a CUDA matrix product returns its fp32 accumulators at no extra cost."""
    if x.is_cuda and x.dtype != wide:
        logits = torch.mm(x, weight.t(), out_dtype=wide)
    else:
        logits = torch.mm(x, weight.t()).to(wide)
    return logits if bias is None else logits.add_(bias)


def _losses(
    logits: Tensor, target: Tensor, kept: Tensor, options: _Options, *, trains: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the losses [rows] of one chunk and the gradient of their sum.

    Communicates over the group of a sharded vocabulary. Rows that are not `kept` have loss 0 and an arbitrary gradient.
    """
    log_p, place, is_mine = _log_probabilities(logits, target, kept, options)
    del logits  # releases the last reference
    at_target = log_p.gather(1, place)
    losses = _summed(torch.where(is_mine, at_target, 0), options.shard).squeeze(1).neg()
    if not trains:
        return losses, None
    gradient = torch.exp(log_p, out=torch.empty_like(log_p, dtype=options.dtype))
    gradient.scatter_(1, place, (at_target.exp() - is_mine.to(at_target.dtype)).to(options.dtype))
    return losses, gradient


def _log_probabilities(
    logits: Tensor, target: Tensor, kept: Tensor, options: _Options
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities and, as [rows, 1], the column of each target and whether this rank has that column.

    Communicates over the group of a sharded vocabulary. Ignored targets and targets on other ranks point to column 0.
    """
    if options.shard is None:
        return torch.log_softmax(logits, dim=1), torch.where(kept, target, 0)[:, None], kept[:, None]
    shard, place = options.shard, target - options.shard.first
    inside = (place >= 0) & (place < logits.shape[1])
    elsewhere = (target >= 0) & (target < shard.vocabulary) & ~inside  # targets outside the vocabulary raise
    largest = logits.amax(dim=1, keepdim=True)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=shard.group)
    logits -= largest
    logits -= _summed(logits.exp().sum(dim=1, keepdim=True), shard).log_()
    return logits, torch.where(elsewhere | ~kept, 0, place)[:, None], (kept & inside)[:, None]


def _summed(values: Tensor, shard: VocabularyShard | None) -> Tensor:
    if shard is not None:
        dist.all_reduce(values, group=shard.group)
    return values


def _scaled(gradient: Tensor, by: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a gradient times `by`, computed in fp32 or fp64: rounding `by` to bf16 would bias all gradients alike."""
    if gradient.dtype in {torch.float32, torch.float64}:
        return gradient.mul_(by).to(dtype)
    return (gradient.float() * by).to(dtype)
