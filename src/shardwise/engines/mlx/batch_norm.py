"""Batch norm in MLX that is exact under data parallelism: over all ranks, uneven shares, none of spare rows."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx import nn

from shardwise.errors import JobError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_HALVES = (mx.float16, mx.bfloat16)


class BatchNorm(nn.BatchNorm):  # type: ignore[misc]  # MLX's classes are untyped
    """Batch norm whose statistics are in fp32 at least and cover all ranks in `group`; None covers this rank's rows."""

    group: mx.distributed.Group | None = None
    name: str = "a batch norm"
    real: mx.array | None = None
    """Whether the next input counts, a bool; None: it does. Set by `counting`."""

    def __call__(self, x: mx.array) -> mx.array:
        """Normalise; in training, communicates over `group`."""
        if not self.training:
            return super().__call__(x)  # type: ignore[no-any-return]
        if x.ndim < 2:
            raise JobError(
                f"{self.name} gets {x.ndim} dimensions",
                code="model.batch-norm-dimensions",
                fix="give it rows and channels at least",
            )
        real = mx.array(1, dtype=mx.bool_) if self.real is None else self.real
        scaled = "weight" in self
        weight, bias = (self.weight, self.bias) if scaled else (mx.ones(x.shape[-1]), mx.zeros(x.shape[-1]))
        output, mean, spread, count = _shared_norm(self.eps, self.group)(x, weight, bias, real)
        if self.track_running_stats:
            self._track(mx.stop_gradient(mean), mx.stop_gradient(spread), mx.stop_gradient(count))
        return output  # type: ignore[no-any-return]

    def _track(self, mean: mx.array, spread: mx.array, count: mx.array) -> None:
        """Move the running statistics unless nobody had a row; the variance is the unbiased one, as in MLX."""
        moved = self.momentum * (count > 0).astype(count.dtype)
        unbiased = spread / mx.maximum(count - 1, 1)
        for name, found in (("running_mean", mean), ("running_var", unbiased)):
            kept = self[name]
            self[name] = ((1 - moved) * kept + moved * found).astype(kept.dtype)


def share_batch_norms(model: nn.Module, group: mx.distributed.Group | None) -> list[BatchNorm]:
    """Make each of MLX's own batch norms in `model` one of ours, in place, and return them; names and values stay."""
    found = []
    for name, module in model.named_modules():
        if type(module) is nn.BatchNorm:
            # Its class is all that changes: wherever the module is held, by however many, it stays the same one.
            module.__class__ = BatchNorm
            module.group, module.name = group, name or "the model"
        if isinstance(module, BatchNorm):
            found.append(module)
    return found


def foreign_batch_norms(model: nn.Module) -> list[str]:
    """Names of batch norms that are neither MLX's own nor ours: how they take their statistics is not known."""
    ours = (nn.BatchNorm, BatchNorm)
    return [
        name for name, module in model.named_modules() if isinstance(module, nn.BatchNorm) and type(module) not in ours
    ]


@contextlib.contextmanager
def counting(norms: Sequence[BatchNorm], real: mx.array) -> Iterator[None]:
    """Tell batch norms whether their next inputs count, a bool: those of a rank without rows do not.

    Belongs inside a compiled function, with `real` one of its arguments: an array from outside would be compiled in.
    """
    for norm in norms:
        object.__setattr__(norm, "real", real)  # past MLX, which would take an array for state of the model
    try:
        yield
    finally:
        for norm in norms:
            object.__setattr__(norm, "real", None)


def _shared_norm(eps: float, group: mx.distributed.Group | None) -> Callable[..., Any]:
    """Return (x, weight, bias, real) -> (output, mean, squares around it, count), with a gradient of its own.

    One all_gather forward and one all_sum backward where there is a group. Where `real` is False the gradient that
    comes back must be 0.
    """

    @mx.custom_function
    def normalise(x: mx.array, weight: mx.array, bias: mx.array, real: mx.array) -> tuple[mx.array, ...]:
        mean, spread, count = _statistics(x, real, group)
        centred = x.astype(mean.dtype) - mean
        output = centred * _inverse_std(spread, count, eps) * weight + bias
        return output.astype(x.dtype), mean, spread, count

    @normalise.vjp
    def pull_back(
        primals: tuple[mx.array, ...], cotangents: tuple[mx.array, ...], outputs: tuple[mx.array, ...]
    ) -> tuple[mx.array, ...]:
        (x, weight, bias, real), (_, mean, spread, count) = primals, outputs
        over = tuple(range(x.ndim - 1))
        inverse = _inverse_std(spread, count, eps)
        gradient = cotangents[0].astype(mean.dtype)
        centred = x.astype(mean.dtype) - mean
        both = mx.stack([gradient.sum(over), (gradient * centred).sum(over)])
        own_sum, own_centred = both  # this rank's share: the step adds up what ranks have
        if group is not None:
            both = mx.distributed.all_sum(both, group=group)
        total, total_centred = both / mx.maximum(count, 1)
        moved = gradient - total - centred * (inverse.square() * total_centred)
        return (
            (real * weight * inverse * moved).astype(x.dtype),
            (own_centred * inverse).astype(weight.dtype),
            own_sum.astype(bias.dtype),
            mx.zeros_like(real),
        )

    return normalise


def _statistics(x: mx.array, real: mx.array, group: mx.distributed.Group | None) -> tuple[mx.array, mx.array, mx.array]:
    """Return mean, sum of squares around it, both by channel, and count over what is real in `group`.

    Communicates over it. Ranks tell mean and squares, not sums of squares: those lose digits when means are large.
    """
    values = x.astype(mx.float32) if x.dtype in _HALVES else x
    over = tuple(range(x.ndim - 1))
    mean = values.mean(over)
    spread = (values - mean).square().sum(over)
    count = mx.array(x.size // x.shape[-1], dtype=mean.dtype)
    if group is None:
        return mean, spread, real * count
    mine = mx.where(real, mx.stack([mx.broadcast_to(count, mean.shape), mean, spread]), 0)
    counts, means, spreads = mx.distributed.all_gather(mine[None], group=group).swapaxes(0, 1)
    total = counts.sum(0)
    shared = (counts * means).sum(0) / mx.maximum(total, 1)
    around = (spreads + counts * (means - shared).square()).sum(0)
    return shared, around, total[0]


def _inverse_std(spread: mx.array, count: mx.array, eps: float) -> mx.array:
    return mx.rsqrt(spread / mx.maximum(count, 1) + eps)
