"""Gradient sync: when the gradients of a step are summed over ranks."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel


class GradSync(Protocol):
    """Sums gradients over the ranks that read different samples."""

    def accumulate(self) -> AbstractContextManager[object]:
        """Enter around forward and backward of every micro-batch but the last, which sums as it goes."""

    def hold(self) -> AbstractContextManager[object]:
        """Enter around a forward and backward that must not communicate; `finish` sums afterwards."""

    def finish(self) -> None:
        """Average the gradients that `hold` kept back; communicates, on every rank."""


class NoSync:
    """One reader: its gradient is the whole gradient."""

    def accumulate(self) -> AbstractContextManager[object]:
        """Nothing to keep back."""
        return nullcontext()

    def hold(self) -> AbstractContextManager[object]:
        """Nothing to keep back."""
        return nullcontext()

    def finish(self) -> None:
        """Nothing was kept back."""


class ReplicaSync:
    """DDP sums during the backward it is not told to skip."""

    def __init__(self, model: DistributedDataParallel, *, every: bool) -> None:
        """`every` sums after each micro-batch instead of once per step."""
        self._model = model
        self._every = every

    def accumulate(self) -> AbstractContextManager[object]:
        """Keep DDP's all-reduce back, unless every micro-batch is to be summed."""
        return nullcontext() if self._every else self._model.no_sync()

    def hold(self) -> AbstractContextManager[object]:
        """Keep DDP's all-reduce back."""
        return self._model.no_sync()

    def finish(self) -> None:
        """Average what was kept back, parameter by parameter; communicates over DDP's group."""
        group = self._model.process_group
        parameters = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        users = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.float32)
        users = users.to(parameters[0].device)
        dist.all_reduce(users, group=group)
        for parameter, used_by in zip(parameters, users.tolist(), strict=True):
            if not used_by:
                continue  # no gradient anywhere: as in one process, the optimizer passes it over
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=group)
            parameter.grad /= dist.get_world_size(group)
