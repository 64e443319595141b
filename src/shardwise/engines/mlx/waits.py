"""Where a rank begins to sum with others over MLX's ring, and where it waits for that: the recorder listens here.

Callers use `begin` and `finish` as attributes of this module, so that `record` can wrap them.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from shardwise.runs.calls import GroupKey, Operation, pack

if TYPE_CHECKING:
    from shardwise.runs.calls import CallRing

_STEP = Operation("the sums of step", "", "", "")


def begin(step: int, *arrays: Any) -> None:  # noqa: ARG001 - for the recorder
    """Let MLX begin to compute what a step ends with, or trees of it, without waiting; communicates over its group."""
    mx.async_eval(*arrays)  # type: ignore[no-untyped-call]


def finish(step: int, array: mx.array) -> None:  # noqa: ARG001
    """Wait for an array of a step that was begun, and so for the ranks that it is summed over."""
    mx.eval(array)


def record(ring: CallRing, world_size: int) -> None:
    """Record each step as one call of all ranks: no process group of torch sees MLX's sums over ranks.

    Wraps `begin` and `finish` of this module; a rank alone waits for nobody.
    """
    if world_size == 1:
        return
    waits: Any = sys.modules[__name__]
    what = pack(ring.intern(GroupKey("mlx", 0, tuple(range(world_size)))), ring.intern(_STEP), 0)
    under_way: dict[int, int] = {}
    begin, finish = waits.begin, waits.finish

    @functools.wraps(begin)
    def begun(step: int, *arrays: Any) -> None:
        number = under_way[step] = ring.issue(step + 1, what)
        begin(step, *arrays)
        ring.release(number)

    @functools.wraps(finish)
    def finished(step: int, array: Any) -> None:
        number = under_way.pop(step, None)
        if number is None:
            finish(step, array)
            return
        ring.wait(number)
        finish(step, array)
        ring.leave(number)  # one that failed is never left: it is where its rank failed

    waits.begin, waits.finish = begun, finished
