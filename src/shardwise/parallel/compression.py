"""Compressed gradients for DDP: half precision on any backend, or low-rank PowerSGD; both change the numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

    from shardwise.plans import Communication

_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
_POWERSGD_START = 10
"""Steps with plain averages first: the error feedback needs gradients that have settled."""


def compress(model: DistributedDataParallel, options: Communication) -> None:
    """Have DDP send its buckets as the plan says; called on every rank."""
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
