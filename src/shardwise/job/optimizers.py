"""Optimizer factories, which return a torch optimizer for named parameters: AdamW, SGD, Muon and their protocol."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

from shardwise.errors import JobError, nearest

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch.nn import Parameter
    from torch.optim import Optimizer


_FP32_BYTES = 4


class OptimizerFactory(Protocol):
    """Function that returns an optimizer for (name, parameter) pairs; it may create parameter groups."""

    def __call__(self, named_parameters: Iterable[tuple[str, Parameter]], /) -> Optimizer:
        """Return a new optimizer for the parameters."""


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """AdamW; norms and biases (parameters with fewer than two dimensions) get no weight decay."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    fused: bool = True
    """Use torch's fused kernel for all parameters; set False on devices without one."""

    def __post_init__(self) -> None:
        _check_finite("adamw", lr=self.lr, eps=self.eps, weight_decay=self.weight_decay)

    def __call__(self, named_parameters: Iterable[tuple[str, Parameter]]) -> Optimizer:
        """Return a torch.optim.AdamW for the parameters."""
        from torch import optim

        groups = decay_groups(named_parameters, self.weight_decay)
        kind = fastest_kind(groups, fused=self.fused, fuses_shards=True)
        return optim.AdamW(groups, lr=self.lr, betas=self.betas, eps=self.eps, **kind)


@dataclass(frozen=True, kw_only=True)
class SGD:
    """Stochastic gradient descent with momentum; norms and biases get no weight decay."""

    lr: float
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    fused: bool = True
    """Use torch's fused kernel unless parameters are sharded; set False on devices without one."""

    def __post_init__(self) -> None:
        _check_finite("sgd", lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay)

    def __call__(self, named_parameters: Iterable[tuple[str, Parameter]]) -> Optimizer:
        """Return a torch.optim.SGD for the parameters."""
        from torch import optim

        groups = decay_groups(named_parameters, self.weight_decay)
        parameters = [parameter for group in groups for parameter in group["params"]]
        # torch's fused SGD (2.13) does not write bf16 and fp16 parameters of 16 and more elements on a CPU.
        is_narrow = any(each.device.type == "cpu" and each.dtype.itemsize < _FP32_BYTES for each in parameters)
        kind = fastest_kind(groups, fused=self.fused and not is_narrow, fuses_shards=False)
        optimizer = optim.SGD(groups, lr=self.lr, momentum=self.momentum, nesterov=self.nesterov, **kind)
        if self.momentum and kind.get("fused"):
            _initialize_momentum(optimizer)
        return optimizer


AdjustLr = Literal["original", "match_rms_adamw"]
NsDType = Literal["auto", "bf16", "fp32", "fp64"]


