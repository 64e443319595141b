"""A small simulation of what runs when: tasks on streams, each stream in order, each task after those it needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


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
    if schedule == "gpipe" or (schedule == "1f1b" and pp == 1):
        return _all_then_all([rank], micro_batches)
    if schedule == "1f1b":
        return _one_by_one(rank, min(micro_batches, pp - rank), micro_batches)
    stages = [rank + chunk * pp for chunk in range(chunks)]
    if schedule == "looped_bfs":
        return _all_then_all(stages, micro_batches)
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
