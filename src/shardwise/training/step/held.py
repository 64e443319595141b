"""What a step holds of a training, under the names of the user's own module: values and optimizer states."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from shardwise.parallel.optimizer import Optimized

Forms = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Whole shape and dtype of tensors by name."""


class Held(NamedTuple):
    """This rank's tensors: whole ones, and pieces as DTensors."""

    values: dict[str, Tensor]
    """Of parameters, in the dtype they are trained in."""
    states: dict[str, Tensor]
    """Of the optimizer, as PARAMETER/KEY."""
    buffers: Mapping[str, Tensor] = MappingProxyType({})
    """That a state dict has."""
    update: Mapping[str, Tensor] = MappingProxyType({})
    """Of the update (a loss scale), and of what brings replicas together that train on their own, as KEY/PARAMETER."""


def states_of(optimized: Optimized) -> dict[str, Tensor]:
    """Return an optimizer's states as PARAMETER/KEY; no copies, no communication."""
    return {
        f"{name}/{key}": value
        for name, parameter in optimized.named
        for key, value in optimized.optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def make_states(optimized: Optimized, saved: Forms) -> None:
    """Give the optimizer the states that `saved` names, as PARAMETER/KEY.

    A state shaped like its parameter is sharded as that is; any other (a step count) is whole on every rank. Beside a
    scalar parameter the count is the one that torch's optimizers call "step".
    """
    for name, parameter in optimized.named:
        prefix = f"{name}/"
        state = optimized.optimizer.state[parameter]
        for full, (shape, dtype) in saved.items():
            if full.startswith(prefix):
                key = full.removeprefix(prefix)
                is_like = tuple(parameter.shape) == shape and (bool(shape) or key != "step")
                state[key] = _like(parameter, shape, dtype, None if is_like else optimized.optimizer)


def _like(parameter: nn.Parameter, shape: tuple[int, ...], dtype: torch.dtype, optimizer: Optimizer | None) -> Tensor:
    """Return zeros: without `optimizer` in the form of the parameter, else a count where that optimizer has it."""
    if optimizer is None:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    group = next(group for group in optimizer.param_groups if any(each is parameter for each in group["params"]))
    return torch.zeros(shape, dtype=dtype, device=parameter.device if counts_on_device(group) else "cpu")


def counts_on_device(group: Mapping[str, object]) -> bool:
    """Whether an optimizer counts its steps where its parameters are: fused ones do, others on the host."""
    return bool(group.get("fused") or group.get("capturable"))
