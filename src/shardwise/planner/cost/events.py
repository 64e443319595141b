"""A simulation of CUDA streams and pipeline schedules: forward and backward passes with their collectives.

The idea: a step is a list of tasks on a compute stream and a communication stream; a task starts when its stream is
free and the tasks that it depends on have ended. Communication that compute waits for is exposed. A pipeline is
simulated for the first rounds of micro-batches only, since every further round adds the busiest rank's time. The
invariant: the order of actions is that of torch's schedule of the same name (`plans/pipeline.py`), so bubbles follow
from the order alone. References: Narayanan et al. 2021 (interleaved 1F1B), Qi et al. 2023 (zero bubble), Zhao et al.
2023 (FSDP).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from shardwise.plans.pipeline import SCHEDULES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardwise.plans.plan import Plan


class Task(NamedTuple):
    """Work that occupies one stream for some seconds."""

    stream: str
    label: str
    seconds: float
    after: tuple[int, ...] = ()
    """Indices of earlier tasks that must have ended."""


class Span(NamedTuple):
    """A task with its start and end."""

    stream: str
    label: str
    start: float
    end: float


def run_streams(tasks: Sequence[Task]) -> list[Span]:
    """Return start and end of each task, which runs as soon as its stream is free and its dependencies have ended."""
    free: dict[str, float] = {}
    spans: list[Span] = []
    for task in tasks:
        start = free.get(task.stream, 0.0)
        for index in task.after:
            start = max(start, spans[index].end)
        end = start + task.seconds
        free[task.stream] = end
        spans.append(Span(task.stream, task.label, start, end))
    return spans


class PipelineAction(NamedTuple):
    """Forward or backward of one micro-batch on one stage."""

    kind: str
    """F for forward, B for backward."""
    stage: int
    micro_batch: int


def pipeline_actions(schedule: str, rank: int, *, pp: int, chunks: int, micro_batches: int) -> list[PipelineAction]:
    """Return the actions of one pipeline rank, in order; stage s is on rank s mod pp.

    Schedules that split backward get the order of interleaved_1f1b; `pipeline_span` subtracts bubbles that they fill.
    """
    stages = [rank + chunk * pp for chunk in range(chunks)]
    rules = SCHEDULES[schedule]
    if rules.all_forward_first or (rules.placement == "one" and pp == 1):
        return _all_then_all(stages, micro_batches)
    if rules.placement == "one":
        return _one_by_one(rank, min(micro_batches, pp - rank), micro_batches)
    return _interleaved(stages, rank, pp, micro_batches)


def _all_then_all(stages: Sequence[int], number: int) -> list[PipelineAction]:
    forward = [PipelineAction("F", stage, index) for stage in stages for index in range(number)]
    return forward + [PipelineAction("B", stage, index) for stage in reversed(stages) for index in range(number)]


def _one_by_one(rank: int, warm_up: int, number: int) -> list[PipelineAction]:
    """Return 1F1B: warm-up forwards, then one backward for each forward, then the remaining backwards."""
    actions = [PipelineAction("F", rank, index) for index in range(warm_up)]
    for index in range(number):
        actions.append(PipelineAction("B", rank, index))
        if warm_up + index < number:
            actions.append(PipelineAction("F", rank, warm_up + index))
    return actions


def _interleaved(stages: Sequence[int], rank: int, pp: int, number: int) -> list[PipelineAction]:
    """Return torch's interleaved 1F1B: a round of micro-batches passes through the first chunk, then the next."""
    chunks, total = len(stages), len(stages) * number
    per_round = number // max(1, number // pp)
    warm_up = min(total, (chunks - 1) * per_round + 2 * (pp - 1 - rank))

    def action(kind: str, position: int) -> PipelineAction:
        chunk = position // per_round % chunks
        index = position // (per_round * chunks) * per_round + position % per_round
        return PipelineAction(kind, stages[chunk if kind == "F" else chunks - 1 - chunk], index)

    actions = [action("F", position) for position in range(warm_up)]
    for position in range(total - warm_up):
        actions += [action("F", warm_up + position), action("B", position)]
    return actions + [action("B", position) for position in range(total - warm_up, total)]


