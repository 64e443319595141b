"""Replicated parameters with DDP, gradient compression, and local SGD or DiLoCo between replicas."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd
from torch.nn.parallel import DistributedDataParallel

from shardwise.parallel.gradsync import local, sum_tensors
from shardwise.torch_private.dispatch import NormBase

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor, nn

    from shardwise.parallel.apply import MeshContext
    from shardwise.parallel.gradsync import GradSync
    from shardwise.plans import Communication, Plan


def replicate(
    module: nn.Module, group: dist.ProcessGroup, device: torch.device, options: Communication
) -> DistributedDataParallel:
    """Wrap `module` in DDP over `group` and broadcast rank 0's weights; call on every rank of `group`."""
    on_gpu = device.type == "cuda"
    # torch 2.13 renamed the argument: the old name warns there, and older versions do not accept the new one.
    parameters = inspect.signature(DistributedDataParallel).parameters
    name = "forward_sync_buffers" if "forward_sync_buffers" in parameters else "broadcast_buffers"
    buffers: dict[str, Any] = {name: options.broadcast_buffers}
    model = DistributedDataParallel(
        module,
        device_ids=[device.index] if on_gpu else None,  # DDP rejects device_ids for CPU modules
        process_group=group,
        **buffers,
        bucket_cap_mb=options.bucket_mb,
        find_unused_parameters=options.find_unused_parameters,
        gradient_as_bucket_view=options.gradient_as_bucket_view,
        static_graph=options.static_graph,
    )
    compress(model, options)
    return model


# Gradient compression for DDP: half precision on any backend, or low-rank PowerSGD. Both change the gradients.


_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
_POWERSGD_START = 10
"""Number of initial steps without compression, since PowerSGD's error feedback requires stable gradients."""


def compress(model: DistributedDataParallel, options: Communication) -> None:
    """Register the communication hook for the plan's compression; call on every rank."""
    if dist.get_backend(model.process_group) == "fake":
        model.register_comm_hook(None, _unchanged_hook)  # DDP does not support the all-reduce of the fake backend
    elif options.compression in _HALF:
        # DDP rejects torch's bf16 hook on gloo by its name, but accepts hooks without annotations.
        model.register_comm_hook((model.process_group, _HALF[options.compression]), _half_hook)
    elif options.compression == "powersgd":
        state = powersgd.PowerSGDState(
            model.process_group, matrix_approximation_rank=4, start_powerSGD_iter=_POWERSGD_START
        )
        on_device = "nccl" in dist.get_backend(model.process_group)
        model.register_comm_hook(state, powersgd.powerSGD_hook if on_device else _powersgd_hook)


def _unchanged_hook(_, bucket):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202 - see `compress`
    """Return the bucket unchanged, because a fake world has only one real rank."""
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def _half_hook(state, bucket):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202 - see `compress`
    """Average a bucket in half precision; communicates over the group in `state`."""
    group, dtype = state
    buffer = bucket.buffer()
    small = (buffer / dist.get_world_size(group)).to(dtype)  # divided first: the largest fp16 is 65504
    work = dist.all_reduce(small, group=group, async_op=True)

    def widen(_: Any) -> Any:
        return buffer.copy_(small)

    return work.get_future().then(widen)


def _powersgd_hook(state, bucket):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202 - see `compress`
    """Average a bucket with PowerSGD and wait for the result; communicates over the group in `state`.

    PowerSGD's callbacks communicate again. NCCL runs them in the order of calls. Other backends run them when a message
    arrives, interleaved with new buckets of backward, in an order that differs between ranks.
    """
    future = powersgd.powerSGD_hook(state, bucket)
    future.wait()
    return future


# Local SGD and DiLoCo: replicas train independently for a round of steps, then an outer optimizer averages them.


