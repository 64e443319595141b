"""Conversion between torch tensors and MLX arrays, torch's parameter names and layouts, and synchronized batch norm."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import torch
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten

from shardwise.errors import JobError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch import Tensor


_WIDE = {torch.float64: mx.float64}
"""Dtypes that MLX narrows unless a dtype is passed."""


def to_mlx(tensor: Tensor, floating: mx.Dtype | None = None) -> mx.array:
    """Return a copy of a host tensor as an MLX array; takes 2 us for a small tensor.

    A floating-point tensor is cast to `floating` if that is set: MLX promotes results to the wider of two dtypes,
    and has no float64 on a GPU.
    """
    if tensor.dtype == torch.bfloat16:  # numpy has no bfloat16
        array = mx.array(tensor.detach().view(torch.int16).numpy()).view(mx.bfloat16)
        return array if floating is None else array.astype(floating)
    wanted = floating if tensor.is_floating_point() else None
    return mx.array(tensor.detach().numpy(), dtype=wanted or _WIDE.get(tensor.dtype))


def to_torch(array: mx.array) -> Tensor:
    """Return a read-only tensor that shares an array's memory; waits until the array is computed."""
    if array.dtype == mx.bfloat16:
        return torch.from_numpy(np.array(array.view(mx.int16), copy=False)).view(torch.bfloat16)
    return torch.from_numpy(np.array(array, copy=False))


# The arrays of an MLX module under the names and in the layouts of torch, which checkpoints use.


Arrays = dict[str, mx.array]

_MEAN = "running_mean"
_STATISTICS = (_MEAN, "running_var")
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Weights are [out, size..., in] in MLX and [out, in, size...] in torch."""
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
"""Weights are [out, size..., in] in MLX and [in, out, size...] in torch."""


@dataclass(frozen=True, kw_only=True)
class ArrayForm:
    """Names of a model's arrays, which of them are trained, and their layouts in torch."""

    parameters: tuple[str, ...]
    """All parameters; tied ones under their first name."""
    trained: tuple[str, ...]
    statistics: tuple[str, ...]
    """Running statistics of batch norms: buffers in torch, frozen parameters in MLX."""
    tied: Mapping[str, str]
    """Additional names of tied arrays, each mapped to the first name."""
    orders: Mapping[str, tuple[int, ...]]
    """For arrays with another layout in torch: MLX's dims in torch's order."""

    @property
    def counts(self) -> tuple[str, ...]:
        """Torch's names for the batch counters of batch norms with running statistics; MLX has none."""
        return tuple(
            f"{name.removesuffix(_MEAN)}num_batches_tracked" for name in self.statistics if name.endswith(_MEAN)
        )

    def read(self, model: nn.Module, names: Iterable[str]) -> Arrays:
        """Return the model's arrays of these names."""
        found = dict(tree_flatten(model.parameters()))
        return {name: found[name] for name in names}

    def write(self, model: nn.Module, arrays: Mapping[str, mx.array]) -> None:
        """Set arrays of the model, tied ones under each of their names."""
        named = list(arrays.items())
        named += [(alias, arrays[name]) for alias, name in self.tied.items() if name in arrays]
        model.update(tree_unflatten(named))

    def to_torch(self, name: str, array: mx.array) -> Tensor:
        """Convert a parameter or its optimizer state from MLX's layout to torch's; the tensor is read-only."""
        order = self._order(name, array.ndim)
        tensor = to_torch(array)
        return tensor if order is None else tensor.permute(order).contiguous()

    def to_mlx(self, name: str, tensor: Tensor) -> mx.array:
        """Convert a parameter or its optimizer state from torch's layout to MLX's."""
        order = self._order(name, tensor.ndim)
        if order is None:
            return to_mlx(tensor)
        inverse = [order.index(dim) for dim in range(len(order))]
        return to_mlx(tensor.permute(inverse).contiguous())

    def _order(self, name: str, num_dims: int) -> tuple[int, ...] | None:
        """Return the dims of a parameter in torch's order; None for states with other dims, such as row sums."""
        order = self.orders.get(name)
        return order if order is not None and len(order) == num_dims else None


def form_of(model: nn.Module) -> ArrayForm:
    """Return the form of a model's arrays; raise if the model has no trainable parameter."""
    flat: list[tuple[str, mx.array]] = tree_flatten(model.parameters())
    first: dict[int, str] = {}
    tied = {}
    for name, array in flat:
        original = first.setdefault(id(array), name)
        if original != name:
            tied[name] = original
    trainable = {tied.get(name, name) for name, _ in tree_flatten(model.trainable_parameters())}
    if not trainable:
        raise JobError(
            "the model has no trainable parameter",
            code="model.no-trainable-parameter",
            fix="call model.unfreeze()",
        )
    modules = dict(model.named_modules())
    statistics = tuple(name for name, _ in flat if _is_statistic(name, modules))
    names = [name for name, _ in flat if name not in tied and name not in statistics]
    return ArrayForm(
        parameters=tuple(names),
        trained=tuple(name for name in names if name in trainable),
        statistics=statistics,
        tied=tied,
        orders=_orders(modules),
    )


def _is_statistic(name: str, modules: Mapping[str, nn.Module]) -> bool:
    owner, _, attribute = name.rpartition(".")
    return attribute in _STATISTICS and isinstance(modules.get(owner), nn.BatchNorm)


