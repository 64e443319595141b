"""Gradient sync: when and how the gradients of a step are summed over ranks."""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardwise.parallel.buckets import in_buckets

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor, nn
    from torch.distributed.fsdp import FSDPModule
    from torch.nn.parallel import DistributedDataParallel


class GradSync(Protocol):
    """Sums gradients over the ranks that read different samples."""

    gain: int
    """What a loss is multiplied with so that gradients come out as sums: the number of readers where they average."""

    def accumulate(self) -> AbstractContextManager[object]:
        """Enter around forward and backward of every micro-batch but the last, which sums as it goes."""

    def hold(self) -> AbstractContextManager[object]:
        """Enter around a forward and backward in which a missing gradient would leave other ranks waiting."""

    def finish_held(self) -> None:
        """Sum the gradients that `hold` kept back; communicates, on every rank."""

    def finish(self) -> None:
        """Sum what backward has not; called once a step after the last backward, communicates."""

    def finish_step(self, number: int) -> None:
        """Bring together replicas that train on their own, if `number` updates end a round; then communicates."""

    def state(self) -> dict[str, Tensor]:
        """Return the tensors that a resumed training must find again."""


class NoSync:
    """One reader: its gradient is the whole gradient."""

    gain = 1

    def accumulate(self) -> AbstractContextManager[object]:
        """Nothing to keep back."""
        return nullcontext()

    def hold(self) -> AbstractContextManager[object]:
        """Nothing to keep back."""
        return nullcontext()

    def finish_held(self) -> None:
        """Nothing was kept back."""

    def finish(self) -> None:
        """Nothing to sum."""

    def finish_step(self, number: int) -> None:
        """Nothing is apart."""

    def state(self) -> dict[str, Tensor]:
        """There is none."""
        return {}


class ReplicaSync(NoSync):
    """DDP averages during the backward it is not told to skip."""

    def __init__(self, model: DistributedDataParallel, *, every: bool) -> None:
        """`every` sums after each micro-batch instead of once per step."""
        self._model = model
        self._every = every
        self.gain = dist.get_world_size(model.process_group)

    def accumulate(self) -> AbstractContextManager[object]:
        """Keep DDP's all-reduce back, unless every micro-batch is to be summed."""
        return nullcontext() if self._every else self._model.no_sync()

    def hold(self) -> AbstractContextManager[object]:
        """Keep DDP's all-reduce back."""
        return self._model.no_sync()

    def finish_held(self) -> None:
        """Average what was kept back; communicates over DDP's group."""
        parameters = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        sum_gradients(parameters, self._model.process_group, divisor=self.gain)


class ShardSync(NoSync):
    """FSDP2 sums and cuts gradients during backward; without that it keeps whole gradients for the next one."""

    def __init__(self, model: FSDPModule, *, every: bool) -> None:
        """`every` cuts after each micro-batch: less memory, more traffic."""
        self._model = model
        self._every = every

    def accumulate(self) -> AbstractContextManager[object]:
        """Keep whole gradients, unless every micro-batch is to be summed and cut."""
        return nullcontext() if self._every else self._without_sync()

    @contextmanager
    def _without_sync(self) -> Iterator[None]:
        self._model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self._model.set_requires_gradient_sync(True)


class SummedSync(NoSync):
    """All gradients are summed by us after the last backward: where wrappers cannot (stages, tensor-cut parts)."""

    def __init__(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
        self._parameters = parameters
        self._group = group

    def finish(self) -> None:
        """Sum over the group."""
        sum_gradients(self._parameters, self._group)


def sum_gradients(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, divisor: int = 1) -> None:
    """Sum gradients over `group`, in buckets, and divide; communicates, on every rank of it.

    A parameter without gradient anywhere keeps none, as in one process, so the optimizer passes it over.
    """
    device = local(parameters[0]).device
    users = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.float32, device=device)
    dist.all_reduce(users, group=group)
    gradients: list[Tensor] = []
    for parameter, used_by in zip(parameters, users.tolist(), strict=True):
        if not used_by:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradients.append(local(parameter.grad))
    sum_tensors(gradients, group, divisor)


def sum_tensors(tensors: Sequence[Tensor], group: dist.ProcessGroup, divisor: int = 1) -> None:
    """Sum tensors in place over `group`, in buckets, and divide; communicates, on every rank of it."""
    for bucket in in_buckets(tensors):
        flat = torch.cat([tensor.flatten() for tensor in bucket])
        dist.all_reduce(flat, group=group)
        if divisor != 1:
            flat /= divisor
        pieces = flat.split([tensor.numel() for tensor in bucket])
        for tensor, piece in zip(bucket, pieces, strict=True):
            tensor.copy_(piece.view_as(tensor))


def local(tensor: Tensor) -> Tensor:
    """Return this rank's piece of a tensor, which is the tensor itself unless it is cut."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
