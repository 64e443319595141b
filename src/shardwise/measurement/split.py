"""Decomposition of a step's time: with data, without data, without communication, and communication alone."""

from __future__ import annotations

import dataclasses
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from shardwise.measurement.step import WARM_UP, settle_gradients
from shardwise.measurement.switch import replay
from shardwise.measurement.timing import Timing, wait_for
from shardwise.training.build import build_step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from shardwise.data.feed import StepBatch
    from shardwise.dist import World
    from shardwise.job import Job
    from shardwise.measurement.switch import SwitchedWorld
    from shardwise.plans import Plan
    from shardwise.training.step.step import Step

_LEAST_S = 0.02
"""Shorter steps are timed in blocks, so that the skew after the barrier does not matter."""
_MOST_STEPS = 20


@dataclass(frozen=True, kw_only=True)
class MeasuredTurn:
    """Seconds per step of one rank, from blocks of one or a few steps, measured one after the other."""

    trained: float | None
    """Loading data and training on it; None if it was not requested."""
    whole: float
    """Training on data in memory."""
    compute: float | None
    """Training with every collective skipped; None for pipeline stages, which cannot run without messages."""
    communication: float
    """The collectives of a step alone, one after the other."""


@dataclass(frozen=True, kw_only=True)
class MeasuredTurns:
    """The measurements of a job under a plan on one rank."""

    turns: tuple[MeasuredTurn, ...]
    collectives: int
    """Number of collectives of one step."""
    num_bytes: int
    """Bytes of these collectives, counted like the sizes of `bench comm`."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """Seconds of a step on the slowest rank, split into compute, communication, data and idle time."""

    period: Timing
    """Time from one step to the next, including data loading if it was requested."""
    step: Timing
    """The step without data."""
    compute: Timing | None
    """The step of the slowest rank without communication; None for pipeline stages."""
    communication: Timing
    """The collectives of a step alone."""
    exposed: tuple[float, ...]
    """Exposed communication of each turn: time of the step minus time of its compute."""
    parts: dict[str, float] | None
    """Mean over ranks of compute, communication (exposed), data, idle; up to noise they add up to the period."""
    collectives: int
    num_bytes: int

    @property
    def exposed_s(self) -> float:
        """Return the median of `exposed`, 0 if unknown."""
        return statistics.median(self.exposed) if self.exposed else 0.0

    @property
    def hidden(self) -> float | None:
        """Return the share of communication that compute hides; None without communication.

        It is negative if communication also slows compute down.
        """
        if self.compute is None or not self.communication.median_s:
            return None
        return 1 - self.exposed_s / self.communication.median_s

    @property
    def hidden_spread(self) -> float:
        """Return half the interquartile range of `hidden` over turns."""
        if not self.communication.median_s or len(self.exposed) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.exposed, n=4)
        return (high - low) / 2 / self.communication.median_s


def measure_turns(job: Job, plan: Plan, here: SwitchedWorld, *, turns: int, reads: bool) -> MeasuredTurns:
    """Train a few steps of `job` under `plan` and measure `turns` turns. Communicates; call on every rank.

    If `reads`, also time steps that load their data, as training does.
    """
    can_switch = plan.layout.pp == 1
    # The outputs of skipped collectives have uninitialized values.
    is_garbled = can_switch and (plan.zero >= 2 or plan.layout.tp > 1)
    if is_garbled and here.device.type == "cpu":
        torch.set_flush_denormal(True)  # denormal numbers compute at a hundredth of the speed
    made: list[Step] = []
    step = build_step(
        # Learning rate schedules need the number of steps.
        dataclasses.replace(job, steps=WARM_UP + 3 + 3 * turns * _MOST_STEPS, epochs=None, tokens=None),
        plan,
        here if can_switch else here.plain,
        before_update=(lambda: settle_gradients(made[0])) if is_garbled else None,
    )
    made.append(step)
    batches, clock = iter(step.feed), _Clock(here)
    for _ in range(WARM_UP):
        step(batch := next(batches))
    calls = here.switch.record(lambda: step(batch))
    once_s = max(here.gather(clock(lambda: step(batch))))
    steps = max(1, min(_MOST_STEPS, round(_LEAST_S / once_s)))
    timer = _StepTimer(step=step, play=replay(calls) if calls else None, clock=clock, steps=steps, here=here)
    found = []
    for _ in range(turns):
        kept: list[StepBatch] = [batch] * (0 if reads else steps)
        trained = timer.train(_keep(batches, kept, steps)) if reads else None
        whole = timer.train(kept)
        compute = whole if can_switch else None
        if can_switch and calls:
            compute = timer.compute(kept)
        found.append(MeasuredTurn(trained=trained, whole=whole, compute=compute, communication=timer.communicate()))
    return MeasuredTurns(turns=tuple(found), collectives=len(calls), num_bytes=sum(call.num_bytes for call in calls))


@dataclass(frozen=True, kw_only=True)
class _StepTimer:
    """Times a few steps, in seconds per step; all methods communicate, call them on every rank."""

    step: Step
    play: Callable[[], None] | None
    clock: _Clock
    steps: int
    here: SwitchedWorld

    def train(self, batches: Iterable[StepBatch]) -> float:
        return self.clock(lambda: [self.step(batch) for batch in batches]) / self.steps

    def compute(self, batches: Iterable[StepBatch]) -> float:
        self.here.switch.on = False
        try:
            return self.train(batches)
        finally:
            self.here.switch.on = True

    def communicate(self) -> float:
        play = self.play
        if play is None:
            return 0.0
        return self.clock(lambda: [play() for _ in range(self.steps)]) / self.steps


def _keep(batches: Iterator[StepBatch], kept: list[StepBatch], number: int) -> Iterator[StepBatch]:
    for _ in range(number):
        kept.append(next(batches))
        yield kept[-1]


class _Clock:
    """Times work that all ranks start at the same time, until the device of this rank has finished it."""

    def __init__(self, here: World) -> None:
        self._here = here

    def __call__(self, work: Callable[[], object]) -> float:
        """Return the seconds of `work` after a barrier. Communicates; call on every rank."""
        wait_for(self._here.device)
        self._here.barrier()
        began = time.perf_counter()
        work()
        wait_for(self._here.device)
        return time.perf_counter() - began


def pool(rounds: Sequence[Sequence[MeasuredTurns]]) -> list[MeasuredTurns]:
    """Concatenate the turns of each rank over all rounds; `rounds` is indexed by round, then by rank."""
    return [
        dataclasses.replace(parts[0], turns=tuple(turn for part in parts for turn in part.turns))
        for parts in zip(*rounds, strict=True)
    ]


def split(ranks: Sequence[MeasuredTurns]) -> Split:
    """Return the time of a step and its parts from the turns of all ranks."""
    rows = list(zip(*(rank.turns for rank in ranks), strict=True))
    step = [max(turn.whole for turn in row) for row in rows]
    period = [max(turn.whole if turn.trained is None else turn.trained for turn in row) for row in rows]
    computes = [_compute_times(row) for row in rows]
    slowest = [max(row) for row in computes if row]
    exposed = tuple(s - c for s, c in zip(step, slowest, strict=True)) if slowest else ()
    parts = None
    if slowest:
        parts = {
            "compute": statistics.median(statistics.mean(row) for row in computes),
            "communication": max(0.0, statistics.median(exposed)),
            "data": max(0.0, statistics.median(p - s for p, s in zip(period, step, strict=True))),
            "idle": statistics.median(max(row) - statistics.mean(row) for row in computes),
        }
    return Split(
        period=Timing.of(period),
        step=Timing.of(step),
        compute=Timing.of(slowest) if slowest else None,
        communication=Timing.of([max(turn.communication for turn in row) for row in rows]),
        exposed=exposed,
        parts=parts,
        collectives=ranks[0].collectives,
        num_bytes=ranks[0].num_bytes,
    )


def _compute_times(row: Sequence[MeasuredTurn]) -> list[float]:
    return [turn.compute for turn in row if turn.compute is not None]