def run_pipeline(
    actions: Sequence[Sequence[PipelineAction]],
    forward: Sequence[float],
    backward: Sequence[float],
    hop: Callable[[int], float],
) -> list[list[Span]]:
    """Return start and end of the actions of each rank; `forward` and `backward` are seconds by stage.

    `hop(stage)` is the time to send an activation from a stage to the next, or its gradient back.
    """
    ended: dict[PipelineAction, float] = {}
    spans: list[list[Span]] = [[] for _ in actions]
    free = [0.0] * len(actions)
    todo = [0] * len(actions)
    waiting = sum(map(len, actions))
    while waiting:
        before = waiting
        for rank, mine in enumerate(actions):
            while todo[rank] < len(mine):
                ready = _ready(mine[todo[rank]], ended, len(forward), hop)
                if ready is None:
                    break
                action = mine[todo[rank]]
                start = max(free[rank], ready)
                end = start + (forward if action.kind == "F" else backward)[action.stage]
                ended[action] = free[rank] = end
                spans[rank].append(Span(f"stage {action.stage}", f"{action.kind}{action.micro_batch}", start, end))
                todo[rank] += 1
                waiting -= 1
        if waiting == before:
            raise AssertionError("the actions of the pipeline schedule deadlock")
    return spans


def _ready(
    action: PipelineAction, ended: dict[PipelineAction, float], num_stages: int, hop: Callable[[int], float]
) -> float | None:
    """Return the time at which the input of an action arrives, or None while it is unknown."""
    if action.kind == "F":
        if action.stage == 0:
            return 0.0
        needed = ended.get(PipelineAction("F", action.stage - 1, action.micro_batch))
        return None if needed is None else needed + hop(action.stage - 1)
    own = ended.get(PipelineAction("F", action.stage, action.micro_batch))
    if own is None or action.stage == num_stages - 1:
        return own
    needed = ended.get(PipelineAction("B", action.stage + 1, action.micro_batch))
    return None if needed is None else max(own, needed + hop(action.stage))


# Time of a pipeline: actions of its stages by schedule, with the bubbles between them.


ROUNDS = 2
"""Rounds of pp micro-batches that are simulated; each further round adds the busiest rank's time for one round."""
WEIGHT_SHARE = 0.5
"""Share of a backward pass that computes weight gradients: one of the two matrix products of each layer."""


