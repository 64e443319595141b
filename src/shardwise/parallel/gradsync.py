"""Gradient synchronization over data-parallel ranks, and the norm of the full gradient."""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardwise.errors import JobError, some_of
from shardwise.parallel.collectives import in_buckets
from shardwise.torch_private.dispatch import multiply_all, norms_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import Tensor, nn
    from torch.distributed.fsdp import FSDPModule
    from torch.nn.parallel import DistributedDataParallel

    from shardwise.layout import Layout
    from shardwise.parallel.sharded import ReducedList


class GradSync(Protocol):
    """Protocol for objects that sum gradients over data-parallel ranks."""

    gain: int
    """Factor by which to multiply the loss to obtain summed gradients: dp_size if the collective averages, else 1."""

    def accumulate(self) -> AbstractContextManager[object]:
        """Return a context that defers sync, for forward and backward of every micro-batch except the last."""

    def no_sync(self, *, is_last: bool) -> AbstractContextManager[object]:
        """Return a context for a backward of the first step, in which a rank may compute no gradient for a parameter.

        `is_last` is whether the backward is that of the last micro-batch.
        """

    def finish_deferred(self) -> None:
        """Sum the gradients that `no_sync` deferred. Communicates over the group; call on every rank."""

    def has_gradient(self, parameter: nn.Parameter) -> bool:
        """Return whether this rank computed a gradient; call in the first step, before `finish_deferred`."""

    def finish(self) -> None:
        """Sum the remaining gradients. Communicates; call once per step on every rank, after the last backward."""

    def finish_step(self, number: int) -> None:
        """Synchronize independently trained replicas if step `number` ends a round; communicates in that case."""

    def state(self) -> dict[str, Tensor]:
        """Return the tensors that a checkpoint must contain to resume."""


class NoSync:
    """No synchronization, for a single data-parallel rank, whose gradient is the full gradient."""

    gain = 1

    def accumulate(self) -> AbstractContextManager[object]:
        """Return an empty context, because gradients are not synchronized."""
        return nullcontext()

    def no_sync(self, *, is_last: bool) -> AbstractContextManager[object]:  # noqa: ARG002 - a method of GradSync
        """Return an empty context, because gradients are not synchronized."""
        return nullcontext()

    def finish_deferred(self) -> None:
        """Do nothing, because `no_sync` deferred no gradients."""

    def has_gradient(self, parameter: nn.Parameter) -> bool:
        """Return whether `parameter.grad` is set."""
        return parameter.grad is not None

    def finish(self) -> None:
        """Do nothing, because the gradient is complete."""

    def finish_step(self, number: int) -> None:
        """Do nothing, because there are no replicas."""

    def state(self) -> dict[str, Tensor]:
        """Return an empty dict."""
        return {}


class ReplicaSync(NoSync):
    """Gradient averaging by DDP, which communicates during every backward outside `no_sync`."""

    def __init__(self, model: DistributedDataParallel, *, every: bool) -> None:
        """Synchronize a DDP model; with `every`, average gradients after each micro-batch instead of once per step."""
        self._model = model
        self._every = every
        self.gain = dist.get_world_size(model.process_group)
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._reached: set[int] = set()
        # With find_unused_parameters, DDP writes averaged gradients to unused parameters when the first backward ends.
        watched = self._parameters if model.find_unused_parameters else []
        self._watches = [parameter.register_post_accumulate_grad_hook(self._reach) for parameter in watched]

    def accumulate(self) -> AbstractContextManager[object]:
        """Return DDP's `no_sync`, or a null context if gradients are averaged after every micro-batch."""
        return nullcontext() if self._every else self._model.no_sync()

    def no_sync(self, *, is_last: bool) -> AbstractContextManager[object]:  # noqa: ARG002 - a method of GradSync
        """Return DDP's `no_sync`, or an empty context if DDP searches for unused parameters.

        DDP records which parameters a backward without sync used, and expects their gradients in the next backward.
        """
        return nullcontext() if self._model.find_unused_parameters else self._model.no_sync()

    def finish_deferred(self) -> None:
        """Average the deferred gradients. Communicates over DDP's group; call on every rank."""
        if not self._model.find_unused_parameters:
            sum_gradients(self._parameters, self._model.process_group, divisor=self.gain)

    def _reach(self, parameter: Tensor) -> None:
        self._reached.add(id(parameter))

    def has_gradient(self, parameter: nn.Parameter) -> bool:
        """Return whether this rank's backward computed a gradient of `parameter`."""
        if not self._watches:
            return parameter.grad is not None
        return id(parameter) in self._reached

    def finish(self) -> None:
        """Raise JobError if this rank did not use a parameter, because other ranks wait for the parameter's bucket."""
        while self._watches:
            self._watches.pop().remove()
        if self._model.find_unused_parameters or self._model.static_graph:
            return
        unused = []
        for name, parameter in self._model.module.named_parameters():
            if parameter.requires_grad and parameter.grad is None:
                unused.append(name)
        if not unused:
            return
        if len(unused) < len(self._parameters):  # a backward without any gradient communicates nothing
            raise JobError(
                f"rank {dist.get_rank()} computed no gradient for parameters that had one in the first step"
                f" ({some_of(unused)}), but DDP on the other ranks waits for these gradients",
                code="train.unused-parameters",
                fix="use the parameters in every step, or pass --set communication.find_unused_parameters=true",
            )


