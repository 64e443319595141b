"""The search: the best plan of each family, and the best of all.

The idea: plans form groups that share compute and bubbles. The search visits groups in the order of a lower bound of
their time (`floors.py`) and skips a group whose bound is above the best time of its family. It also skips groups and
plans whose lower bound of memory exceeds the device, and micro-batches larger than one that did not fit. The invariant:
the result equals that of predicting every plan (`exhaustive`; a test compares them). A `quick` search compares bounds
with the best time of all families, so that its best plan is the same, but not the best plans of the other families.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwise.errors import InputError, MissingExtraError
from shardwise.planner.search.choices import (
    FAMILIES,
    ChoiceGroup,
    PlanVariant,
    better_plans,
    degrees_of,
    family_of,
    group_family,
    groups_of_degrees,
    is_wide,
    leaner,
    make_plan,
    shards_widely,
    simplicity,
    splits_model,
    variants,
)
from shardwise.planner.search.floors import Floors

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from shardwise.planner.cost.memory import Memory
    from shardwise.planner.cost.time import Time
    from shardwise.planner.search.choices import Degrees
    from shardwise.planner.search.question import Question
    from shardwise.plans.plan import Plan

TIE = 0.01
"""Relative difference in time below which plans of one family are equal within model error, so the simpler wins."""
FAMILY_TIE = 0.05
"""Such a difference between families of data parallelism and ZeRO, which share most errors of the time model."""
STRUCTURE_TIE = 0.1
"""Such a difference between these and families that split the model, whose bubbles and collectives add errors."""
LOGIT_BYTES = 10
"""Bytes per logit with the tensors that a loss derives from it, in bf16 and fp32."""
LOGIT_SHARE = 0.02
"""Fraction of a device's memory that logits may take before the search tries a fused loss."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A plan that fits, with its predicted memory and time."""

    plan: Plan
    memory: Memory
    time: Time

    @property
    def family(self) -> str:
        """The family of the plan."""
        return family_of(self.plan)


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """A family without a usable plan."""

    family: str
    reason: str
    """One of "memory", "host memory", "not needed", "impossible"."""
    detail: str = ""
    """The rule that it violates, if it is impossible."""
    plan: Plan | None = None
    """The plan of the family that needs the least memory."""
    memory: Memory | None = None


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The result of a search."""

    question: Question
    best: Candidate | None
    """None if no plan fits."""
    families: Mapping[str, Candidate | Rejected]
    """The best candidate of each family, or why it has none, the simplest family first."""
    candidates: tuple[Candidate, ...]
    """All predicted plans, the fastest first."""
    num_plans: int
    """Number of plans considered."""
    uncorrected: Answer | None = None
    """The answer by predictions alone, if own runs have corrected this one; other predictions are compared with it."""
    num_idle: int = 0
    """Devices that the question leaves idle, because the batch does not divide over all of them."""
    faster_split: Candidate | None = None
    """A plan on other devices that is faster, but splits a model that fits on one device."""


def search(question: Question, *, exhaustive: bool = False, quick: bool = False) -> Answer:
    """Return the best plans; `exhaustive` predicts every plan that fits, to check the lower bounds.

    Of a `quick` search, only the best plan is exact: plans that are too slow to be chosen are not predicted.
    """
    return Search(question, exhaustive=exhaustive, quick=quick).answer()


class Search:
    """One search over groups in ascending order of their lower bound of time."""

    def __init__(
        self,
        question: Question,
        *,
        exhaustive: bool = False,
        quick: bool = False,
        split_gain: float = 1 + STRUCTURE_TIE,
        least_s: float = math.inf,
    ) -> None:
        """`split_gain`: how much faster a split of the model must be; `least_s`: the best time of other searches."""
        self.question = question
        self._exhaustive = exhaustive
        self._quick = quick
        self._split_gain = split_gain
        self._time = question.time_model()
        self._floors = Floors(question, self._time)
        self._forms = _Forms(question)
        self._base = question.base
        self._found: dict[str, list[Candidate]] = {family: [] for family in FAMILIES}
        self._best: dict[tuple[str, bool], float] = {}  # by family, and whether the plan shards widely
        self._smallest: dict[str, tuple[float, ChoiceGroup, PlanVariant]] = {}
        self._refused: dict[str, str] = {}
        self._too_much: dict[tuple[object, ...], int] = {}  # smallest micro-batch that does not fit
        self._fitting: set[tuple[ChoiceGroup, PlanVariant]] = set()
        self._num_plans = 0
        self._least_s = least_s
        self._too_large: list[ChoiceGroup] = []  # groups of which every plan exceeds the device's memory
        self._num_forms: dict[tuple[object, ...], list[tuple[tuple[str, bool], bool, int]]] = {}

    def answer(self) -> Answer:
        """Return the result of a search without offload, or with offload if no other plan fits."""
        question = self.question
        cluster = question.cluster
        degrees = degrees_of(question.model.plain, cluster.num_devices, cluster.devices_per_node, question.batch_size)
        ordered = self.ordered(degrees)
        self.run(ordered)
        needs_offload = not any(self._found.values())
        if needs_offload:
            self.run(ordered, offload=True)
        candidates = self.candidates()
        families = {family: self._family(family, needed=needs_offload) for family in FAMILIES}
        return Answer(
            question=question,
            best=choose(candidates, question.widest),
            families=families,
            candidates=tuple(candidates),
            num_plans=self._num_plans,
        )

    def candidates(self) -> list[Candidate]:
        """Return all plans that were predicted and fit, with the fewest recomputed blocks, the fastest first."""
        self._refine()
        found = list(itertools.chain.from_iterable(self._found.values()))
        return sorted(found, key=lambda candidate: (candidate.time.seconds, simplicity(candidate.plan)))

    def is_too_slow(self, floor: float, *, splits: bool) -> bool:
        """Whether a plan with this lower bound of its time cannot be chosen, because a faster one was found."""
        slack = (1 + FAMILY_TIE) * (1 + TIE) * (1.0 if splits else self._split_gain)
        return floor > slack * self._least_s

    def least_seconds(self, degrees: Degrees) -> float:
        """Return a lower bound of the step time of all plans with these degrees."""
        return self._floors.least_seconds(degrees, self.question.batch_size // degrees.dp)

    def ordered(self, degrees: Iterable[Degrees]) -> list[tuple[float, ChoiceGroup]]:
        """Return all groups of these degrees with a lower bound on their step time, sorted by that bound."""
        question = self.question
        found = groups_of_degrees(question.model.plain, degrees, question.batch_size)
        allowed = filter(None, map(question.fixed.group, found))
        return sorted((self._floors.seconds(group, is_sharded=False), group) for group in allowed)

    def run(self, ordered: list[tuple[float, ChoiceGroup]], *, offload: bool = False) -> None:
        """Predict the plans of these groups as far as needed."""
        skips = not self._exhaustive and not self.question.fixed.has("offload")
        for plain_floor, group in ordered:
            sharded_floor = self._floors.seconds(group, is_sharded=True)
            if self._quick and self.is_too_slow(min(plain_floor, sharded_floor), splits=_splits(group)):
                continue
            if skips and self._floors.least_memory(group, offload=offload) > self.question.capacity:
                self._too_large.append(group)
                self._num_plans += self._count_forms(group, plain_floor, sharded_floor, offload=offload)
                continue
            for variant in self._forms.variants(group):
                floor = sharded_floor if variant.zero >= 2 else plain_floor
                for form in self._forms.forms(group, variant, offload=offload):
                    self._num_plans += 1
                    if self._consider(floor, group, form) and not self._exhaustive:
                        break  # a leaner form of a plan that fits would only be slower

    def _count_forms(self, group: ChoiceGroup, plain_floor: float, sharded_floor: float, *, offload: bool) -> int:
        """Return the number of plans of a group that would be considered if its memory were not known."""
        key = (*group[:4], group.accumulation > 1, group.schedule, self._forms.fuses(group), offload)
        if key not in self._num_forms:
            forms = (
                list(self._forms.forms(group, variant, offload=offload)) for variant in self._forms.variants(group)
            )
            self._num_forms[key] = [
                (self._kind(group, each[0]), each[0].zero >= 2, len(each)) for each in forms if each
            ]
        total = 0
        for kind, is_sharded, number in self._num_forms[key]:
            floor = sharded_floor if is_sharded else plain_floor
            total += 1 if floor > self._best.get(kind, math.inf) * (1 + TIE) else number
        return total

    def _kind(self, group: ChoiceGroup, variant: PlanVariant) -> tuple[str, bool]:
        """Return the family of a plan, and whether it shards widely."""
        widest = self.question.widest
        return group_family(group, variant), shards_widely(group, variant.shard, variant.zero, widest)

    def _consider(self, floor: float, group: ChoiceGroup, variant: PlanVariant) -> bool:
        """Predict a plan as far as needed; return whether it fits or is slower than the best of its family."""
        kind = self._kind(group, variant)
        is_slower = floor > self._best.get(kind, math.inf) * (1 + TIE)
        is_slower |= self._quick and self.is_too_slow(floor, splits=_splits(group))
        if not self._exhaustive and (is_slower or not self._fitting.isdisjoint(better_plans(group, variant))):
            return True
        least = self._floors.memory(group, variant)
        self._note_memory(least, group, variant)
        if least > self.question.capacity:
            return False
        alike = (*group._replace(micro_batch=0, accumulation=min(group.accumulation, 2 * group.pp)), *variant)
        if not self._exhaustive and group.micro_batch >= self._too_much.get(alike, group.micro_batch + 1):
            return False
        fits = self._predict(kind, make_plan(self._base, group, variant))
        if fits:
            self._fitting.add((group, variant))
        else:
            self._too_much[alike] = min(group.micro_batch, self._too_much.get(alike, group.micro_batch))
        return fits

    def _refine(self) -> None:
        """Add the best plan of each family with the smallest number of recomputed blocks that fits."""
        for family, found in self._found.items():
            best = choose(found, self.question.widest)
            number = best.plan.recompute_blocks if best is not None else 0
            if self.question.fixed.has("recompute_blocks"):
                number = 0
            while best is not None and number > 1:
                number -= 1
                if not self._predict((family, False), dataclasses.replace(best.plan, recompute_blocks=number)):
                    break

    def _predict(self, kind: tuple[str, bool], plan: Plan) -> bool:
        (family, _), question, memory = kind, self.question, self.question.memory_of(plan)
        if not question.has_capacity(memory):
            return False
        refusal = refused_by_rule(question, plan)
        if refusal:
            self._refused.setdefault(family, refusal)
            return False
        time = self._time.predict(question.model.for_plan(plan), plan)
        self._found[family].append(Candidate(plan=plan, memory=memory, time=time))
        self._best[kind] = min(self._best.get(kind, float("inf")), time.seconds)
        self._least_s = min(self._least_s, time.seconds)
        return True

    def _weigh_large_groups(self) -> None:
        """Update the smallest plan of each family with the groups that exceed memory."""
        groups, self._too_large = dict.fromkeys(self._too_large), []
        for group in groups:
            full = group._replace(recompute="full", recompute_blocks=0)
            is_leanest = group == full or full not in groups
            if not is_leanest or (group.micro_batch > 1 and group.accumulation > 1):
                continue  # another group of the same family needs less memory, or as much
            for variant in self._forms.variants(group):
                for form in itertools.chain(
                    self._forms.forms(group, variant), self._forms.forms(group, variant, offload=True)
                ):
                    self._note_memory(self._floors.memory(group, form), group, form)
        for family, (least, smallest, form) in self._smallest.items():
            alike = (group for group in groups if group[:4] == smallest[:4])
            equal = (group for group in alike if self._floors.memory(group, form) <= least)
            self._smallest[family] = (least, next(equal, smallest), form)  # the fastest of them

    def _note_memory(self, least: float, group: ChoiceGroup, variant: PlanVariant) -> None:
        """Keep a plan if it has the smallest lower bound of memory of its family."""
        family = group_family(group, variant)
        if least < self._smallest.get(family, (math.inf,))[0]:
            self._smallest[family] = (least, group, variant)

    def _family(self, family: str, *, needed: bool) -> Candidate | Rejected:
        best = choose(self._found[family], self.question.widest)
        if best is not None:
            return best
        if family == "offload" and not needed:
            return Rejected(family=family, reason="not needed")
        self._weigh_large_groups()
        if family not in self._smallest:
            return Rejected(family=family, reason="impossible", detail=self._refused.get(family, ""))
        _, group, variant = self._smallest[family]
        plan = make_plan(self._base, group, variant._replace(fused_loss=variant.fused_loss or self._forms.fuses(group)))
        memory = self.question.memory_of(plan)
        fits = memory.total <= self.question.capacity
        if fits and family in self._refused:
            return Rejected(family=family, reason="impossible", detail=self._refused[family])
        return Rejected(family=family, reason="host memory" if fits else "memory", plan=plan, memory=memory)


class _Forms:
    """The plans of a group, with the fields that the question fixes."""

    def __init__(self, question: Question) -> None:
        self._question = question

    def variants(self, group: ChoiceGroup) -> Iterator[PlanVariant]:
        """Yield the variants of a group; under tensor parallelism, a fused loss also saves the gather of logits."""
        is_fixed, zero = self._question.fixed.has("fused_loss"), self._question.fixed.zero
        for variant in variants(group):
            if zero not in {None, variant.zero}:
                continue
            yield self._question.fixed.variant(variant)
            if group.tp > 1 and self.fuses(group) and not is_fixed:
                yield variant._replace(fused_loss=True)

    def forms(self, group: ChoiceGroup, variant: PlanVariant, *, offload: bool = False) -> Iterator[PlanVariant]:
        """Yield a variant, and the forms of it that need less memory; with `offload`, only those that offload."""
        if not offload:
            yield variant
        fuses = group.tp == 1 and self.fuses(group)
        for form in leaner(group, variant, offload=offload, fuses=fuses):
            if self._question.fixed.variant(form) == form:
                yield form

    def fuses(self, group: ChoiceGroup) -> bool:
        """Whether to try a fused loss: logits would take more than LOGIT_SHARE of the device."""
        head = self._question.model.plain.head
        if head is None or self._question.fixed.has("fused_loss"):
            return False
        logits = group.micro_batch * head.rows / group.cp * head.vocab_size / group.tp * LOGIT_BYTES
        return logits > LOGIT_SHARE * self._question.capacity


def refused_by_rule(question: Question, plan: Plan) -> str:
    """Return the rule by which `train` would reject a plan; empty if it accepts the plan.

    A missing library is not a rule: the cluster may have it, and `train` names it where it is missing.
    """
    try:
        question.accepts(plan)
    except MissingExtraError:
        return ""
    except InputError as error:
        return error.fact
    return ""


def _splits(group: ChoiceGroup) -> bool:
    return group.pp > 1 or group.tp > 1 or group.cp > 1


def choose(candidates: Sequence[Candidate], widest: float = math.inf) -> Candidate | None:
    """Return the fastest candidate, or the simplest of those within model error; None without candidates.

    Of plans without stages, one that shards over more than `widest` devices counts as the least simple, and of these
    the one with the smallest shard group as the simplest.
    """
    kinds: dict[tuple[str, bool], list[Candidate]] = {}
    for candidate in candidates:
        kinds.setdefault((candidate.family, is_wide(candidate.plan, widest)), []).append(candidate)
    whole, split = list[Candidate](), list[Candidate]()
    for found in kinds.values():
        best = _simplest(found, TIE, widest)
        (split if splits_model(best.plan) else whole).append(best)
    if whole and (not split or _least_seconds(whole) <= _least_seconds(split) * (1 + STRUCTURE_TIE)):
        return _simplest(whole, FAMILY_TIE, widest)
    return _simplest(split, FAMILY_TIE, widest) if split else None


def _least_seconds(candidates: Sequence[Candidate]) -> float:
    return min(candidate.time.seconds for candidate in candidates)


def _simplest(candidates: Sequence[Candidate], tie: float, widest: float) -> Candidate:
    limit = _least_seconds(candidates) * (1 + tie)
    equal = [candidate for candidate in candidates if candidate.time.seconds <= limit]

    def order(plan: Plan) -> tuple[object, ...]:
        return (plan.layout.shard if is_wide(plan, widest) else 0, *simplicity(plan))

    return min(equal, key=lambda each: order(each.plan))
