"""Noticing a rank that trains without a process group: it makes optimizer steps, and communicates with nobody."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from shardwise.runs.calls import ENOUGH_SEPARATE_STEPS

if TYPE_CHECKING:
    from shardwise.runs.calls import CallRing

OTHER_TRANSPORTS = (
    *("mpi4py", "horovod", "byteps", "bagua", "hivemind", "oneccl_bindings_for_pytorch"),
    *("jax", "mlx.core", "tensorflow", "ray", "dask", "cupy", "zmq"),
)
"""Modules through which ranks may synchronize gradients or weights where no process group of torch sees it."""


def record_separate_steps(ring: CallRing, world_size: int) -> None:
    """Count the first optimizer steps of this rank for as long as it communicates with nobody."""
    if world_size == 1:
        return
    from torch.optim.optimizer import register_optimizer_step_post_hook

    steps = 0

    def count(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
        import torch  # here: the module of optimizers is imported while torch itself still is

        nonlocal steps
        # A hook stays registered: to remove it would have torch.compile trace a compiled step again.
        if torch.compiler.is_compiling() or steps == ENOUGH_SEPARATE_STEPS:
            return
        if _communicates():
            steps = ENOUGH_SEPARATE_STEPS  # nothing more to look for
            ring.set_separate_steps(0)
        else:
            steps += 1
            ring.set_separate_steps(steps)

    register_optimizer_step_post_hook(count)


def _communicates() -> bool:
    """Whether this rank has, or may have, a way to synchronize what it trains with other ranks."""
    import torch.distributed as dist

    if any(name in sys.modules for name in OTHER_TRANSPORTS):
        return True
    if not dist.is_available():
        return False
    return dist.is_initialized() or _has_rpc_agent()


def _has_rpc_agent() -> bool:
    from torch.distributed import rpc

    return rpc.is_available() and rpc.api._is_current_rpc_agent_set()  # type: ignore[attr-defined]  # noqa: SLF001
