"""Tensors of torch as arrays of MLX under torch's names and layouts, and batch norm that is exact over ranks."""

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
"""What MLX would narrow unless told not to."""


def to_mlx(tensor: Tensor, floating: mx.Dtype | None = None) -> mx.array:
    """Return a copy of a tensor on the host as an array, 2 us for a small one.

    It has the same dtype, or `floating` where that is given and the tensor is of floating-point numbers: MLX would take
    the wider of two dtypes for all that comes after, and has no float64 on a GPU.
    """
    if tensor.dtype == torch.bfloat16:  # numpy has none
        array = mx.array(tensor.detach().view(torch.int16).numpy()).view(mx.bfloat16)
        return array if floating is None else array.astype(floating)
    wanted = floating if tensor.is_floating_point() else None
    return mx.array(tensor.detach().numpy(), dtype=wanted or _WIDE.get(tensor.dtype))


def to_torch(array: mx.array) -> Tensor:
    """Return an array as a tensor on the same memory, to be read only; waits until it is computed."""
    if array.dtype == mx.bfloat16:
        return torch.from_numpy(np.array(array.view(mx.int16), copy=False)).view(torch.bfloat16)
    return torch.from_numpy(np.array(array, copy=False))


# The arrays of an MLX module under the names and in the layouts of torch, which is how checkpoints have them.


Arrays = dict[str, mx.array]

_MEAN = "running_mean"
_STATISTICS = (_MEAN, "running_var")
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Weights are [out, size..., in] here and [out, in, size...] in torch."""
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
"""Weights are [out, size..., in] here and [in, out, size...] in torch."""


@dataclass(frozen=True, kw_only=True)
class ArrayForm:
    """What the arrays of a model are called, which are trained, and how torch lays them out."""

    parameters: tuple[str, ...]
    """All of them, shared ones under their first name."""
    trained: tuple[str, ...]
    statistics: tuple[str, ...]
    """Of batch norms: buffers in torch, parameters that are not trained in MLX."""
    tied: Mapping[str, str]
    """Other names of an array that several places share, each with the first."""
    orders: Mapping[str, tuple[int, ...]]
    """Dimensions in torch's order, of the arrays that torch lays out in another."""

    @property
    def counts(self) -> tuple[str, ...]:
        """Names by which torch counts the batches of each batch norm that keeps statistics; MLX does not count."""
        return tuple(
            f"{name.removesuffix(_MEAN)}num_batches_tracked" for name in self.statistics if name.endswith(_MEAN)
        )

    def read(self, model: nn.Module, names: Iterable[str]) -> Arrays:
        """Return the model's arrays of these names."""
        found = dict(tree_flatten(model.parameters()))
        return {name: found[name] for name in names}

    def write(self, model: nn.Module, arrays: Mapping[str, mx.array]) -> None:
        """Put arrays into the model, shared ones into all their places."""
        everywhere = list(arrays.items())
        everywhere += [(alias, arrays[name]) for alias, name in self.tied.items() if name in arrays]
        model.update(tree_unflatten(everywhere))

    def to_torch(self, name: str, array: mx.array) -> Tensor:
        """Return a parameter's array, or an optimizer's for it, in torch's layout, to be read only."""
        order = self._order(name, array.ndim)
        tensor = to_torch(array)
        return tensor if order is None else tensor.permute(order).contiguous()

    def to_mlx(self, name: str, tensor: Tensor) -> mx.array:
        """Convert a parameter or its optimizer state from torch's layout to MLX's."""
        order = self._order(name, tensor.ndim)
        if order is None:
            return to_mlx(tensor)
        back = [order.index(place) for place in range(len(order))]
        return to_mlx(tensor.permute(back).contiguous())

    def _order(self, name: str, num_dims: int) -> tuple[int, ...] | None:
        """Return how torch lays out a parameter; what has other dimensions, such as sums of rows, stays as it is."""
        order = self.orders.get(name)
        return order if order is not None and len(order) == num_dims else None


def form_of(model: nn.Module) -> ArrayForm:
    """Return the form of a model's arrays; one that has nothing to train is refused."""
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
            fix="leave some unfrozen: model.unfreeze()",
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


# Batch norm in MLX that is exact under data parallelism: over all ranks, uneven shares, none of spare rows.


_HALVES = (mx.float16, mx.bfloat16)


class MlxBatchNorm(nn.BatchNorm):  # type: ignore[misc]  # MLX's classes are untyped
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
        """Move the running statistics unless nobody had a row; the variance is the unbiased one, as in MLX."""
        moved = self.momentum * (count > 0).astype(count.dtype)
        unbiased = spread / mx.maximum(count - 1, 1)
        for name, found in (("running_mean", mean), ("running_var", unbiased)):
            kept = self[name]
            self[name] = ((1 - moved) * kept + moved * found).astype(kept.dtype)


def share_batch_norms(model: nn.Module, group: mx.distributed.Group | None) -> list[MlxBatchNorm]:
    """Make each of MLX's own batch norms in `model` one of ours, in place, and return them; names and values stay."""
    found = []
    for name, module in model.named_modules():
        if type(module) is nn.BatchNorm:
            # Its class is all that changes: wherever the module is held, by however many, it stays the same one.
            module.__class__ = MlxBatchNorm
            module.group, module.name = group, name or "the model"
        if isinstance(module, MlxBatchNorm):
            found.append(module)
    return found


def foreign_batch_norms(model: nn.Module) -> list[str]:
    """Names of batch norms that are neither MLX's own nor ours: how they take their statistics is not known."""
    ours = (nn.BatchNorm, MlxBatchNorm)
    return [
        name for name, module in model.named_modules() if isinstance(module, nn.BatchNorm) and type(module) not in ours
    ]


@contextlib.contextmanager
def counting(norms: Sequence[MlxBatchNorm], real: mx.array) -> Iterator[None]:
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
