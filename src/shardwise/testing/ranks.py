"""Real gloo ranks in a test, for one line and a fraction of a second."""

from __future__ import annotations

import contextlib
import importlib
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.dist import local_world
from shardwise.launcher.local.function import run_forked
from shardwise.torch_private.runtime import DYNAMO

if TYPE_CHECKING:
    from collections.abc import Callable


def run_ranks(fn: Callable[..., Any], nproc: int, *args: Any, timeout_s: float = 60.0, **kwargs: Any) -> list[Any]:
    """Run `fn(world, *args, **kwargs)` on `nproc` forked gloo ranks and return its results by rank.

    The first failing rank's exception is raised with its traceback; a rank that is stuck at the time limit is
    ended and its stacks are shown. Torch is imported once, by this process.
    """
    _preload()
    with tempfile.TemporaryDirectory(prefix="shardwise-") as folder:
        store = Path(folder) / "store"

        def body(rank: int) -> Any:
            with local_world(store, rank, nproc, timeout_s=timeout_s) as me:
                return fn(me, *args, **kwargs)

        return run_forked(body, nproc, timeout_s=timeout_s)


def _preload() -> None:
    """Import once, before the fork, what the first DDP would import on every rank: 800 modules, 1.5 s."""
    with contextlib.suppress(ImportError):
        importlib.import_module(DYNAMO)