def _orders(modules: Mapping[str, nn.Module]) -> dict[str, tuple[int, ...]]:
    found = {}
    for name, module in modules.items():
        if isinstance(module, _CONVOLUTIONS):
            sizes = range(1, module.weight.ndim - 1)
            found[f"{name}.weight" if name else "weight"] = (0, module.weight.ndim - 1, *sizes)
        elif isinstance(module, _TRANSPOSED):
            sizes = range(1, module.weight.ndim - 1)
            found[f"{name}.weight" if name else "weight"] = (module.weight.ndim - 1, 0, *sizes)
    return found


# Batch norm that is exact under data parallelism: statistics over the rows of all ranks without padding rows; the
# number of rows may differ between ranks.


_HALVES = (mx.float16, mx.bfloat16)


class MlxBatchNorm(nn.BatchNorm):  # type: ignore[misc]  # MLX's classes are untyped
    """Batch norm with statistics in fp32 or wider over all ranks of `group`; None means this rank's rows alone."""

    group: mx.distributed.Group | None = None
    name: str = "a batch norm"
    real: mx.array | None = None
    """Bool array: whether the next input is real data and not padding; None means real. Set by `counting`."""

    def __call__(self, x: mx.array) -> mx.array:
        """Normalize x [batch, ..., channels]; in training, communicates over `group`."""
        if not self.training:
            return super().__call__(x)  # type: ignore[no-any-return]
        if x.ndim < 2:
            raise JobError(
                f"{self.name} expects an input of at least 2 dimensions, got {x.ndim}",
                code="model.batch-norm-dimensions",
                fix="pass an input with a batch and a channel dimension",
            )
        real = mx.array(1, dtype=mx.bool_) if self.real is None else self.real
        scaled = "weight" in self
        weight, bias = (self.weight, self.bias) if scaled else (mx.ones(x.shape[-1]), mx.zeros(x.shape[-1]))
        output, mean, spread, count = _shared_norm(self.eps, self.group)(x, weight, bias, real)
        if self.track_running_stats:
            self._track(mx.stop_gradient(mean), mx.stop_gradient(spread), mx.stop_gradient(count))
        return output  # type: ignore[no-any-return]

    def _track(self, mean: mx.array, spread: mx.array, count: mx.array) -> None:
        """Update the running statistics if any rank has a row; uses the unbiased variance, as MLX does."""
        momentum = self.momentum * (count > 0).astype(count.dtype)
        unbiased = spread / mx.maximum(count - 1, 1)
        for name, found in (("running_mean", mean), ("running_var", unbiased)):
            running = self[name]
            self[name] = ((1 - momentum) * running + momentum * found).astype(running.dtype)


def share_batch_norms(model: nn.Module, group: mx.distributed.Group | None) -> list[MlxBatchNorm]:
    """Convert MLX's batch norms in `model` to MlxBatchNorm in place and return them; names and values do not change."""
    found = []
    for name, module in model.named_modules():
        if type(module) is nn.BatchNorm:
            # Only the class changes, so every reference to the module stays valid.
            module.__class__ = MlxBatchNorm
            module.group, module.name = group, name or "the model"
        if isinstance(module, MlxBatchNorm):
            found.append(module)
    return found


def foreign_batch_norms(model: nn.Module) -> list[str]:
    """Return the names of batch norms of the user's own subclasses, whose statistics cannot be synchronized."""
    known = (nn.BatchNorm, MlxBatchNorm)
    found = []
    for name, module in model.named_modules():
        if isinstance(module, nn.BatchNorm) and type(module) not in known:
            found.append(name)
    return found


@contextlib.contextmanager
def counting(norms: Sequence[MlxBatchNorm], real: mx.array) -> Iterator[None]:
    """Mark the next inputs of batch norms as real or padding by a bool array; a rank without rows has padding only.

    Use it inside a compiled function with `real` as an argument: other arrays would become constants there.
    """
    for norm in norms:
        object.__setattr__(norm, "real", real)  # bypasses MLX, which would register the array as a parameter
    try:
        yield
    finally:
        for norm in norms:
            object.__setattr__(norm, "real", None)


def _shared_norm(eps: float, group: mx.distributed.Group | None) -> Callable[..., Any]:
    """Return a function (x, weight, bias, real) -> (output, mean, sum of squared deviations, count) with its own vjp.

    With a group, forward calls one all_gather and backward one all_sum. Where `real` is False, the incoming gradient
    must be 0.
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
        own_sum, own_centred = both  # of this rank alone: the step sums the gradients of weight and bias over ranks
        if group is not None:
            both = mx.distributed.all_sum(both, group=group)
        total, total_centred = both / mx.maximum(count, 1)
        centred_gradient = gradient - total - centred * (inverse.square() * total_centred)
        return (
            (real * weight * inverse * centred_gradient).astype(x.dtype),
            (own_centred * inverse).astype(weight.dtype),
            own_sum.astype(bias.dtype),
            mx.zeros_like(real),
        )

    return normalise


def _statistics(x: mx.array, real: mx.array, group: mx.distributed.Group | None) -> tuple[mx.array, mx.array, mx.array]:
    """Return mean and sum of squared deviations per channel, and the count, over real rows; communicates over `group`.

    Ranks exchange deviations from their own means, not sums of squares, which lose digits when means are large.
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
