"""The search: the best plan of each family, and the best of all.

The idea: plans come in groups that share compute and bubbles. Groups are visited in the order of a lower bound of
their time (`choices.Floors`), and a group whose bound is above the best time of its family is skipped; so is a plan
whose lower bound of memory exceeds the device, and a larger micro-batch than one that did not fit. The invariant: the
result is that of predicting every plan (`exhaustive`, compared by a test).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shardwise.errors import InputError
from shardwise.planner.cost.memory import ADAMW, predict_memory
from shardwise.planner.cost.time import TimeModel
from shardwise.planner.search.choices import (
    FAMILIES,
    ChoiceGroup,
    Floors,
    PlanVariant,
    family_of,
    group_family,
    groups,
    leaner,
    make_plan,
    simplicity,
    splits_model,
    variants,
)
from shardwise.plans.plan import Plan, Precision

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from shardwise.hardware.calibration import Calibration
    from shardwise.hardware.machine import Cluster
    from shardwise.planner.cost.memory import Memory, OptimizerShape
    from shardwise.planner.cost.time import Time
    from shardwise.planner.model.forms import Model

FILL = 0.95
"""Of a device's memory, what a plan may need; the rest is for other processes and fragmentation."""
HOST_FILL = 0.9
"""The same of a node's host memory, which the system and the data loaders use too."""
TIE = 0.01
"""Plans of one family nearer than this in time are equal within model error, so the simpler wins."""
FAMILY_TIE = 0.05
"""The same between families of data parallelism and ZeRO: most errors of the model are common to them."""
STRUCTURE_TIE = 0.1
"""The same between those and families that split the model: bubbles and exchanges have errors of their own, and a
split model asks more of its users."""


