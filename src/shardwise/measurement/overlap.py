"""Measures how much of a step's communication overlaps with compute, for several settings of a plan."""

from __future__ import annotations

import dataclasses
import gc
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from shardwise.dist import world
from shardwise.engines.engine import require_supported
from shardwise.errors import PlanError
from shardwise.job import load_job
from shardwise.job.load import replace_at
from shardwise.measurement.specs import rank_zero
from shardwise.measurement.split import MeasuredTurns, Split, measure_turns, pool, split
from shardwise.measurement.switch import SwitchedWorld
from shardwise.plans.rules import uses_ddp

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.job import JobReference
    from shardwise.plans import Plan


BUCKET, PREFETCH, SYNC = "communication.bucket_mb", "communication.prefetch", "gradient_sync"
BUCKETS_MB = (1.0, 5.0, 25.0, 100.0)
PREFETCHES = (1, 2, 4)
SOURCE = "bench overlap"


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How often each setting is measured."""

    rounds: int
    """How often every setting is built; settings alternate, so that load on the machine affects all of them."""
    turns: int = 3
    """Turns per round; each turn measures the step, its compute alone and its communication alone."""


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """The measurements of one setting."""

    values: dict[str, Any]
    """Dotted field of the plan -> its value."""
    split: Split
    rounds: tuple[float, ...]
    """Median seconds of a step in each round."""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """The recommended setting."""

    chosen: int
    """Index of the setting; 0 is the plan's own."""
    gain_s: float
    """Seconds that a step saves with the chosen setting, or, if the plan's own is chosen, with the best other setting;
    may be negative. It is at most the reduction of exposed communication, since settings do not change compute."""
    spread_s: float
    """Sum of the spreads of both settings in seconds, which a gain must exceed."""


def vary(
    plan: Plan, *, buckets: Sequence[float] = BUCKETS_MB, prefetches: Sequence[int] = PREFETCHES
) -> list[dict[str, Any]]:
    """Return the settings to measure, the plan's own first: all combinations that apply to its communication."""
    choices: dict[str, Sequence[Any]] = {}
    if uses_ddp(plan):
        choices[BUCKET] = buckets
    if plan.zero >= 2:
        choices[PREFETCH] = prefetches
    if plan.accumulation > 1 and (uses_ddp(plan) or plan.zero >= 2):
        choices[SYNC] = ("last", "every")
    own = {name: value_at(plan, name) for name in choices}
    settings = [own]
    for combination in itertools.product(*choices.values()):
        values = dict(zip(choices, combination, strict=True))
        if values != own and _is_possible(with_values(plan, values)):
            settings.append(values)
    return settings


def check_plan(plan: Plan) -> None:
    """Raise PlanError if the overlap of a plan cannot be measured."""
    require_supported(plan)
    if plan.layout.world_size == 1:
        raise PlanError("bench overlap needs 2 or more ranks, got 1", code="bench.too-few-ranks", fix="pass --nproc 2")
    if plan.layout.pp > 1:
        raise PlanError(
            f"plan {plan.layout} has pipeline stages, which cannot run without communication",
            code="bench.overlap-pipeline",
            fix="use a plan without pp",
        )


def _is_possible(plan: Plan) -> bool:
    try:
        require_supported(plan)
    except PlanError:
        return False
    return True


def value_at(plan: Plan, name: str) -> Any:
    """Return the value of a dotted field of a plan, such as communication.bucket_mb."""
    value: Any = plan
    for part in name.split("."):
        value = getattr(value, part)
    return value


def with_values(plan: Plan, values: dict[str, Any]) -> Plan:
    """Return the plan with the values of some dotted fields replaced."""
    for name, value in values.items():
        plan = replace_at(plan, name, value)
    return plan


def measure_overlap(
    reference: JobReference,
    plan: Plan,
    settings: Sequence[dict[str, Any]],
    *,
    effort: Effort,
    nproc: int | None,
    device: str | None = None,
    backend: str | None = None,
) -> list[Overlap] | None:
    """Measure a job with several settings of a plan on new ranks, or on the ranks of the current world.

    Return the measurements of each setting with a distinct effect; None on ranks other than 0.
    """
    measured = rank_zero(
        _measure_rank,
        nproc,
        reference,
        plan,
        list(settings),
        effort,
        {"device": device, "backend": backend},
        backend=backend,
    )
    if measured is None:
        return None
    return [summarise(values, rounds) for values, rounds in measured]