class ShardSync(NoSync):
    """Gradient reduce-scatter by FSDP2 during backward; in `accumulate`, FSDP2 accumulates unsharded gradients."""

    def __init__(
        self,
        models: Sequence[FSDPModule],
        reduced: ReducedList,
        *,
        every: bool,
        replicated: Sequence[nn.Parameter],
        group: dist.ProcessGroup | None,
    ) -> None:
        """Synchronize `models`, the root FSDP2 units of this rank, and sum gradients of `replicated` over `group`.

        `every` reduces gradients after each micro-batch, which needs less memory and more communication.
        """
        self._models = models
        self._reduced = reduced
        self._every = every
        self._replicated = replicated
        self._group = group

    def accumulate(self) -> AbstractContextManager[object]:
        """Return a context without reduction, or an empty context if gradients are reduced after every micro-batch."""
        return nullcontext() if self._every else without_reduction(self._models)

    def no_sync(self, *, is_last: bool) -> AbstractContextManager[object]:
        """Return the context of `accumulate`; the last backward reduces, with zeros for unused parameters."""
        return nullcontext() if is_last else self.accumulate()

    def has_gradient(self, parameter: nn.Parameter) -> bool:
        """Return whether this rank computed a gradient; a sharded gradient exists on every rank after reduction."""
        return self._reduced.is_used(parameter) or (not isinstance(parameter, DTensor) and parameter.grad is not None)

    def finish(self) -> None:
        """Remove gradients that no rank computed, and sum the gradients of replicated parameters; communicates."""
        self._reduced.finish()
        if self._replicated and self._group is not None:
            sum_gradients(self._replicated, self._group)


@contextmanager
def without_reduction(models: Sequence[FSDPModule]) -> Iterator[None]:
    """Make FSDP2 accumulate unsharded gradients in this context; the next backward outside the context reduces them."""
    for model in models:
        model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        for model in models:
            model.set_requires_gradient_sync(True)


