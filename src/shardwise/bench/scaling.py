"""Throughput of a job on more and more ranks: strong and weak scaling, and where the time goes."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from shardwise.bench.ranks import PRELOAD, on_ranks
from shardwise.bench.split import MeasuredTurns, measure_turns, pool, split
from shardwise.bench.switch import SwitchedWorld
from shardwise.dist import world
from shardwise.environment import base_environment
from shardwise.hardware import usable_cores
from shardwise.job import load_job
from shardwise.launcher.local.attempts import LocalLaunch, starter_for
from shardwise.launcher.local.target import Module
from shardwise.planner.settle import settle
from shardwise.plans.toml import read_plan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from shardwise.job import Job, JobReference
    from shardwise.launcher.local.starters import Starter
    from shardwise.planner.settle import LocalDevice
    from shardwise.plans import Plan

Mode = Literal["strong", "weak"]
MODES: tuple[Mode, ...] = get_args(Mode)
_TURNS = 3
"""Of each round: times that a step is measured each way."""


@dataclass(frozen=True, kw_only=True)
class ScalingPoint:
    """What so many ranks did."""

    ranks: int
    per_s: float
    """Samples a second of the whole world; of a script, what it says, or how often its work was done."""
    spread: float | None
    """Half the distance of the quartiles, as a fraction of `per_s`; None where it was measured once."""
    batch_size: int | None = None
    """Samples a step of the whole world; None for a script."""
    plan: str = ""
    parts: Mapping[str, float] | None = None
    """Seconds a step of a rank: compute, communication (exposed), data, idle; None where they were not told apart."""
    predicted_per_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class ScalingCurve:
    """One way to grow, over numbers of ranks."""

    mode: str
    unit: str
    points: tuple[ScalingPoint, ...]
    """By number of ranks; the first is what the others are compared with."""
    note: str = ""
    """What else must be known to read it."""

    @property
    def title(self) -> str:
        """Say which way it is."""
        return f"{self.mode} scaling" if self.mode in MODES else self.mode

    def efficiency(self, point: ScalingPoint) -> float:
        """Return throughput over what the first point's ranks would give if each added rank gave as much."""
        first = self.points[0]
        return point.per_s / point.ranks / (first.per_s / first.ranks)

    def efficiency_spread(self, point: ScalingPoint) -> float | None:
        """Return the spread of `efficiency`, as a share of one: both spreads, added; None where it is not known."""
        first = self.points[0]
        if point is first or point.spread is None or first.spread is None:
            return None
        return self.efficiency(point) * (point.spread + first.spread)

    def growth(self, point: ScalingPoint) -> dict[str, float] | None:
        """Return by how many seconds each part of a step is above what ideal scaling would make of the first's."""
        first = self.points[0]
        if point.parts is None or first.parts is None:
            return None
        share = first.ranks / point.ranks if self.mode == "strong" else 1.0
        return {name: seconds - share * first.parts[name] for name, seconds in point.parts.items()}


@dataclass(frozen=True, kw_only=True)
class ScalingCase:
    """What is to be measured on so many ranks."""

    ranks: int
    plan: Plan

    @property
    def batch_size(self) -> int:
        """Samples a step of the whole world."""
        return self.plan.batch_size


def plan_for(
    spec: str, mode: Mode, ranks: int, *, batch_size: int, device: LocalDevice, overrides: Mapping[str, str]
) -> Plan:
    """Return the plan of so many ranks: strong keeps the global batch, weak gives every rank `batch_size`.

    A plan file is refitted; weak scaling keeps the samples that each of its readers has.
    """
    if not spec.endswith(".toml"):
        wanted = batch_size * ranks if mode == "weak" else batch_size
        return settle(spec, batch_size=wanted, world_size=ranks, device=device, overrides=overrides)
    size = read_plan(Path(spec)).layout.world_size
    own = settle(spec, batch_size=batch_size, world_size=size, device=device, overrides=overrides)
    fitted = own.refit(ranks)
    if mode == "strong":
        return fitted
    return dataclasses.replace(fitted, micro_batch=own.micro_batch, accumulation=own.accumulation)


def powers_of_two(most: int) -> tuple[int, ...]:
    """Return 1, 2, 4 and so on, up to `most`."""
    return tuple(1 << power for power in range(most.bit_length()))


def measure_job(
    reference: JobReference,
    cases: Mapping[Mode, Sequence[ScalingCase]],
    *,
    rounds: int,
    opening: Mapping[str, str | None],
    predict: Callable[[Job, Plan], float | None],
) -> list[ScalingCurve]:
    """Measure a job on fresh ranks of this machine, all numbers of ranks in turns; `opening` is how a world opens.

    `predict` returns the seconds that a step is said to take, or None.
    """
    distinct = {(case.ranks, case.plan): case for each in cases.values() for case in each}  # one rank: strong is weak
    found: dict[Any, list[list[MeasuredTurns]]] = {key: [] for key in distinct}
    with fork_parent() as starter:
        for _ in range(rounds):
            for ranks in sorted({case.ranks for case in distinct.values()}):
                keys = [key for key in distinct if key[0] == ranks]
                plans = [distinct[key].plan for key in keys]
                measured = on_ranks(
                    _measure_rank,
                    ranks,
                    reference,
                    plans,
                    dict(opening),
                    starter=starter,
                    backend=opening.get("backend"),
                )
                for key, turns in zip(keys, measured[0], strict=True):
                    found[key].append(turns)
    job = load_job(reference)
    points = {key: _point(case, found[key], job, predict) for key, case in distinct.items()}
    return [
        ScalingCurve(mode=mode, unit="samples/s", points=tuple(points[case.ranks, case.plan] for case in each))
        for mode, each in cases.items()
    ]


@contextlib.contextmanager
def fork_parent(preload: tuple[str, ...] = PRELOAD) -> Iterator[Starter]:
    """Start what forks the ranks of many launches: its imports are paid for once, and are in no measured time."""
    spec = LocalLaunch(target=Module("shardwise.launcher.local.call"), nproc=1, preload=preload)
    environ = base_environment(local_world_size=1, cores=usable_cores())
    with starter_for(spec, environ, lambda _: None) as starter:
        yield starter


def _measure_rank(reference: JobReference, plans: list[Plan], opening: dict[str, Any]) -> list[list[MeasuredTurns]]:
    """Measure the job under each plan, called on every rank; returns by plan what each rank measured."""
    with world(**opening) as opened:
        here, job, found = SwitchedWorld.around(opened), load_job(reference), []
        for plan in plans:
            mine = dataclasses.replace(job, batch_size=plan.batch_size)
            found.append(opened.gather(measure_turns(mine, plan, here, turns=_TURNS, reads=True)))
            gc.collect()  # the model, before the next one is built
            if here.device.type == "cuda":
                torch.cuda.empty_cache()
        return found


def _point(
    case: ScalingCase, rounds: Sequence[Sequence[MeasuredTurns]], job: Job, predict: Callable[[Job, Plan], float | None]
) -> ScalingPoint:
    found = split(pool(rounds))
    predicted_s = predict(dataclasses.replace(job, batch_size=case.batch_size), case.plan)
    return ScalingPoint(
        ranks=case.ranks,
        per_s=case.batch_size / found.period.median_s,
        spread=found.period.spread,
        batch_size=case.batch_size,
        plan=str(case.plan.layout),
        parts=found.parts,
        predicted_per_s=case.batch_size / predicted_s if predicted_s else None,
    )
