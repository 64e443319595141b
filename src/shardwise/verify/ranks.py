"""Ranks for one plan after another: forks of this process that meet in a file."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from shardwise.launch import run_forked
from shardwise.world import local_world

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from shardwise.world import World

T = TypeVar("T")

_PRELOAD = (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.pipelining",
)
"""What ranks would import each for itself, up to 800 modules in 1.5 s."""


def preload(names: Iterable[str] = _PRELOAD) -> None:
    """Import once, before a fork, what every rank would import for itself."""
    for name in names:
        with contextlib.suppress(Exception):  # what cannot be imported here may still be imported there
            importlib.import_module(name)


def on_ranks(fn: Callable[[World], T], nproc: int, *, timeout_s: float) -> list[T]:
    """Run `fn(world)` on `nproc` forked gloo ranks on the CPU and return its results by rank.

    The first failing rank's exception is raised here, with the last line that any rank wrote as a note; else ranks
    are silent. This process must not have run tensor operations on several threads before: those threads do not
    survive a fork.
    """
    with tempfile.TemporaryDirectory(prefix="shardwise-") as name:
        folder = Path(name)

        def body(rank: int) -> T:
            _write_to(folder / f"{rank}.log")
            with local_world(folder / "store", rank, nproc, timeout_s=timeout_s) as here:
                return fn(here)

        try:
            return run_forked(body, nproc, timeout_s=timeout_s)
        except Exception as error:
            lines = [line for log in sorted(folder.glob("*.log")) for line in log.read_text().splitlines() if line]
            error.add_note(f"last words: {lines[-1] if lines else 'none'}")
            raise


def _write_to(path: Path) -> None:
    """Send what this process writes, also from native code, to a file."""
    with path.open("w") as log:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
