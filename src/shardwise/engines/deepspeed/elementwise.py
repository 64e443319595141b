"""Which optimizers ZeRO may cut: those that treat every element by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import optim

from shardwise.errors import JobError

if TYPE_CHECKING:
    from torch.optim import Optimizer

ELEMENTWISE: tuple[type[Optimizer], ...] = (
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
    optim.Adadelta,
    optim.ASGD,
    optim.SGD,
)
"""Adagrad is not among them: DeepSpeed makes a new one with one group and forgets the job's."""


def require_elementwise(optimizer: Optimizer, stage: int) -> None:
    """Refuse an optimizer that would give other numbers on flat slices than on whole parameters."""
    if stage and not isinstance(optimizer, ELEMENTWISE):
        kinds = ", ".join(kind.__name__ for kind in ELEMENTWISE)
        raise JobError(
            f"{type(optimizer).__name__} under DeepSpeed's stage {stage} would see flat slices of all parameters, and"
            " only optimizers that treat every element by itself give the same numbers there",
            code="support.deepspeed-optimizer-elementwise",
            fix=f"use one of {kinds}, or --plan ddp, or --set engine=torch",
        )
