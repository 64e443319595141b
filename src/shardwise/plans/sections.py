"""The sections of a Plan: precision, float8, offload, communication and pipeline."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from shardwise.errors import PlanError
from shardwise.plans.pipeline import ScheduleName  # noqa: TC001 - check_types reads annotations at run time

DType = Literal["fp64", "fp32", "bf16", "fp16"]
ComputeDType = Literal["fp64", "fp32", "bf16", "fp16", "float8"]
StateDType = Literal["fp64", "fp32", "bf16", "int8"]
OffloadTarget = Literal["none", "cpu", "nvme"]


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The dtypes of parameters, compute, gradient reduction and optimizer states."""

    parameter: DType = "fp32"
    """Dtype of the model's weights. bf16 weights need no casts, and their activations between blocks are bf16."""
    compute: ComputeDType = "fp32"
    """Dtype of forward, loss and backward; below fp32, also of autocast and of all-gathers of sharded weights. float8
    computes the linear layers of blocks in float8 and everything else in bf16."""
    reduce: DType = "fp32"
    """Dtype in which gradients are reduced over ranks."""
    optimizer: StateDType = "fp32"
    """Dtype of the optimizer's moments. bf16 moments are rounded stochastically; int8 ones have a scale per block."""
    master: Literal["fp32", "none"] = "fp32"
    """Whether the optimizer updates fp32 copies of bf16 parameters. Without them, the update rounds stochastically."""

    @property
    def activations(self) -> DType:
        """Dtype of activations and autocast: bf16 for float8, whose matrix products return bf16."""
        return "bf16" if self.compute == "float8" else self.compute

    @property
    def has_masters(self) -> bool:
        """Whether the optimizer updates fp32 copies of bf16 parameters."""
        return self.parameter == "bf16" and self.master == "fp32"

    @property
    def needs_mixed_optimizer(self) -> bool:
        """Whether parameters or moments are stored below fp32, which torch's optimizers do not support."""
        return self.parameter == "bf16" or self.optimizer in {"bf16", "int8"}

    def __str__(self) -> str:
        if {self.parameter, self.reduce, self.optimizer} == {self.compute}:
            return f"{self.compute} throughout"
        masters = " with fp32 masters" if self.has_masters else ""
        return (
            f"parameters {self.parameter}{masters} · compute {self.compute} · reduce {self.reduce} · optimizer"
            f" {self.optimizer}"
        )


@dataclass(frozen=True, kw_only=True)
class Float8:
    """Float8 matrix products of linear layers; used if precision.compute = "float8"."""

    recipe: Literal["tensorwise", "rowwise"] = "tensorwise"
    """Scaling factors: one per tensor, which is fastest, or one per row, which tolerates outliers."""
    head: bool = False
    """Compute the output projection in float8, too."""
    modules: tuple[str, ...] = ()
    """Names of the linear layers to compute in float8; empty means those of blocks that are large enough to gain."""

    def __post_init__(self) -> None:
        given: Any = self.modules  # TOML and the command line pass lists
        if not isinstance(given, list | tuple) or not all(isinstance(name, str) for name in given):
            raise PlanError(
                f"plan float8.modules must be a list of module names, got {given!r}",
                code="plan.float8-modules-not-list",
                fix="use a list of names, such as ['blocks.0.mlp.up']",
            )
        object.__setattr__(self, "modules", tuple(given))


@dataclass(frozen=True, kw_only=True)
class Offload:
    """Offload of parameters and optimizer states to host memory or disk."""

    parameters: OffloadTarget = "none"
    optimizer: OffloadTarget = "none"
    folder: str = ""
    """Directory for offload to nvme."""


@dataclass(frozen=True, kw_only=True)
class Communication:
    """Options of gradient and weight communication; docs/reference/ddp.md compares them with the arguments of DDP."""

    bucket_mb: float = 25.0
    """Size of the buckets in which gradients are reduced during backward."""
    compression: Literal["none", "bf16", "fp16", "powersgd"] = "none"
    find_unused_parameters: bool = False
    static_graph: bool = False
    gradient_as_bucket_view: bool = True
    broadcast_buffers: bool = False
    """Broadcast buffers from rank 0 before each forward pass, for buffers that differ between ranks."""
    prefetch: int = 1
    """Number of sharded blocks that are all-gathered ahead of use."""
    sync_every: int = 1
    """Local optimizer steps of each replica between synchronizations (DiLoCo); 1 reduces gradients in every step."""
    outer_lr: float = 0.5
    """Learning rate of the outer optimizer, which applies the mean change of the replicas; used if sync_every > 1."""
    outer_momentum: float = 0.3
    """Nesterov momentum of the outer optimizer. With 0 and outer_lr = 1, weights are averaged. Both defaults were
    measured, see docs/guides/low-communication.md."""


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Pipeline schedule and split; used if layout.pp > 1."""

    schedule: ScheduleName = "1f1b"
    split: tuple[int, ...] = ()
    """First layer of each stage after the first; empty means an even split."""

    def __post_init__(self) -> None:
        given: Any = self.split  # TOML and the command line pass lists
        if not isinstance(given, list | tuple) or not all(type(layer) is int for layer in given):
            raise PlanError(
                f"plan pipeline.split must be a list of layer indices, got {given!r}",
                code="plan.pipeline-split-not-list",
                fix="use a list of integers, such as [4, 8]",
            )
        object.__setattr__(self, "split", tuple(given))


def check_ranges(options: Communication) -> None:
    """Raise PlanError for numbers outside of their range."""
    if options.bucket_mb <= 0:
        raise PlanError(
            f"plan bucket_mb must be positive, got {options.bucket_mb}",
            code="plan.bucket-not-positive",
            fix="use a size above 0",
        )
    if options.sync_every < 1:
        raise PlanError(
            f"plan sync_every must be positive, got {options.sync_every}",
            code="plan.sync-every-invalid",
            fix="use an integer of at least 1",
        )
    if not 0 < options.outer_lr < math.inf:
        raise PlanError(
            f"plan outer_lr must be positive and finite, got {options.outer_lr}",
            code="plan.outer-lr-invalid",
            fix="use a number above 0, such as 0.7",
        )
    if not 0 <= options.outer_momentum < 1:
        raise PlanError(
            f"plan outer_momentum must be in [0, 1), got {options.outer_momentum}",
            code="plan.outer-momentum-invalid",
            fix="use a number from 0 to below 1",
        )
