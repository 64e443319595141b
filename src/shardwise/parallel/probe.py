"""The gradient probe: in the first step, which parameters got no gradient, by rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from torch import nn


class GradientProbe:
    """Notes which trainable parameters of a module receive a gradient until it is asked."""

    def __init__(self, module: nn.Module) -> None:
        self._waiting = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: self._waiting.discard(name))
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        ]

    def missing(self, group: dist.ProcessGroup | None) -> dict[int, list[str]]:
        """Return names without gradient by rank of `group`, and stop watching; communicates over `group`."""
        for hook in self._hooks:
            hook.remove()
        mine = sorted(self._waiting)
        if group is None:
            return {0: mine} if mine else {}
        everyone: list[list[str]] = [[] for _ in range(dist.get_world_size(group))]
        dist.all_gather_object(everyone, mine, group=group)
        return {rank: names for rank, names in enumerate(everyone) if names}
