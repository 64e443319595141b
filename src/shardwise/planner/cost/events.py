"""A small simulation of streams and pipeline schedules: forward and backward passes beside their collectives."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from shardwise.plans.pipeline import SCHEDULES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardwise.plans.plan import Plan


class Task(NamedTuple):
    """Something that keeps one stream busy for a while."""

    stream: str
    label: str
    seconds: float
    after: tuple[int, ...] = ()
    """Places in the list of tasks that must have ended; always earlier ones."""


class Span(NamedTuple):
    """A task in its time."""

    stream: str
    label: str
    start: float
    end: float


def run_streams(tasks: Sequence[Task]) -> list[Span]:
    """Return when each task runs: as soon as its stream is free and what it needs has ended."""
    free: dict[str, float] = {}
    spans: list[Span] = []
    for task in tasks:
        start = free.get(task.stream, 0.0)
        for place in task.after:
            start = max(start, spans[place].end)
        end = start + task.seconds
        free[task.stream] = end
        spans.append(Span(task.stream, task.label, start, end))
    return spans


class Turn(NamedTuple):
    """One stage's work on one micro-batch."""

    kind: str
    """F for forward, B for backward."""
    stage: int
    micro_batch: int


def pipeline_turns(schedule: str, rank: int, *, pp: int, chunks: int, micro_batches: int) -> list[Turn]:
    """Return what a rank of a pipeline does, in order; stage s stands on rank s mod pp.

    Schedules that split backward are given the order of interleaved_1f1b: what they gain is counted elsewhere.
    """
    stages = [rank + chunk * pp for chunk in range(chunks)]
    rules = SCHEDULES[schedule]
    if rules.all_forward_first or (rules.placement == "one" and pp == 1):
        return _all_then_all(stages, micro_batches)
    if rules.placement == "one":
        return _one_by_one(rank, min(micro_batches, pp - rank), micro_batches)
    return _interleaved(stages, rank, pp, micro_batches)


def _all_then_all(stages: Sequence[int], number: int) -> list[Turn]:
    forward = [Turn("F", stage, index) for stage in stages for index in range(number)]
    return forward + [Turn("B", stage, index) for stage in reversed(stages) for index in range(number)]


def _one_by_one(rank: int, warm_up: int, number: int) -> list[Turn]:
    """Fill up, then one backward for each forward, then empty."""
    turns = [Turn("F", rank, index) for index in range(warm_up)]
    for index in range(number):
        turns.append(Turn("B", rank, index))
        if warm_up + index < number:
            turns.append(Turn("F", rank, warm_up + index))
    return turns


def _interleaved(stages: Sequence[int], rank: int, pp: int, number: int) -> list[Turn]:
    """Rounds of micro-batches pass through the first chunk, then the next: torch's order."""
    chunks, total = len(stages), len(stages) * number
    per_round = number // max(1, number // pp)
    warm_up = min(total, (chunks - 1) * per_round + 2 * (pp - 1 - rank))

    def turn(kind: str, position: int) -> Turn:
        chunk = position // per_round % chunks
        index = position // (per_round * chunks) * per_round + position % per_round
        return Turn(kind, stages[chunk if kind == "F" else chunks - 1 - chunk], index)

    turns = [turn("F", position) for position in range(warm_up)]
    for position in range(total - warm_up):
        turns += [turn("F", warm_up + position), turn("B", position)]
    return turns + [turn("B", position) for position in range(total - warm_up, total)]


def run_pipeline(
    turns: Sequence[Sequence[Turn]], forward: Sequence[float], backward: Sequence[float], hop: Callable[[int], float]
) -> list[list[Span]]:
    """Return when each rank takes its turns; `forward` and `backward` are seconds by stage.

    `hop(stage)` is how long what a stage has made travels to the next stage, or back from it.
    """
    ended: dict[Turn, float] = {}
    spans: list[list[Span]] = [[] for _ in turns]
    free = [0.0] * len(turns)
    todo = [0] * len(turns)
    waiting = sum(map(len, turns))
    while waiting:
        before = waiting
        for rank, mine in enumerate(turns):
            while todo[rank] < len(mine):
                ready = _ready(mine[todo[rank]], ended, len(forward), hop)
                if ready is None:
                    break
                turn = mine[todo[rank]]
                start = max(free[rank], ready)
                end = start + (forward if turn.kind == "F" else backward)[turn.stage]
                ended[turn] = free[rank] = end
                spans[rank].append(Span(f"stage {turn.stage}", f"{turn.kind}{turn.micro_batch}", start, end))
                todo[rank] += 1
                waiting -= 1
        if waiting == before:
            raise AssertionError("a pipeline's turns wait for each other")
    return spans


