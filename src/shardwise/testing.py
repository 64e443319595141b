"""Test utilities for distributed code: functions run on forked gloo ranks, and fake process groups."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.dist import fake_world, local_world
from shardwise.launcher.local.function import run_forked
from shardwise.torch_private.distributed import import_dynamo

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["fake_world", "run_ranks"]


def run_ranks(fn: Callable[..., Any], nproc: int, *args: Any, timeout_s: float = 60.0, **kwargs: Any) -> list[Any]:
    """Run `fn(world, *args, **kwargs)` on `nproc` forked gloo ranks and return the results by rank.

    If a rank raises, the first exception is raised with the traceback of its rank. Ranks that are still running after
    `timeout_s` are killed, and the error contains their stacks. Torch is imported only once, in this process.
    """
    import_dynamo()  # otherwise the first DDP imports it on every rank (800 modules, 1.5 s)
    with tempfile.TemporaryDirectory(prefix="shardwise-") as folder:
        store = Path(folder) / "store"

        def body(rank: int) -> Any:
            with local_world(store, rank, nproc, timeout_s=timeout_s) as me:
                return fn(me, *args, **kwargs)

        return run_forked(body, nproc, timeout_s=timeout_s)
