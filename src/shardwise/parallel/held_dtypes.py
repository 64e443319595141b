"""Which dtypes a plan can hold weights in: mixes that no wrapper takes are refused by name, before any is wrapped."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.errors import JobError, some_of
from shardwise.parallel.sharded import DTYPES

if TYPE_CHECKING:
    from torch import Tensor, nn

    from shardwise.plans import Plan


def check_dtypes(module: nn.Module, plan: Plan, *, adapted: bool) -> None:
    """Refuse weights that no wrapper takes together, by name, before any is wrapped.

    What is trained must be in the dtype that the plan holds parameters in, wherever that is relied on: beside adapters
    and in FSDP2. Weights frozen beside adapters may also be in the dtype that the plan computes in.
    """
    held, computed = DTYPES[plan.precision.parameter], DTYPES[plan.precision.compute]
    named = [(name, weight) for name, weight in module.named_parameters() if weight.is_floating_point()]
    trained = [f"{name} ({_word(each)})" for name, each in named if each.requires_grad and each.dtype != held]
    if trained and (adapted or (plan.zero >= 2 and plan.engine == "torch")):
        raise JobError(
            f"{some_of(trained)} with requires_grad, where the plan holds what it trains in {plan.precision.parameter}",
            code="model.trained-dtype-mismatch",
            fix=f"freeze them, or make them {plan.precision.parameter}, as by model.float()",
        )
    frozen = [f"{name} ({_word(each)})" for name, each in named if each.dtype not in {held, computed}]
    if frozen and adapted:
        raise JobError(
            f"{some_of(frozen)} beside adapters, where the plan holds {plan.precision.parameter}"
            f" and computes in {plan.precision.compute}",
            code="model.frozen-dtype-mismatch",
            fix=f"make the model {plan.precision.parameter}, or --set precision=bf16 for a bf16 one",
        )


def _word(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
