"""Optimizer factories: named parameters in, one of torch's optimizers out; an engine may adapt the ready-made ones."""

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
        """Make torch's optimizer."""
        from torch import optim

        groups = decay_groups(named_parameters, self.weight_decay)
        kind = quickest_kind(groups, fused=self.fused, fuses_cut=True)
        return optim.AdamW(groups, lr=self.lr, betas=self.betas, eps=self.eps, **kind)


@dataclass(frozen=True, kw_only=True)
class SGD:
    """Stochastic gradient descent with momentum; norms and biases get no weight decay."""

    lr: float
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    fused: bool = True
    """One kernel for all parameters, where they are not cut; off for devices that lack it."""

    def __post_init__(self) -> None:
        _check_finite("sgd", lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay)

    def __call__(self, named_parameters: Iterable[tuple[str, Parameter]]) -> Optimizer:
        """Make torch's optimizer."""
        from torch import optim

        groups = decay_groups(named_parameters, self.weight_decay)
        kind = quickest_kind(groups, fused=self.fused, fuses_cut=False)
        optimizer = optim.SGD(groups, lr=self.lr, momentum=self.momentum, nesterov=self.nesterov, **kind)
        if self.momentum and kind.get("fused"):
            _begin_momentum(optimizer)
        return optimizer


def decay_groups(named_parameters: Iterable[tuple[str, Parameter]], weight_decay: float) -> list[dict[str, Any]]:
    """Split parameters into those that decay (matrices, filters) and those that do not (norms, biases)."""
    parameters = [parameter for _, parameter in named_parameters]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _begin_momentum(optimizer: Optimizer) -> None:
    """Let momentum begin at 0, which gives the same first step.

    torch's fused SGD begins with memory as it finds it: a first step that is skipped leaves that as momentum, and a
    parameter whose first gradient comes later is a TypeError.
    """
    from torch import zeros_like

    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter]["momentum_buffer"] = zeros_like(parameter, requires_grad=False)


def quickest_kind(groups: list[dict[str, Any]], *, fused: bool, fuses_cut: bool) -> dict[str, bool]:
    """Return the arguments for the quickest of torch's kinds of optimizer; the same on every rank.

    Measured by benchmarks/optimizers.py, ms an update as loop / foreach / fused on one CPU core: for a ResNet-18 AdamW
    102 / 82 / 17, SGD 35 / 36 / 15; for a decoder of 148 tensors AdamW 86 / 106 / 31, SGD 37 / 34 / 17. On 100 shards
    (DTensors), each operator on which costs 0.1 ms of Python: AdamW 80 / 6.0 / 3.2, SGD 13.5 / 1.6 and no fused one
    (`fuses_cut`). torch by itself loops over shards. On an H200 the ResNet-18: AdamW 4.0 / 0.64 / 0.30, SGD
    1.1 / 0.21 / 0.17.
    """
    from torch.distributed.tensor import DTensor

    parameters = [parameter for group in groups for parameter in group["params"]]
    cut = [parameter for parameter in parameters if isinstance(parameter, DTensor)]
    if fused and (fuses_cut or not cut):
        return {"fused": True}
    # One operator takes shards of one mesh only, and nothing whole beside them.
    is_alike = len(cut) == len(parameters) and len({parameter.device_mesh for parameter in cut}) == 1
    return {"foreach": True} if is_alike else {}


def _check_finite(name: str, **values: float) -> None:
    for key, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise JobError(
                f"{name}({key}={value!r}) is not a number",
                code="optimizer.setting-not-number",
                fix=f"set optimizer.{key} to a number",
            )
        if not math.isfinite(value) or value < 0:
            raise JobError(
                f"{name}({key}={value}) is not a finite number of at least 0",
                code="optimizer.setting-out-of-range",
                fix=f"set optimizer.{key}",
            )