def _ready(turn: Turn, ended: dict[Turn, float], num_stages: int, hop: Callable[[int], float]) -> float | None:
    """Return when what a turn needs is there, None while that is unknown."""
    if turn.kind == "F":
        if turn.stage == 0:
            return 0.0
        needed = ended.get(Turn("F", turn.stage - 1, turn.micro_batch))
        return None if needed is None else needed + hop(turn.stage - 1)
    own = ended.get(Turn("F", turn.stage, turn.micro_batch))
    if own is None or turn.stage == num_stages - 1:
        return own
    needed = ended.get(Turn("B", turn.stage + 1, turn.micro_batch))
    return None if needed is None else max(own, needed + hop(turn.stage))


# Time of a pipeline: turns of its stages by schedule, with the bubbles between them.


ROUNDS = 2
"""Rounds of pp micro-batches that are simulated; every further one takes as long as the busiest rank works on it."""
WEIGHT_SHARE = 0.5
"""Of a backward pass, what makes gradients of weights: each matrix product has one for its input and one for those."""


def pipeline_span(
    plan: Plan, forward: Sequence[float], backward: Sequence[float], ranks: Sequence[int], hop: float
) -> float:
    """Return seconds of all micro-batches on all stages; `forward` and `backward` are seconds by stage."""
    schedule, pp, number = plan.pipeline.schedule, plan.layout.pp, plan.accumulation
    simulated = number - max(0, number // pp - ROUNDS) * pp
    while simulated % max(1, simulated // pp):  # rounds of equal size, which interleaving needs
        simulated += pp if simulated < number else 1
    spans = pipeline_spans(plan, forward, backward, hop, micro_batches=simulated)
    span = max(turn[-1].end for turn in spans)
    of_rank: list[list[float]] = [[] for _ in range(pp)]
    for stage, rank in enumerate(ranks):
        of_rank[rank].append(forward[stage] + backward[stage])
    busy = [sum(times) for times in of_rank]
    span += (number - simulated) * max(busy)  # or less, where more were needed for a round
    if SCHEDULES[schedule].splits_backward:
        # Gradients of weights wait for nobody: they fill the time in which 1F1B idles at the start and at the end
        # (Qi et al. 2023, zero-bubble schedules: (pp - 1)(forward + input - weight) is left of it).
        filled = 2 * (pp - 1) * WEIGHT_SHARE * max(backward)
        span = max(number * max(busy), span - filled)
    return span


def pipeline_spans(
    plan: Plan, forward: Sequence[float], backward: Sequence[float], hop: float, *, micro_batches: int
) -> list[list[Span]]:
    """Return the turns of each rank along pp in their time."""
    schedule, pp = plan.pipeline.schedule, plan.layout.pp
    chunks = len(forward) // pp
    turns = [pipeline_turns(schedule, rank, pp=pp, chunks=chunks, micro_batches=micro_batches) for rank in range(pp)]
    return run_pipeline(turns, forward, backward, lambda _: hop)


def pipeline_floor(busy: Sequence[float], stage_seconds: Sequence[float], micro_batches: int) -> float:
    """Return what no schedule of whole backward passes goes below.

    A rank starts when the stages before its first have seen the first micro-batch, and those must still go back
    through them when it has done its last; `busy` is seconds of one micro-batch by rank, `stage_seconds` by stage.
    """
    before = floor = 0.0
    for rank, seconds in enumerate(busy):
        floor = max(floor, before + micro_batches * seconds)
        before += stage_seconds[rank]
    return floor


# One forward or backward pass of a stage: compute beside the collectives that gather weights and sum gradients.


COMPUTE, WIRE = "compute", "communication"


class WorkUnit(NamedTuple):
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


def forward_tasks(units: Sequence[WorkUnit], *, prefetch: int, gathers: bool) -> list[Task]:
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


def backward_tasks(units: Sequence[WorkUnit], *, prefetch: int, gathers: bool, reduces: bool) -> list[Task]:
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