LOGIT_BYTES = 10
"""Of one logit and what a loss makes of it, in bf16 and fp32."""
LOGIT_SHARE = 0.02
"""Of a device's memory, what logits may take before a fused loss is tried."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """What to plan: a model, a cluster, a batch."""

    model: Model
    cluster: Cluster
    calibration: Calibration
    batch_size: int
    """Samples per optimizer step over all devices."""
    precision: Precision = field(default_factory=Precision)
    optimizer: OptimizerShape = ADAMW
    accepts: Callable[[Plan], None] = field(default=lambda _: None, compare=False)
    """Raises InputError for plans that `train` would refuse, by the rules of `train` itself."""

    @property
    def context(self) -> float:
        """Bytes that a process takes from a device outside of the allocator."""
        return self.calibration.context_bytes.value

    @property
    def capacity(self) -> float:
        """Bytes that a plan may need on each device."""
        return FILL * self.cluster.device.memory_bytes

    @property
    def host_capacity(self) -> float:
        """Bytes that a rank may need on its host."""
        return HOST_FILL * self.cluster.node.host_memory_bytes / self.cluster.devices_per_node

    def has_capacity(self, memory: Memory) -> bool:
        """Whether device and host have what a plan needs."""
        return memory.total <= self.capacity and memory.host <= self.host_capacity

    def memory_of(self, plan: Plan) -> Memory:
        """Return the predicted memory of a plan."""
        return predict_memory(self.model.for_plan(plan), plan, optimizer=self.optimizer, context=self.context)

    def time_model(self) -> TimeModel:
        """Return what predicts the time of plans."""
        return TimeModel(self.cluster, self.calibration, optimizer=self.optimizer)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A plan that fits, with what it costs."""

    plan: Plan
    memory: Memory
    time: Time

    @property
    def family(self) -> str:
        """Its family."""
        return family_of(self.plan)


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """A family none of whose plans can be used."""

    family: str
    reason: str
    """One of "memory", "host memory", "not needed", "impossible"."""
    detail: str = ""
    """The rule it breaks, where it is impossible."""
    plan: Plan | None = None
    """Of its plans the one that needs least memory."""
    memory: Memory | None = None


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a search found."""

    question: Question
    best: Candidate | None
    """What `choose` takes of all. None when nothing fits."""
    families: Mapping[str, Candidate | Rejected]
    """The best of each family, or why there is none, the simplest family first."""
    candidates: tuple[Candidate, ...]
    """All that were predicted, the best first."""
    num_plans: int
    """Plans there are."""


def search(question: Question, *, exhaustive: bool = False) -> Answer:
    """Return the best plans; `exhaustive` predicts every one that fits, for checks of the shortcut."""
    return _Search(question, exhaustive=exhaustive).answer()


class _Search:
    """One search: groups by rising floor of their time, skipped when their floor is above the best of the family."""

    def __init__(self, question: Question, *, exhaustive: bool) -> None:
        self.question = question
        self._exhaustive = exhaustive
        self._time = question.time_model()
        self._floors = Floors(question, self._time)
        self._base = Plan(precision=question.precision)
        self._found: dict[str, list[Candidate]] = {family: [] for family in FAMILIES}
        self._best: dict[str, float] = {}
        self._smallest: dict[str, tuple[float, ChoiceGroup, PlanVariant]] = {}
        self._refused: dict[str, str] = {}
        self._too_much: dict[tuple[object, ...], int] = {}
        """Plans but for their micro-batch -> the smallest one that does not fit."""
        self._num_plans = 0

    def answer(self) -> Answer:
        """Search without offload, and with it only where nothing else fits."""
        ordered = self._ordered()
        self._run(ordered, offload=False)
        needs_offload = not any(self._found.values())
        if needs_offload:
            self._run(ordered, offload=True)
        candidates = sorted(
            (candidate for found in self._found.values() for candidate in found),
            key=lambda candidate: (candidate.time.seconds, simplicity(candidate.plan)),
        )
        families = {family: self._family(family, needed=needs_offload) for family in FAMILIES}
        return Answer(
            question=self.question,
            best=choose(candidates),
            families=families,
            candidates=tuple(candidates),
            num_plans=self._num_plans,
        )

    def least_memory_groups(self) -> list[ChoiceGroup]:
        """Return the groups that need least memory, those that split the model least first."""
        small = [group for _, group in self._ordered() if group.micro_batch == 1 and group.recompute == "full"]
        return sorted(small, key=lambda group: (group.pp, group.tp, group.cp, group.schedule))

    def fits(self, group: ChoiceGroup, variant: PlanVariant) -> bool:
        """Whether a plan's memory suffices."""
        if self._floors.memory(group, variant) > self.question.capacity:
            return False
        plan = make_plan(self._base, group, variant)
        memory = self.question.memory_of(plan)
        return self.question.has_capacity(memory) and not refused_by_rule(self.question, plan)

    def _ordered(self) -> list[tuple[float, ChoiceGroup]]:
        """Return all groups, those that could be fastest first."""
        question = self.question
        found = groups(
            question.model.plain, question.cluster.num_devices, question.cluster.devices_per_node, question.batch_size
        )
        return sorted((self._floors.seconds(group), group) for group in found)

    def _run(self, ordered: list[tuple[float, ChoiceGroup]], *, offload: bool) -> None:
        for floor, group in ordered:
            for variant in self._variants(group):
                for form in self._forms(group, variant, offload=offload):
                    self._num_plans += 1
                    if self._consider(floor, group, form) and not self._exhaustive:
                        break  # a leaner form of a plan that fits is only slower

    def _variants(self, group: ChoiceGroup) -> Iterator[PlanVariant]:
        """Yield the variants of a group; under tensor parallelism a fused loss also saves the gather of logits."""
        for variant in variants(group):
            yield variant
            if group.tp > 1 and self._fuses(group):
                yield variant._replace(fused_loss=True)

    def _forms(self, group: ChoiceGroup, variant: PlanVariant, *, offload: bool) -> Iterator[PlanVariant]:
        if not offload:
            yield variant
        fuses = group.tp == 1 and self._fuses(group)
        yield from leaner(group, variant, offload=offload, fuses=fuses)

    def _fuses(self, group: ChoiceGroup) -> bool:
        """Whether logits are worth fusing: they would take a good part of the device."""
        head = self.question.model.plain.head
        if head is None:
            return False
        logits = group.micro_batch * head.rows / group.cp * head.vocab_size / group.tp * LOGIT_BYTES
        return logits > LOGIT_SHARE * self.question.capacity

    def _consider(self, floor: float, group: ChoiceGroup, variant: PlanVariant) -> bool:
        """Predict a plan as far as needed; return whether it fits, or is too slow to matter."""
        family = group_family(group, variant)
        if not self._exhaustive and floor > self._best.get(family, float("inf")) * (1 + TIE):
            return True
        least = self._floors.memory(group, variant)
        if least < self._smallest.get(family, (float("inf"),))[0]:
            self._smallest[family] = (least, group, variant)
        if least > self.question.capacity:
            return False
        alike = (*group._replace(micro_batch=0, accumulation=min(group.accumulation, 2 * group.pp)), *variant)
        if not self._exhaustive and group.micro_batch >= self._too_much.get(alike, group.micro_batch + 1):
            return False
        fits = self._predict(family, make_plan(self._base, group, variant))
        if not fits:
            self._too_much[alike] = min(group.micro_batch, self._too_much.get(alike, group.micro_batch))
        return fits

    def _predict(self, family: str, plan: Plan) -> bool:
        question, memory = self.question, self.question.memory_of(plan)
        if not question.has_capacity(memory):
            return False
        refusal = refused_by_rule(question, plan)
        if refusal:
            self._refused.setdefault(family, refusal)
            return False
        time = self._time.predict(question.model.for_plan(plan), plan)
        self._found[family].append(Candidate(plan=plan, memory=memory, time=time))
        self._best[family] = min(self._best.get(family, float("inf")), time.seconds)
        return True

    def _family(self, family: str, *, needed: bool) -> Candidate | Rejected:
        best = choose(self._found[family])
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
    """Return the rule by which `train` would refuse a plan; empty where it accepts it."""
    try:
        question.accepts(plan)
    except InputError as error:
        return error.fact
    return ""