def _measure_rank(
    reference: JobReference,
    plan: Plan,
    settings: list[dict[str, Any]],
    effort: Effort,
    opening: dict[str, Any],
) -> list[tuple[dict[str, Any], list[list[MeasuredTurns]]]]:
    """Measure all settings alternately; return the turns by setting, round and rank. Call on every rank."""
    with world(**opening) as opened:
        here, job = SwitchedWorld.around(opened), load_job(reference)

        def measure(values: dict[str, Any]) -> list[MeasuredTurns]:
            turns = measure_turns(job, with_values(plan, values), here, turns=effort.turns, reads=False)
            gc.collect()  # frees the model before the next one is built
            if here.device.type == "cuda":
                torch.cuda.empty_cache()
            return opened.gather(turns)

        own, *others = settings
        first = measure(own)
        kept = [own, *distinct(others, own, first[0].num_bytes)]
        found: list[list[list[MeasuredTurns]]] = [[first], *([] for _ in kept[1:])]
        for number in range(effort.rounds):
            for values, rounds in zip(kept, found, strict=True):
                if len(rounds) == number:
                    rounds.append(measure(values))
        return list(zip(kept, found, strict=True))


def distinct(others: Sequence[dict[str, Any]], own: dict[str, Any], num_bytes: int) -> list[dict[str, Any]]:
    """Return the settings that differ in effect; all buckets of at least `num_bytes` have the same effect."""
    seen, kept = [_effect(own, num_bytes)], []
    for values in others:
        effect = _effect(values, num_bytes)
        if effect not in seen:
            seen.append(effect)
            kept.append(values)
    return kept


def _effect(values: dict[str, Any], num_bytes: int) -> dict[str, Any]:
    if BUCKET not in values:
        return values
    return {**values, BUCKET: min(values[BUCKET], max(num_bytes / 2**20, 2**-10))}


def summarise(values: dict[str, Any], rounds: Sequence[Sequence[MeasuredTurns]]) -> Overlap:
    """Return the measurements of a setting over all ranks and rounds."""
    return Overlap(values=values, split=split(pool(rounds)), rounds=tuple(split(each).step.median_s for each in rounds))


def advise(measured: Sequence[Overlap]) -> Advice:
    """Return the fastest setting if its gain exceeds the spread and it is faster in all rounds, else the plan's own.

    After a single round the plan's own setting is kept, since settings did not alternate.
    """
    own, *others = measured
    if not others:
        return Advice(chosen=0, gain_s=0.0, spread_s=_spread_s(own))
    advice = [
        Advice(
            chosen=number,
            gain_s=min(
                own.split.step.median_s - other.split.step.median_s, own.split.exposed_s - other.split.exposed_s
            ),
            spread_s=_spread_s(own) + _spread_s(other),
        )
        for number, other in enumerate(others, start=1)
    ]
    clear = [each for each in advice if each.gain_s > each.spread_s]
    worth = [each for each in clear if _gains_in_every_round(own, measured[each.chosen])]
    if worth:
        return max(worth, key=lambda each: each.gain_s)
    return dataclasses.replace(max(advice, key=lambda each: each.gain_s), chosen=0)


def _gains_in_every_round(own: Overlap, other: Overlap) -> bool:
    return len(own.rounds) > 1 and all(new < old for new, old in zip(other.rounds, own.rounds, strict=True))


def _spread_s(measured: Overlap) -> float:
    return measured.split.step.spread * measured.split.step.median_s


def advised_plan(plan: Plan, measured: Sequence[Overlap], advice: Advice) -> Plan:
    """Return the plan with the recommended values, and with this measurement as their source."""
    own, chosen = measured[0], measured[advice.chosen]
    saved = advice.gain_s / own.split.step.median_s
    sources = {}
    for name, value in chosen.values.items():
        reason = "kept" if value == own.values[name] else f"a step takes {saved:.1%} less"
        sources[name] = f"{SOURCE}: {reason}"
    return dataclasses.replace(with_values(plan, chosen.values), sources={**plan.sources, **sources})
