"""Optimizer factories: named parameters in, a torch optimizer out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from shardwise.errors import JobError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.nn import Parameter
    from torch.optim import Optimizer


class OptimizerFactory(Protocol):
    """Anything that makes an optimizer from (name, parameter) pairs; it may form parameter groups."""

    def __call__(self, named_parameters: Iterable[tuple[str, Parameter]], /) -> Optimizer:
        """Return a fresh optimizer over the parameters given."""


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """AdamW; norms and biases (parameters with fewer than two dimensions) get no weight decay."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    fused: bool = True
    """One kernel for all parameters; off for devices that lack it."""

    def __post_init__(self) -> None:
        _check_finite("adamw", lr=self.lr, eps=self.eps, weight_decay=self.weight_decay)

    def __call__(self, named_parameters: Iterable[tuple[str, Parameter]]) -> Optimizer:
        """Make the optimizer."""
        from torch import optim

        return optim.AdamW(
            decay_groups(named_parameters, self.weight_decay),
            lr=self.lr,
            betas=self.betas,
            eps=self.eps,
            fused=self.fused,
        )


@dataclass(frozen=True, kw_only=True)
class SGD:
    """Stochastic gradient descent with momentum; norms and biases get no weight decay."""

    lr: float
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _check_finite("sgd", lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay)

    def __call__(self, named_parameters: Iterable[tuple[str, Parameter]]) -> Optimizer:
        """Make the optimizer."""
        from torch import optim

        return optim.SGD(
            decay_groups(named_parameters, self.weight_decay),
            lr=self.lr,
            momentum=self.momentum,
            nesterov=self.nesterov,
        )


def decay_groups(named_parameters: Iterable[tuple[str, Parameter]], weight_decay: float) -> list[dict[str, Any]]:
    """Split parameters into those that decay (matrices, filters) and those that do not (norms, biases)."""
    parameters = [parameter for _, parameter in named_parameters]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _check_finite(name: str, **values: float) -> None:
    for key, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise JobError(f"{name}({key}={value!r}) is not a number", fix=f"set optimizer.{key} to a number")
        if not math.isfinite(value) or value < 0:
            raise JobError(f"{name}({key}={value}) is not a finite number of at least 0", fix=f"set optimizer.{key}")
