"""Recording the steps of MLX, whose sums over ranks no process group of torch sees: each is one call of all ranks."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from shardwise.runs.calls import GroupKey, Operation, pack

if TYPE_CHECKING:
    from shardwise.runs.calls import CallRing

WAITS = "shardwise.engines.mlx.waits"
"""The module through which steps of MLX begin and are waited for."""
_STEP = Operation("the sums of step", "", "", "")


def record_steps(ring: CallRing, world_size: int, waits: Any) -> None:
    """Wrap `begin` and `finish` of the module `waits`; a rank alone waits for nobody."""
    if world_size == 1:
        return
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
        ring.leave(number)  # one that failed is never left: it is where its rank came to grief

    waits.begin, waits.finish = begun, finished
