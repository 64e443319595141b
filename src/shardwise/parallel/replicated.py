"""Replicated parameters: DistributedDataParallel with every argument settled by the plan."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from torch.nn.parallel import DistributedDataParallel

from shardwise.parallel.compression import compress

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch import nn

    from shardwise.plans import Communication


def replicate(
    module: nn.Module, group: dist.ProcessGroup, device: torch.device, options: Communication
) -> DistributedDataParallel:
    """Wrap `module` in DDP over `group`; called on every rank of it, which then all hold rank 0's weights."""
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