def anything_fits(question: Question) -> str | None:
    """Return the first family that fits on the cluster, without predicting time; None where nothing does."""
    search = _Search(question, exhaustive=False)
    fuses = question.model.plain.head is not None
    lean = [
        (group, variant._replace(fused_loss=fuses))
        for group in search.least_memory_groups()
        for variant in variants(group)
    ]
    for offload in (False, True):
        for group, variant in lean:
            for form in leaner(group, variant, offload=True) if offload else (variant,):
                if search.fits(group, form):
                    return group_family(group, form)
    return None


def choose(candidates: Sequence[Candidate]) -> Candidate | None:
    """Return the fastest candidate, or the simplest of those within model error; None where there is none."""
    families: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        families.setdefault(candidate.family, []).append(candidate)
    best = [_simplest(found, TIE) for found in families.values()]
    whole: list[Candidate] = []
    split: list[Candidate] = []
    for candidate in best:
        (split if splits_model(candidate.plan) else whole).append(candidate)
    if whole and (not split or _least_seconds(whole) <= _least_seconds(split) * (1 + STRUCTURE_TIE)):
        return _simplest(whole, FAMILY_TIE)
    return _simplest(split, FAMILY_TIE) if split else None


def _least_seconds(candidates: Sequence[Candidate]) -> float:
    return min(candidate.time.seconds for candidate in candidates)


def _simplest(candidates: Sequence[Candidate], tie: float) -> Candidate:
    limit = _least_seconds(candidates) * (1 + tie)
    equal = [candidate for candidate in candidates if candidate.time.seconds <= limit]
    return min(equal, key=lambda candidate: simplicity(candidate.plan))