class OuterSync:
    """Synchronization of local SGD and DiLoCo: sums gradients within a replica, and averages replicas after each round.

    The outer optimizer is SGD with Nesterov momentum. The anchor is the weights at the start of the round. The outer
    gradient is the mean over replicas of anchor minus weights, and all replicas continue from the updated anchor.
    Anchor and momentum each have the size of the trained parameters and are on the same device.
    """

    def __init__(
        self,
        inner: GradSync,
        named: Sequence[tuple[str, nn.Parameter]],
        statistics: Sequence[Tensor],
        group: dist.ProcessGroup,
        *,
        options: Communication,
        ends_round: Callable[[int], bool],
    ) -> None:
        """Create a sync over `group`, the ranks with this shard, one per replica; `inner` sums within a replica.

        `statistics` are averaged when replicas synchronize, after each step for which `ends_round` returns True.
        """
        self._inner = inner
        self._group = group
        self._replicas = dist.get_world_size(group)
        # The loss normalizer is the count over all replicas, which assumes equal counts, but gradients are per replica.
        self.gain = inner.gain * self._replicas
        self._ends_round = ends_round
        self._statistics = statistics
        self._weights = [parameter.detach() for _, parameter in named]
        self._names = [name for name, _ in named]
        self._anchors = [torch.empty_like(weight) for weight in self._weights]
        self._optimizer = torch.optim.SGD(
            self._anchors, lr=options.outer_lr, momentum=options.outer_momentum, nesterov=options.outer_momentum > 0
        )
        if options.outer_momentum:  # created here, not at the first sync, so that a checkpoint can restore it
            for anchor in self._anchors:
                self._optimizer.state[anchor]["momentum_buffer"] = torch.zeros_like(anchor)
        self._is_in_round = False

    def accumulate(self) -> AbstractContextManager[object]:
        """Return the context of `inner`, in which sync within a replica is deferred."""
        return self._inner.accumulate()

    def no_sync(self, *, is_last: bool) -> AbstractContextManager[object]:
        """Return the context of `inner`, in which sync within a replica is deferred."""
        return self._inner.no_sync(is_last=is_last)

    def finish_deferred(self) -> None:
        """Sum deferred gradients within the replica; communicates over its ranks."""
        self._inner.finish_deferred()

    def has_gradient(self, parameter: nn.Parameter) -> bool:
        """Return whether this rank's backward computed a gradient of `parameter`."""
        return self._inner.has_gradient(parameter)

    @torch.no_grad()
    def finish(self) -> None:
        """Sum gradients within the replica, and copy the weights to the anchor before the first update of a round."""
        self._inner.finish()
        if not self._is_in_round:
            _copy(self._anchors, self._weights)
            self._is_in_round = True

    @torch.no_grad()
    def finish_step(self, number: int) -> None:
        """Synchronize replicas if step `number` ends a round: update the anchor and copy it to the weights.

        Communicates over the replicas in that case; call on every rank.
        """
        if not self._ends_round(number):
            return
        moves = [anchor - weight for anchor, weight in zip(self._anchors, self._weights, strict=True)]
        sum_tensors([local(move) for move in moves], self._group, self._replicas)
        for anchor, move in zip(self._anchors, moves, strict=True):
            anchor.grad = move
        self._optimizer.step()
        self._optimizer.zero_grad()
        _copy(self._weights, self._anchors)
        sum_tensors(self._statistics, self._group, self._replicas)
        self._is_in_round = False

    def state(self) -> dict[str, Tensor]:
        """Return the outer momentum (outer_momentum/PARAMETER); the anchor is not saved, as it equals the weights."""
        found = {}
        for name, anchor in zip(self._names, self._anchors, strict=True):
            momentum = self._optimizer.state.get(anchor, {}).get("momentum_buffer")
            if momentum is not None:
                found[f"outer_momentum/{name}"] = momentum
        return found


def sync_by_rounds(
    inner: GradSync,
    model: nn.Module,
    named: Sequence[tuple[str, nn.Parameter]],
    *,
    plan: Plan,
    context: MeshContext,
    ends_round: Callable[[int], bool],
) -> GradSync:
    """Return an `OuterSync` if the plan's replicas synchronize after rounds of steps, else `inner`."""
    mesh = context.axis("replicate")
    if plan.communication.sync_every == 1 or mesh is None:
        return inner
    statistics: list[Tensor] = []
    for module in model.modules():
        if isinstance(module, NormBase):
            statistics += [buffer for buffer in module.buffers() if buffer.is_floating_point()]
    return OuterSync(inner, named, statistics, mesh.get_group(), options=plan.communication, ends_round=ends_round)


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)
