"""Gradient sync: when and how gradients are summed over ranks, and the norm of the whole gradient."""

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
    """Sums gradients over the ranks that read different samples."""

    gain: int
    """What a loss is multiplied with so that gradients come out as sums: dp_size where gradients are averaged."""

    def accumulate(self) -> AbstractContextManager[object]:
        """Enter around forward and backward of every micro-batch but the last, which sums as it goes."""

    def no_sync(self) -> AbstractContextManager[object]:
        """Enter around a forward and backward in which a missing gradient would leave other ranks waiting."""

    def finish_held(self) -> None:
        """Sum the gradients that `no_sync` kept back; communicates, on every rank."""

    def has_gradient(self, parameter: nn.Parameter) -> bool:
        """Whether this rank's own backward reached a parameter; asked after the first step's, before `finish_held`."""

    def finish(self) -> None:
        """Sum what backward has not; called once a step after the last backward, communicates."""

    def finish_step(self, number: int) -> None:
        """Bring together replicas that train on their own, if `number` updates end a round; then communicates."""

    def state(self) -> dict[str, Tensor]:
        """Return the tensors that a resumed training must find again."""


class NoSync:
    """One data-parallel rank: its gradient is the whole gradient."""

    gain = 1

    def accumulate(self) -> AbstractContextManager[object]:
        """Nothing to keep back."""
        return nullcontext()

    def no_sync(self) -> AbstractContextManager[object]:
        """Nothing to keep back."""
        return nullcontext()

    def finish_held(self) -> None:
        """Nothing was kept back."""

    def has_gradient(self, parameter: nn.Parameter) -> bool:
        """Look whether it has one."""
        return parameter.grad is not None

    def finish(self) -> None:
        """Nothing to sum."""

    def finish_step(self, number: int) -> None:
        """Nothing is apart."""

    def state(self) -> dict[str, Tensor]:
        """There is none."""
        return {}


class ReplicaSync(NoSync):
    """DDP averages during every backward outside of `no_sync`."""

    def __init__(self, model: DistributedDataParallel, *, every: bool) -> None:
        """`every` sums after each micro-batch instead of once per step."""
        self._model = model
        self._every = every
        self.gain = dist.get_world_size(model.process_group)
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._reached: set[int] = set()
        # Where DDP searches for unused parameters, the others' gradients are in theirs when the first backward ends.
        watched = self._parameters if model.find_unused_parameters else []
        self._watches = [parameter.register_post_accumulate_grad_hook(self._reach) for parameter in watched]

    def accumulate(self) -> AbstractContextManager[object]:
        """Keep DDP's all-reduce back, unless every micro-batch is to be summed."""
        return nullcontext() if self._every else self._model.no_sync()

    def no_sync(self) -> AbstractContextManager[object]:
        """Keep DDP's all-reduce back, unless it searches for unused parameters itself.

        DDP remembers which parameters a backward without sync used, and asks for their gradients in the next one.
        """
        return nullcontext() if self._model.find_unused_parameters else self._model.no_sync()

    def finish_held(self) -> None:
        """Average what was kept back; communicates over DDP's group."""
        if not self._model.find_unused_parameters:
            sum_gradients(self._parameters, self._model.process_group, divisor=self.gain)

    def _reach(self, parameter: Tensor) -> None:
        self._reached.add(id(parameter))

    def has_gradient(self, parameter: nn.Parameter) -> bool:
        """Look whether backward came by."""
        return id(parameter) in self._reached if self._watches else parameter.grad is not None

    def finish(self) -> None:
        """Refuse parameters that this rank did not use: other ranks wait for their buckets, which it never sent."""
        while self._watches:
            self._watches.pop().remove()
        if self._model.find_unused_parameters or self._model.static_graph:
            return
        if all(parameter.grad is not None for parameter in self._parameters):
            return
        named = self._model.module.named_parameters()
        unused = [name for name, each in named if each.requires_grad and each.grad is None]
        if len(unused) < len(self._parameters):  # without any, nothing was sent at all
            raise JobError(
                f"parameters that got gradients in the first step got none on rank {dist.get_rank()}"
                f" ({some_of(unused)}), and DDP waits for them on the other ranks",
                code="train.unused-parameters",
                fix="use them in every step, or --set communication.find_unused_parameters=true",
            )


