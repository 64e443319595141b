"""Replicated parameters: DDP with every argument set by the plan, compressed gradients, and low communication."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd
from torch.nn.parallel import DistributedDataParallel

from shardwise.parallel.gradsync import local, sum_tensors
from shardwise.torch_private.modules import NormBase

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
    """Wrap `module` in DDP over `group`; called on every rank of it, which then all have rank 0's weights."""
    on_gpu = device.type == "cuda"
    # torch 2.13 renamed the argument; the old name warns there, the new one is unknown before.
    parameters = inspect.signature(DistributedDataParallel).parameters
    name = "forward_sync_buffers" if "forward_sync_buffers" in parameters else "broadcast_buffers"
    buffers: dict[str, Any] = {name: options.broadcast_buffers}
    model = DistributedDataParallel(
        module,
        device_ids=[device.index] if on_gpu else None,  # CPU modules refuse device_ids
        process_group=group,
        **buffers,
        bucket_cap_mb=options.bucket_mb,
        find_unused_parameters=options.find_unused_parameters,
        gradient_as_bucket_view=options.gradient_as_bucket_view,
        static_graph=options.static_graph,
    )
    compress(model, options)
    return model


# Compressed gradients for DDP: half precision on any backend, or low-rank PowerSGD; both change the numbers.


_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
_POWERSGD_START = 10
"""Steps with plain averages first: the error feedback needs gradients that have settled."""


def compress(model: DistributedDataParallel, options: Communication) -> None:
    """Have DDP send its buckets as the plan asks; called on every rank."""
    if dist.get_backend(model.process_group) == "fake":
        model.register_comm_hook(None, _unchanged_hook)  # DDP asserts on the fake group's own all-reduce
    elif options.compression in _HALF:
        # torch's own bf16 hook is refused by name on gloo; one without annotations is not looked at.
        model.register_comm_hook((model.process_group, _HALF[options.compression]), _half_hook)
    elif options.compression == "powersgd":
        state = powersgd.PowerSGDState(
            model.process_group, matrix_approximation_rank=4, start_powerSGD_iter=_POWERSGD_START
        )
        on_device = "nccl" in dist.get_backend(model.process_group)
        model.register_comm_hook(state, powersgd.powerSGD_hook if on_device else _powersgd_hook)


def _unchanged_hook(_, bucket):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202 - see `compress`
    """Send nothing: a fake world has nobody to send to."""
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def _half_hook(state, bucket):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202 - see `compress`
    """Average a bucket in half precision; communicates over the group in `state`."""
    group, dtype = state
    buffer = bucket.buffer()
    small = (buffer / dist.get_world_size(group)).to(dtype)  # divided first: fp16 ends at 65504
    work = dist.all_reduce(small, group=group, async_op=True)

    def widen(_: Any) -> Any:
        return buffer.copy_(small)

    return work.get_future().then(widen)


def _powersgd_hook(state, bucket):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202 - see `compress`
    """Average a bucket by PowerSGD and wait for it; communicates over the group in `state`.

    Its callbacks send again. nccl runs them in the order of calls; elsewhere they run when a message has come, between
    the buckets that `backward` begins meanwhile, in an order that each rank has for itself.
    """
    future = powersgd.powerSGD_hook(state, bucket)
    future.wait()
    return future


# Low communication: replicas train on their own for a round of steps, then an outer optimizer brings them together.


class OuterSync:
    """Local SGD and DiLoCo: gradients are summed within a replica only; replicas synchronize at the end of a round.

    There the outer optimizer, Nesterov's SGD, takes the mean over replicas of how far each went from the anchor, the
    weights they all began the round with, for its gradient; all go on from where it moves the anchor. Anchor and
    momentum are as large as the trained parameters each, and live where those are.
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
        """`inner` sums within a replica; `group` joins the ranks that have the same shard of every replica.

        `statistics` are averaged when replicas synchronize; `ends_round` returns whether they do after a step.
        """
        self._inner = inner
        self._group = group
        self._replicas = dist.get_world_size(group)
        # A feed counts what one replica reads and takes the others to count alike; a gradient is the replica's own.
        self.gain = inner.gain * self._replicas
        self._ends_round = ends_round
        self._statistics = statistics
        self._weights = [parameter.detach() for _, parameter in named]
        self._names = [name for name, _ in named]
        self._anchors = [torch.empty_like(weight) for weight in self._weights]
        self._optimizer = torch.optim.SGD(
            self._anchors, lr=options.outer_lr, momentum=options.outer_momentum, nesterov=options.outer_momentum > 0
        )
        if options.outer_momentum:  # made now rather than at the first sync, so that a checkpoint can fill it
            for anchor in self._anchors:
                self._optimizer.state[anchor]["momentum_buffer"] = torch.zeros_like(anchor)
        self._is_in_round = False

    def accumulate(self) -> AbstractContextManager[object]:
        """Keep back what is summed within a replica."""
        return self._inner.accumulate()

    def no_sync(self) -> AbstractContextManager[object]:
        """Keep back what is summed within a replica."""
        return self._inner.no_sync()

    def finish_held(self) -> None:
        """Sum within the replica what was kept back."""
        self._inner.finish_held()

    def has_gradient(self, parameter: nn.Parameter) -> bool:
        """Ask what sums within a replica."""
        return self._inner.has_gradient(parameter)

    @torch.no_grad()
    def finish(self) -> None:
        """Sum within the replica; the weights before the first update of a round are its anchor."""
        self._inner.finish()
        if not self._is_in_round:
            _copy(self._anchors, self._weights)
            self._is_in_round = True

    @torch.no_grad()
    def finish_step(self, number: int) -> None:
        """Communicate over the replicas if `number` updates end a round: move the anchor, and go on from there."""
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
        """The momentum, as outer_momentum/PARAMETER; between rounds, when it is saved, the weights are the anchor."""
        states: list[dict[str, Any]] = [self._optimizer.state.get(anchor, {}) for anchor in self._anchors]
        return {
            f"outer_momentum/{name}": state["momentum_buffer"]
            for name, state in zip(self._names, states, strict=True)
            if "momentum_buffer" in state
        }


def by_rounds(
    inner: GradSync,
    model: nn.Module,
    named: Sequence[tuple[str, nn.Parameter]],
    *,
    plan: Plan,
    place: MeshContext,
    ends_round: Callable[[int], bool],
) -> GradSync:
    """Return the sync of a plan whose replicas synchronize after rounds of steps; else `inner`."""
    mesh = place.axis("replicate")
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