def pipeline_span(
    plan: Plan, forward: Sequence[float], backward: Sequence[float], ranks: Sequence[int], hop: float
) -> float:
    """Return seconds of all micro-batches on all stages; `forward` and `backward` are seconds by stage."""
    schedule, pp, number = plan.pipeline.schedule, plan.layout.pp, plan.accumulation
    simulated = number - max(0, number // pp - ROUNDS) * pp
    while simulated % max(1, simulated // pp):  # rounds of equal size, which interleaving needs
        simulated += pp if simulated < number else 1
    spans = pipeline_spans(plan, forward, backward, hop, micro_batches=simulated)
    span = max(action[-1].end for action in spans)
    of_rank: list[list[float]] = [[] for _ in range(pp)]
    for stage, rank in enumerate(ranks):
        of_rank[rank].append(forward[stage] + backward[stage])
    busy = [sum(times) for times in of_rank]
    span += (number - simulated) * max(busy)  # negative where a full round needed more micro-batches than the step has
    if SCHEDULES[schedule].splits_backward:
        # Weight gradients depend on no other rank, so they fill the bubbles of 1F1B at the start and the end
        # (Qi et al. 2023, zero-bubble schedules: a bubble of (pp - 1)(forward + input - weight) remains).
        filled = 2 * (pp - 1) * WEIGHT_SHARE * max(backward)
        span = max(number * max(busy), span - filled)
    return span


def pipeline_spans(
    plan: Plan, forward: Sequence[float], backward: Sequence[float], hop: float, *, micro_batches: int
) -> list[list[Span]]:
    """Return the actions of each pipeline rank with their start and end."""
    schedule, pp = plan.pipeline.schedule, plan.layout.pp
    chunks = len(forward) // pp
    actions = [
        pipeline_actions(schedule, rank, pp=pp, chunks=chunks, micro_batches=micro_batches) for rank in range(pp)
    ]
    return run_pipeline(actions, forward, backward, lambda _: hop)


def pipeline_floor(busy: Sequence[float], stage_seconds: Sequence[float], micro_batches: int) -> float:
    """Return a lower bound of the pipeline's time under any schedule that does not split backward.

    A rank starts after the forward pass of the first micro-batch on all earlier stages, and these stages run the
    backward pass of the last micro-batch after the rank has finished. `busy` is seconds of one micro-batch by rank,
    `stage_seconds` by stage.
    """
    before = floor = 0.0
    for rank, seconds in enumerate(busy):
        floor = max(floor, before + micro_batches * seconds)
        before += stage_seconds[rank]
    return floor


# One forward or backward pass of a stage: compute, and the collectives that gather weights and reduce gradients.


COMPUTE, WIRE = "compute", "communication"


class WorkUnit(NamedTuple):
    """Seconds of one unit of sharding: a block, or all modules before or after the blocks."""

    name: str
    forward: float
    backward: float
    gather: float = 0.0
    """All-gather before its forward pass; 0 where parameters are not sharded."""
    gather_again: float = 0.0
    """All-gather before its backward pass."""
    reduce: float = 0.0
    """Reduce-scatter or all-reduce after its backward pass."""
    gather_copy: float = 0.0
    """Copy of gathered parameters out of the buffer, on the compute stream."""
    reduce_copy: float = 0.0
    """Copy of gradients into the reduce buffer, on the compute stream."""


class Pass(NamedTuple):
    """Seconds of one forward or backward pass."""

    seconds: float
    busy: float
    """Compute."""
    gathering: float
    """All-gathers, overlapped or not."""
    reducing: float
    """Reductions of gradients, overlapped or not."""

    @property
    def exposed(self) -> float:
        """Time in which compute waits for communication."""
        return self.seconds - self.busy

    @property
    def hidden(self) -> float:
        """Communication that overlaps with compute."""
        return max(0.0, self.gathering + self.reducing - self.exposed)


def forward_tasks(units: Sequence[WorkUnit], *, prefetch: int, gathers: bool) -> list[Task]:
    """Return the tasks of a forward pass, which gathers each unit `prefetch` units ahead of its use."""
    tasks: list[Task] = []
    computed: list[int] = []
    for index, unit in enumerate(units):
        needed: tuple[int, ...] = ()
        copy = 0.0
        if gathers and unit.gather:
            behind = index - prefetch - 1
            tasks.append(Task(WIRE, f"gather {unit.name}", unit.gather, (computed[behind],) if behind >= 0 else ()))
            needed, copy = (len(tasks) - 1,), unit.gather_copy
        tasks.append(Task(COMPUTE, f"forward {unit.name}", unit.forward + copy, needed))
        computed.append(len(tasks) - 1)
    return tasks


def backward_tasks(units: Sequence[WorkUnit], *, prefetch: int, gathers: bool, reduces: bool) -> list[Task]:
    """Return the tasks of a backward pass, which issues the next unit's gather before the current unit's reduce."""
    tasks: list[Task] = []
    computed: list[int] = []
    waiting: Task | None = None
    for index, unit in enumerate(reversed(units)):
        needed: tuple[int, ...] = ()
        seconds = unit.backward
        if gathers and unit.gather_again:
            behind = index - prefetch - 1
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
    """Return the duration of a pass, and its compute and communication."""
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
    """Return seconds of the bucket all-reduces that each unit's backward issues under DDP, units in forward order.

    Gradients fill buckets from the last unit on; the first unit reduces the last, partly filled bucket.
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