class ShardSync(NoSync):
    """FSDP2 sums and shards gradients during backward; without that it keeps whole gradients for the next one."""

    def __init__(
        self,
        models: Sequence[FSDPModule],
        reduced: ReducedList,
        *,
        every: bool,
        replicated: Sequence[nn.Parameter],
        group: dist.ProcessGroup | None,
    ) -> None:
        """`every` reduces after each micro-batch: less memory, more traffic.

        `models` are the root units of this rank; the gradients of `replicated` parameters are summed over `group`.
        """
        self._models = models
        self._reduced = reduced
        self._every = every
        self._replicated = replicated
        self._group = group

    def accumulate(self) -> AbstractContextManager[object]:
        """Disable gradient synchronization in this context, unless gradients are reduced after every micro-batch."""
        return nullcontext() if self._every else without_reduction(self._models)

    def has_gradient(self, parameter: nn.Parameter) -> bool:
        """Ask what was reduced: a sharded gradient is there on every rank."""
        return self._reduced.is_used(parameter) or (not isinstance(parameter, DTensor) and parameter.grad is not None)

    def finish(self) -> None:
        """Leave no gradient where no rank has one, and sum those of replicated parameters; communicates."""
        self._reduced.finish()
        if self._replicated and self._group is not None:
            sum_gradients(self._replicated, self._group)


@contextmanager
def without_reduction(models: Sequence[FSDPModule]) -> Iterator[None]:
    """Have FSDP2 keep whole gradients of the backward passes in here; the next one outside reduces all of them."""
    for model in models:
        model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        for model in models:
            model.set_requires_gradient_sync(True)


class SummedSync(NoSync):
    """Sums all gradients after the last backward, where wrappers cannot: pipeline stages, tensor-parallel shards."""

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
    """Return this rank's piece of a tensor, which is the tensor itself unless it is sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# The norm of the whole gradient, however its pieces are spread: whole, sharded, on other stages.


class GradNorm:
    """Computes the norm over every parameter of the model once, and scales this rank's pieces."""

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
        """`sharded_axes` are those that may shard a parameter; `group` joins the ranks that together have one model.

        None: this rank has all of it. `copies` are those of `parameters` that another rank of the group counts.
        """
        self._parameters = parameters
        self._group = group
        # A shard that several ranks of the group have counts once: each brings its share of the square.
        self._shares = [1.0 / _copies(parameter, layout, sharded_axes) for parameter in parameters]
        uncounted = {id(parameter) for parameter in copies}
        for place, parameter in enumerate(parameters):
            if id(parameter) in uncounted:
                self._shares[place] = 0.0
        self._device = device

    @property
    def is_local(self) -> bool:
        """Whether this rank has the whole gradient by itself."""
        return self._group is None

    def __call__(self) -> Tensor:
        """Return the norm before any clipping; communicates over the group."""
        used = [
            (local(p.grad), share)
            for p, share in zip(self._parameters, self._shares, strict=True)
            if p.grad is not None
        ]
        if not used:
            norms, shares = torch.zeros(1, device=self._device), [0.0]
        else:
            pieces, shares = [piece for piece, _ in used], [share for _, share in used]
            by_piece = norms_of(pieces)
            widest = max((norm.dtype for norm in by_piece), key=lambda dtype: dtype.itemsize)
            norms = torch.stack([norm.to(self._device, widest) for norm in by_piece])
        if self._group is None:
            alone: Tensor = torch.linalg.vector_norm(norms)
            return alone
        square = (norms.square() * torch.tensor(shares, dtype=norms.dtype, device=norms.device)).sum()
        dist.all_reduce(square, group=self._group)
        whole: Tensor = square.sqrt()
        return whole

    def scale(self, factor: Tensor) -> None:
        """Multiply every gradient with a factor that is equal on all ranks."""
        scale_gradients(self._parameters, factor)


def scale_gradients(parameters: Iterable[nn.Parameter], factor: Tensor) -> None:
    """Multiply this rank's shards of all gradients with a factor that is equal on all ranks."""
    pieces = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if pieces:
        multiply_all(pieces, factor.to(pieces[0].device))


def _copies(parameter: nn.Parameter, layout: Layout, sharded_axes: Sequence[str]) -> int:
    """How many ranks along the axes that shard parameters have the same shard of this one."""
    sharded = set()
    if isinstance(parameter, DTensor):
        names = parameter.device_mesh.mesh_dim_names or ()
        sharded = {
            name for name, placement in zip(names, parameter.placements, strict=True) if not placement.is_replicate()
        }
    number = 1
    for axis in sharded_axes:
        number *= 1 if axis in sharded else int(getattr(layout, axis))
    return number
