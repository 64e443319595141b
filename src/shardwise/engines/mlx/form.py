"""The arrays of an MLX module under the names and in the layouts of torch, which is how checkpoints have them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten

from shardwise.engines.mlx.arrays import to_mlx, to_torch
from shardwise.errors import JobError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor

Arrays = dict[str, mx.array]

_MEAN = "running_mean"
_STATISTICS = (_MEAN, "running_var")
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Weights are [out, size..., in] here and [out, in, size...] in torch."""
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
"""Weights are [out, size..., in] here and [in, out, size...] in torch."""


@dataclass(frozen=True, kw_only=True)
class Form:
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
        """Return a tensor in torch's layout as an array of the model's own, or of the optimizer's for it."""
        order = self._order(name, tensor.ndim)
        if order is None:
            return to_mlx(tensor)
        back = [order.index(place) for place in range(len(order))]
        return to_mlx(tensor.permute(back).contiguous())

    def _order(self, name: str, num_dims: int) -> tuple[int, ...] | None:
        """Return how torch lays out a parameter; what has other dimensions, such as sums of rows, stays as it is."""
        order = self.orders.get(name)
        return order if order is not None and len(order) == num_dims else None


def form_of(model: nn.Module) -> Form:
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
    return Form(
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