class SummedSync(NoSync):
    """All-reduce of all gradients after the last backward.

    For pipeline stages, tensor-parallel shards, and gradients of bf16 parameters that are accumulated in fp32.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, dtype: torch.dtype | None) -> None:
        """Sum the gradients of `parameters` over `group`, in `dtype` or, if None, in the dtype of each gradient."""
        self._parameters = parameters
        self._group = group
        self._dtype = dtype

    def finish(self) -> None:
        """Sum all gradients. Communicates over the group; call on every rank."""
        sum_gradients(self._parameters, self._group, dtype=self._dtype)


def sum_gradients(
    parameters: Sequence[nn.Parameter],
    group: dist.ProcessGroup,
    divisor: int = 1,
    dtype: torch.dtype | None = None,
) -> None:
    """Sum gradients over `group` in buckets and divide by `divisor`; communicates over `group`.

    Call on every rank. `dtype` is that of the all-reduce, by default the dtype of each gradient. If no rank has a
    gradient for a parameter, its gradient stays None, so that the optimizer skips the parameter as in one process.
    """
    device = local(parameters[0]).device
    users = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.float32, device=device)
    dist.all_reduce(users, group=group)
    gradients: list[Tensor] = []
    for parameter, used_by in zip(parameters, users.tolist(), strict=True):
        if not used_by:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
        gradients.append(local(parameter.grad))
    sum_tensors(gradients, group, divisor, dtype)


def sum_tensors(
    tensors: Sequence[Tensor], group: dist.ProcessGroup, divisor: int = 1, dtype: torch.dtype | None = None
) -> None:
    """Sum tensors in place over `group` in buckets of `dtype` and divide by `divisor`; communicates over `group`."""
    for bucket in in_buckets(tensors):
        flat = torch.cat([tensor.flatten() for tensor in bucket]).to(dtype)
        dist.all_reduce(flat, group=group)
        if divisor != 1:
            flat /= divisor
        pieces = flat.split([tensor.numel() for tensor in bucket])
        for tensor, piece in zip(bucket, pieces, strict=True):
            tensor.copy_(piece.view_as(tensor))


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# The norm of the full gradient, which may be replicated, sharded, or on other pipeline stages.


class GradNorm:
    """Computes the gradient norm over all parameters of the model and scales this rank's gradients."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        *,
        layout: Layout,
        sharded_axes: Sequence[str],
        group: dist.ProcessGroup | None,
        device: torch.device,
        copies: Iterable[nn.Parameter] = (),
    ) -> None:
        """Create a norm over `group`, the ranks that share one model; None if this rank stores the full model.

        `sharded_axes` are the mesh axes that may shard a parameter. `copies` are parameters that another rank of the
        group counts.
        """
        self._parameters = parameters
        self._group = group
        # If several ranks of the group have the same shard, each contributes its fraction of the square.
        self._shares = [1.0 / _copies(parameter, layout, sharded_axes) for parameter in parameters]
        uncounted = {id(parameter) for parameter in copies}
        for index, parameter in enumerate(parameters):
            if id(parameter) in uncounted:
                self._shares[index] = 0.0
        self._device = device

    @property
    def is_local(self) -> bool:
        """Whether this rank has the full gradient."""
        return self._group is None

    def __call__(self) -> Tensor:
        """Return the gradient norm before clipping. Communicates over the group; call on every rank."""
        pieces: list[Tensor] = []
        shares: list[float] = []
        for parameter, share in zip(self._parameters, self._shares, strict=True):
            if parameter.grad is not None:
                pieces.append(local(parameter.grad))
                shares.append(share)
        if pieces:
            by_piece = norms_of(pieces)
            widest = max((norm.dtype for norm in by_piece), key=lambda dtype: dtype.itemsize)
            norms = torch.stack([norm.to(self._device, widest) for norm in by_piece])
        else:
            norms, shares = torch.zeros(1, device=self._device), [0.0]
        if self._group is None:
            alone: Tensor = torch.linalg.vector_norm(norms)
            return alone
        square = (norms.square() * torch.tensor(shares, dtype=norms.dtype, device=norms.device)).sum()
        dist.all_reduce(square, group=self._group)
        whole: Tensor = square.sqrt()
        return whole

    def scale(self, factor: Tensor) -> None:
        """Multiply every gradient by a factor that is equal on all ranks."""
        scale_gradients(self._parameters, factor)


def scale_gradients(parameters: Iterable[nn.Parameter], factor: Tensor) -> None:
    """Multiply this rank's shards of all gradients by a factor that is equal on all ranks."""
    pieces = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if pieces:
        multiply_all(pieces, factor.to(pieces[0].device))


def _copies(parameter: nn.Parameter, layout: Layout, sharded_axes: Sequence[str]) -> int:
    """Return the number of ranks along `sharded_axes` that store the same shard of `parameter`."""
    sharded = set()
    if isinstance(parameter, DTensor):
        names = parameter.device_mesh.mesh_dim_names or ()
        for name, placement in zip(names, parameter.placements, strict=True):
            if not placement.is_replicate():
                sharded.add(name)
    number = 1
    for axis in sharded_axes:
        if axis not in sharded:
            number *= int(getattr(layout, axis))
    return number
