"""Which parameters are trained, and the gradient probe: which of them got no gradient in the first step, by rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from shardwise.errors import JobError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import nn


def trainable_of(
    named: Iterable[tuple[str, nn.Parameter]], *, owner: str = "the model"
) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that require gradients; an `owner` without one is refused."""
    found = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    if not found:
        raise JobError(
            f"{owner} has no trainable parameter",
            code="model.no-trainable-parameter",
            fix="leave some with requires_grad=True",
        )
    return found


def refuse_sparse(named: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Refuse a gradient that is sparse: steps sum, check and clip dense ones."""
    for name, parameter in named:
        if parameter.grad is not None and parameter.grad.is_sparse:
            raise JobError(
                f"{name} has a sparse gradient, and gradients are dense here",
                code="model.sparse-gradients",
                fix="use sparse=False",
            )


def without_gradient(
    named: Iterable[tuple[str, nn.Parameter]],
    group: dist.ProcessGroup | None,
    has_gradient: Callable[[nn.Parameter], bool],
) -> dict[int, list[str]]:
    """Return trainable parameters that have no gradient, by rank of `group`; communicates over it."""
    mine = sorted(name for name, parameter in named if parameter.requires_grad and not has_gradient(parameter))
    if group is None or dist.get_backend(group) == "fake":
        return {0: mine} if mine else {}
    everyone: list[list[str]] = [[] for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(everyone, mine, group=group)
    return {rank: names for rank, names in enumerate(everyone) if names}
