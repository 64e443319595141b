"""The search: the best plan of each family, and the best of all.

The idea: plans form groups that share compute and bubbles. The search visits groups in the order of a lower bound of
their time (`floors.py`) and skips a group whose bound is above the best time of its family. It also skips plans
whose lower bound of memory exceeds the device, and micro-batches larger than one that did not fit. The invariant: the
result equals that of predicting every plan (`exhaustive`; a test compares them).
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
    family_of,
    group_family,
    groups,
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
    from collections.abc import Iterator, Mapping, Sequence

    from shardwise.planner.cost.memory import Memory
    from shardwise.planner.cost.time import Time
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
class EngineForm:
    """One way to train with another engine: the fastest of its plans that fit, or why none does."""

    name: str
    best: Candidate | None
    refusal: str = ""
    """Why no plan of this form can be used."""
    memory: Memory | None = None
    """The smallest memory of its plans, if none fits."""

    @property
    def offloads(self) -> bool:
        """Whether its plan offloads to the host."""
        return self.best is not None and self.best.plan.offload.optimizer != "none"


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


def search(question: Question, *, exhaustive: bool = False) -> Answer:
    """Return the best plans; `exhaustive` predicts every plan that fits, to check the lower bounds."""
    return _Search(question, exhaustive=exhaustive).answer()


class _Search:
    """One search over groups in ascending order of their lower bound of time."""

    def __init__(self, question: Question, *, exhaustive: bool) -> None:
        self.question = question
        self._exhaustive = exhaustive
        self._time = question.time_model()
        self._floors = Floors(question, self._time)
        self._base = question.base
        self._found: dict[str, list[Candidate]] = {family: [] for family in FAMILIES}
        self._best: dict[tuple[str, bool], float] = {}  # by family, and whether the plan shards widely
        self._smallest: dict[str, tuple[float, ChoiceGroup, PlanVariant]] = {}
        self._refused: dict[str, str] = {}
        self._too_much: dict[tuple[object, ...], int] = {}  # smallest micro-batch that does not fit
        self._fitting: set[tuple[ChoiceGroup, PlanVariant]] = set()
        self._num_plans = 0

    def answer(self) -> Answer:
        """Return the result of a search without offload, or with offload if no other plan fits."""
        ordered = self._ordered()
        self._run(ordered, offload=False)
        needs_offload = not any(self._found.values())
        if needs_offload:
            self._run(ordered, offload=True)
        self._refine()
        candidates = list(itertools.chain.from_iterable(self._found.values()))
        candidates.sort(key=lambda candidate: (candidate.time.seconds, simplicity(candidate.plan)))
        families = {family: self._family(family, needed=needs_offload) for family in FAMILIES}
        return Answer(
            question=self.question,
            best=choose(candidates, self.question.widest),
            families=families,
            candidates=tuple(candidates),
            num_plans=self._num_plans,
        )

    def least_memory_groups(self) -> list[ChoiceGroup]:
        """Return the groups that need the least memory, in ascending order of their model-parallel degrees."""
        whole = [each for _, each in self._ordered() if each.recompute == "full" and each.recompute_blocks == 0]
        small = [each for each in whole if each.micro_batch == 1]
        return sorted(small, key=lambda each: (each.pp, each.tp, each.cp, each.schedule))

    def fits(self, group: ChoiceGroup, variant: PlanVariant) -> bool:
        """Whether the plan of a group and a variant fits and `train` accepts it."""
        if self._floors.memory(group, variant) > self.question.capacity:
            return False
        plan = make_plan(self._base, group, variant)
        memory = self.question.memory_of(plan)
        return self.question.has_capacity(memory) and not refused_by_rule(self.question, plan)

    def _ordered(self) -> list[tuple[float, ChoiceGroup]]:
        """Return all groups with a lower bound on their step time, sorted by that bound."""
        question = self.question
        found = groups(
            question.model.plain, question.cluster.num_devices, question.cluster.devices_per_node, question.batch_size
        )
        allowed = filter(None, map(question.fixed.group, found))
        return sorted((self._floors.seconds(group, is_sharded=False), group) for group in allowed)

    def _run(self, ordered: list[tuple[float, ChoiceGroup]], *, offload: bool) -> None:
        for plain_floor, group in ordered:
            sharded_floor = self._floors.seconds(group, is_sharded=True)
            for variant in self._variants(group):
                floor = sharded_floor if variant.zero >= 2 else plain_floor
                for form in self._forms(group, variant, offload=offload):
                    self._num_plans += 1
                    if self._consider(floor, group, form) and not self._exhaustive:
                        break  # a leaner form of a plan that fits would only be slower

    def _variants(self, group: ChoiceGroup) -> Iterator[PlanVariant]:
        """Yield the variants of a group; under tensor parallelism, a fused loss also saves the gather of logits."""
        is_fixed, zero = self.question.fixed.has("fused_loss"), self.question.fixed.zero
        for variant in variants(group):
            if zero not in {None, variant.zero}:
                continue
            yield self.question.fixed.variant(variant)
            if group.tp > 1 and self._fuses(group) and not is_fixed:
                yield variant._replace(fused_loss=True)

    def _forms(self, group: ChoiceGroup, variant: PlanVariant, *, offload: bool) -> Iterator[PlanVariant]:
        if not offload:
            yield variant
        fuses = group.tp == 1 and self._fuses(group)
        for form in leaner(group, variant, offload=offload, fuses=fuses):
            if self.question.fixed.variant(form) == form:
                yield form

    def _fuses(self, group: ChoiceGroup) -> bool:
        """Whether to try a fused loss: logits would take more than LOGIT_SHARE of the device."""
        head = self.question.model.plain.head
        if head is None or self.question.fixed.has("fused_loss"):
            return False
        logits = group.micro_batch * head.rows / group.cp * head.vocab_size / group.tp * LOGIT_BYTES
        return logits > LOGIT_SHARE * self.question.capacity

    def _consider(self, floor: float, group: ChoiceGroup, variant: PlanVariant) -> bool:
        """Predict a plan as far as needed; return whether it fits or is slower than the best of its family."""
        family = group_family(group, variant)
        kind = (family, shards_widely(group, variant.shard, variant.zero, self.question.widest))
        is_slower = floor > self._best.get(kind, math.inf) * (1 + TIE)
        if not self._exhaustive and (is_slower or not self._fitting.isdisjoint(better_plans(group, variant))):
            return True
        least = self._floors.memory(group, variant)
        if least < self._smallest.get(family, (float("inf"),))[0]:
            self._smallest[family] = (least, group, variant)
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
        return True

    def _family(self, family: str, *, needed: bool) -> Candidate | Rejected:
        best = choose(self._found[family], self.question.widest)
        if best is not None:
            return best
        if family == "offload" and not needed:
            return Rejected(family=family, reason="not needed")
        if family not in self._smallest:
            return Rejected(family=family, reason="impossible", detail=self._refused.get(family, ""))
        _, group, variant = self._smallest[family]
        plan = make_plan(self._base, group, variant._replace(fused_loss=variant.fused_loss or self._fuses(group)))
        memory = self.question.memory_of(plan)
        fits = memory.total <= self.question.capacity
        if fits and family in self._refused:
            return Rejected(family=family, reason="impossible", detail=self._refused[family])
        return Rejected(family=family, reason="host memory" if fits else "memory", plan=plan, memory=memory)


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


def anything_fits(question: Question) -> str | None:
    """Return the first family that fits on the cluster, without predicting time; None if none fits."""
    search = _Search(question, exhaustive=False)
    fuses = question.model.plain.head is not None
    lean: list[tuple[ChoiceGroup, PlanVariant]] = []
    for group in search.least_memory_groups():
        lean += [(group, variant._replace(fused_loss=fuses)) for variant in variants(group)]
    for offload in (False, True):
        for group, variant in lean:
            for form in leaner(group, variant, offload=True) if offload else (variant,):
                if search.fits(group, form):
                    return group_family(group, form)
    return None


def choose(candidates: Sequence[Candidate], widest: float = math.inf) -> Candidate | None:
    """Return the fastest candidate, or the simplest of those within model error; None without candidates.

    Of plans that do not split the model, one that shards over more than `widest` devices counts as the least simple.
    """
    kinds: dict[tuple[str, bool], list[Candidate]] = {}
    for candidate in candidates:
        kinds.setdefault((candidate.family, is_wide(candidate.plan, widest)), []).append(candidate)
    whole, split = list[Candidate](), list[Candidate]()
    for found in kinds.values():
        best = _simplest(found, TIE)
        (split if splits_model(best.plan) else whole).append(best)
    if whole and (not split or _least_seconds(whole) <= _least_seconds(split) * (1 + STRUCTURE_TIE)):
        return _simplest(whole, FAMILY_TIE, widest)
    return _simplest(split, FAMILY_TIE) if split else None


def choose_form(forms: Sequence[EngineForm]) -> EngineForm | None:
    """Return the fastest form of an engine, or the simplest of those within model error; None if none fits.

    A form that offloads is returned only if no other fits, as among the native plans.
    """
    fits = {form.name: form.best for form in forms if form.best is not None}
    usable = [form for form in forms if form.name in fits]
    kept = [form for form in usable if not form.offloads] or usable
    if not kept:
        return None
    limit = _least_seconds([fits[form.name] for form in kept]) * (1 + FAMILY_TIE)
    return next(form for form in kept if fits[form.name].time.seconds <= limit)


def _least_seconds(candidates: Sequence[Candidate]) -> float:
    return min(candidate.time.seconds for candidate in candidates)


def _simplest(candidates: Sequence[Candidate], tie: float, widest: float = math.inf) -> Candidate:
    limit = _least_seconds(candidates) * (1 + tie)
    equal = [candidate for candidate in candidates if candidate.time.seconds <= limit]
    return min(equal, key=lambda each: (is_wide(each.plan, widest), *simplicity(each.plan)))
