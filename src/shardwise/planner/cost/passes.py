"""One forward or backward pass of a stage: compute beside the collectives that gather weights and sum gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from shardwise.planner.cost.events import Task, run_streams

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

COMPUTE, WIRE = "compute", "communication"


class Unit(NamedTuple):
    """What is gathered, computed and summed as one: a block, or what stands before or after the blocks. Seconds."""

    name: str
    forward: float
    backward: float
    gather: float = 0.0
    """Before its forward pass; 0 where weights are whole."""
    gather_again: float = 0.0
    """Before its backward pass."""
    reduce: float = 0.0
    """After its backward pass."""
    gather_copy: float = 0.0
    """Compute's share of a gather: out of the buffer into weights."""
    reduce_copy: float = 0.0


class Pass(NamedTuple):
    """How one pass went. Seconds."""

    seconds: float
    busy: float
    """Compute."""
    gathering: float
    """Communication before compute, hidden or not."""
    reducing: float

    @property
    def exposed(self) -> float:
        """Compute waiting for communication."""
        return self.seconds - self.busy

    @property
    def hidden(self) -> float:
        """Communication behind compute."""
        return max(0.0, self.gathering + self.reducing - self.exposed)


def forward_tasks(units: Sequence[Unit], *, prefetch: int, gathers: bool) -> list[Task]:
    """Return the tasks of a forward pass: each unit gathered `prefetch` units ahead of its use."""
    tasks: list[Task] = []
    computed: list[int] = []
    for place, unit in enumerate(units):
        needed: tuple[int, ...] = ()
        copy = 0.0
        if gathers and unit.gather:
            behind = place - prefetch - 1
            tasks.append(Task(WIRE, f"gather {unit.name}", unit.gather, (computed[behind],) if behind >= 0 else ()))
            needed, copy = (len(tasks) - 1,), unit.gather_copy
        tasks.append(Task(COMPUTE, f"forward {unit.name}", unit.forward + copy, needed))
        computed.append(len(tasks) - 1)
    return tasks


def backward_tasks(units: Sequence[Unit], *, prefetch: int, gathers: bool, reduces: bool) -> list[Task]:
    """Return the tasks of a backward pass: the next unit's gather is sent off before this one's gradients are."""
    tasks: list[Task] = []
    computed: list[int] = []
    waiting: Task | None = None
    for place, unit in enumerate(reversed(units)):
        needed: tuple[int, ...] = ()
        seconds = unit.backward
        if gathers and unit.gather_again:
            behind = place - prefetch - 1
            after = (computed[behind],) if behind >= 0 else ()
            tasks.append(Task(WIRE, f"gather {unit.name}", unit.gather_again, after))
            needed, seconds = (len(tasks) - 1,), seconds + unit.gather_copy
        if waiting is not None:
            tasks.append(waiting)
            waiting = None
        if reduces and unit.reduce:
            seconds += unit.reduce_copy
        tasks.append(Task(COMPUTE, f"backward {unit.name}", seconds, needed))
        computed.append(len(tasks) - 1)
        if reduces and unit.reduce:
            waiting = Task(WIRE, f"reduce {unit.name}", unit.reduce, (computed[-1],))
    return [*tasks, waiting] if waiting is not None else tasks


def run_pass(tasks: Sequence[Task]) -> Pass:
    """Return how long a pass takes, and what of it is what."""
    spans = run_streams(tasks)
    busy = gathering = reducing = 0.0
    for task in tasks:
        if task.stream == COMPUTE:
            busy += task.seconds
        elif task.label.startswith("gather"):
            gathering += task.seconds
        else:
            reducing += task.seconds
    return Pass(max((span.end for span in spans), default=0.0), busy, gathering, reducing)


def bucket_reduces(
    gradient_bytes: Sequence[float], bucket_bytes: float, seconds_of: Callable[[float], float]
) -> list[float]:
    """Return seconds of sums that each unit's backward sets free, units in forward order, as DDP does it.

    Gradients fill buckets from the last unit on; what is left in the end goes alone.
    """
    pending, reduces = 0.0, []
    for size in reversed(gradient_bytes):
        pending += size
        full = pending // bucket_bytes
        pending -= full * bucket_bytes
        reduces.append(full * seconds_of(bucket_bytes) if full else 0.0)
    if reduces and pending:
        reduces[-1] += seconds_of(pending)
    return reduces[::-1]