@dataclass(frozen=True, kw_only=True)
class Muon:
    """Muon for the matrices of hidden layers; AdamW for embeddings, output heads, norms, biases and filters.

    Muon orthogonalizes the momentum of a whole matrix by Newton-Schulz iterations, as torch.optim.Muon does. The full
    model determines which parameters are matrices of hidden layers.
    """

    lr: float
    """Learning rate of Muon, before `adjust_lr`."""
    momentum: float = 0.95
    nesterov: bool = True
    weight_decay: float = 0.1
    eps: float = 1e-7
    """Smallest norm by which a matrix is divided before the iterations."""
    ns_steps: int = 5
    """Number of Newton-Schulz iterations."""
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315)
    ns_dtype: NsDType = "auto"
    """Dtype of the iterations; "auto" is bf16 as in torch, and fp64 for fp64 parameters (`shardwise verify`)."""
    adjust_lr: AdjustLr = "original"
    """Factor of the learning rate: sqrt(max(1, outputs / inputs)), or 0.2 sqrt(max(outputs, inputs))."""
    adamw_lr: float = 3e-4
    adamw_betas: tuple[float, float] = (0.9, 0.999)
    adamw_eps: float = 1e-8
    adamw_weight_decay: float = 0.01
    """Weight decay of AdamW; norms and biases get none."""
    include: tuple[str, ...] = ()
    """Parameters or modules with two-dimensional weights to update by Muon too: names or their suffixes, in which `*`
    matches one component."""
    exclude: tuple[str, ...] = ()
    """Parameters or modules to update by AdamW instead of Muon."""
    split: Mapping[str, int | tuple[int, ...]] = field(default_factory=dict, hash=False)
    """Fused weights as pattern -> number of equal matrices along the outputs, or the outputs of each matrix."""
    fused: bool = True
    """Use torch's fused kernel for AdamW; set False on devices without one."""

    def __post_init__(self) -> None:
        numbers = ("lr", "momentum", "weight_decay", "eps", "adamw_lr", "adamw_eps", "adamw_weight_decay")
        _check_finite("muon", **{name: getattr(self, name) for name in numbers})
        if type(self.ns_steps) is not int or not 1 <= self.ns_steps < _MOST_NS_STEPS:
            raise JobError(
                f"muon(ns_steps={self.ns_steps!r}) is invalid, because ns_steps must be an integer from 1 to 99",
                code="optimizer.setting-out-of-range",
                fix="set optimizer.ns_steps=5",
            )
        for name, kind in (("ns_dtype", NsDType), ("adjust_lr", AdjustLr)):
            value = getattr(self, name)
            if value not in get_args(kind):
                raise JobError(
                    f"muon({name}={value!r}) is invalid, because {name} must be one of {', '.join(get_args(kind))}",
                    code="optimizer.setting-unknown",
                    fix=nearest(str(value), get_args(kind)),
                )
        for name in ("include", "exclude"):
            if isinstance(getattr(self, name), str):  # a string is a sequence of one-letter patterns
                object.__setattr__(self, name, (getattr(self, name),))

    def __call__(self, _: Iterable[tuple[str, Parameter]]) -> Optimizer:
        """Raise JobError: names and shapes do not show which parameters are embeddings, heads and fused weights."""
        raise JobError(
            "sw.muon requires the model to find embeddings, output heads and fused weights, but got parameters only",
            code="optimizer.muon-without-model",
            fix="set Job(optimizer=sw.muon(...)), or call shardwise.parallel.muon.for_model(sw.muon(...), model)",
        )


_MOST_NS_STEPS = 100


def decay_groups(named_parameters: Iterable[tuple[str, Parameter]], weight_decay: float) -> list[dict[str, Any]]:
    """Return parameter groups with weight decay (matrices, filters) and without it (norms, biases)."""
    parameters = [parameter for _, parameter in named_parameters]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _initialize_momentum(optimizer: Optimizer) -> None:
    """Initialize momentum with zeros, which leads to the same first step.

    torch's fused SGD allocates momentum without initializing it, so a skipped first step leaves arbitrary values, and
    it raises TypeError for a parameter whose first gradient comes later.
    """
    from torch import zeros_like

    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter]["momentum_buffer"] = zeros_like(parameter, requires_grad=False)


def fastest_kind(groups: list[dict[str, Any]], *, fused: bool, fuses_shards: bool) -> dict[str, bool]:
    """Return the arguments that select torch's fastest implementation of an optimizer; equal on every rank.

    Measured by benchmarks/optimizers.py, in ms per update as loop / foreach / fused on one CPU core: ResNet-18 AdamW
    102 / 82 / 17, SGD 35 / 36 / 15; a decoder of 148 tensors AdamW 86 / 106 / 31, SGD 37 / 34 / 17. On 100 shards
    (DTensors, 0.1 ms of Python per operator): AdamW 80 / 6.0 / 3.2, SGD 13.5 / 1.6 without a fused kernel
    (`fuses_shards`). By default, torch loops over shards. ResNet-18 on an H200: AdamW 4.0 / 0.64 / 0.30, SGD
    1.1 / 0.21 / 0.17.
    """
    from torch.distributed.tensor import DTensor

    parameters = [parameter for group in groups for parameter in group["params"]]
    shards = [parameter for parameter in parameters if isinstance(parameter, DTensor)]
    if fused and (fuses_shards or not shards):
        return {"fused": True}
    # A foreach operator requires that all its tensors are shards on one device mesh.
    has_one_mesh = len(shards) == len(parameters) and len({shard.device_mesh for shard in shards}) == 1
    return {"foreach": True} if has_one_mesh else {}


def _check_finite(name: str, **values: float) -> None:
    for key, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise JobError(
                f"{name}({key}={value!r}) is invalid, because {key} must be a number",
                code="optimizer.setting-not-number",
                fix=f"set optimizer.{key} to a number",
            )
        if not math.isfinite(value) or value < 0:
            raise JobError(
                f"{name}({key}={value}) is invalid, because {key} must be finite and at least 0",
                code="optimizer.setting-out-of-range",
                fix=f"set optimizer.{key} to 0 or more",
            )
