"""The search: every plan that fits, predicted only as far as it can still win; best of each family."""

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
    cuts_model,
    family_of,
    groups,
    leaner,
    make_plan,
    simplicity,
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
"""Of a device's memory, what a plan may need: the rest is for what other processes and unlucky moments take."""
HOST_FILL = 0.9
"""The same of a node's host memory, which the system and the data loaders use too."""
TIE = 0.01
"""Plans of one family nearer than this in time are equal to the model, so the simpler wins."""
FAMILY_TIE = 0.05
"""The same between families that share samples and states: most errors of the model are common to them."""
STRUCTURE_TIE = 0.1
"""The same between those and families that cut the model: bubbles and exchanges have errors of their own, and a cut
model asks more of its users."""


LOGIT_BYTES = 10
"""Of one logit and what a loss makes of it, in bf16 and fp32."""
LOGIT_SHARE = 0.02
"""Of a device's memory, what logits may take before a fused loss is looked at."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is to be planned."""

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
    def room(self) -> float:
        """Bytes that a plan may need on each device."""
        return FILL * self.cluster.device.memory_bytes

    @property
    def host_room(self) -> float:
        """Bytes that a rank may need on its host."""
        return HOST_FILL * self.cluster.node.host_memory_bytes / self.cluster.devices_per_node


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
        self._time = TimeModel(question.cluster, question.calibration, optimizer=question.optimizer)
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

    def leanest(self) -> list[ChoiceGroup]:
        """Return the groups that need least memory, those that cut least first."""
        small = [group for _, group in self._ordered() if group.micro_batch == 1 and group.recompute == "full"]
        return sorted(small, key=lambda group: (group.pp, group.tp, group.cp, group.schedule))

    def fits(self, group: ChoiceGroup, variant: PlanVariant) -> bool:
        """Whether a plan's memory suffices."""
        if self._floors.memory(group, variant) > self.question.room:
            return False
        plan = make_plan(self._base, group, variant)
        memory = predict_memory(
            self.question.model.for_plan(plan), plan, optimizer=self.question.optimizer, context=self.question.context
        )
        if memory.total > self.question.room or memory.host > self.question.host_room:
            return False
        return not refused_by_rule(self.question, plan)

    def _ordered(self) -> list[tuple[float, ChoiceGroup]]:
        """Return all groups, those that could be quickest first."""
        question = self.question
        found = groups(
            question.model.plain,
            question.cluster.num_devices,
            question.cluster.devices_per_node,
            question.batch_size,
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
        """Yield the variants of a group; where words are cut, a fused loss also spares the gathering of logits."""
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
        logits = group.micro_batch * head.rows / group.cp * head.words / group.tp * LOGIT_BYTES
        return logits > LOGIT_SHARE * self.question.room

    def _consider(self, floor: float, group: ChoiceGroup, variant: PlanVariant) -> bool:
        """Predict a plan as far as needed; returns whether it fits, or would not be looked at further."""
        family = _family_of(group, variant)
        if not self._exhaustive and floor > self._best.get(family, float("inf")) * (1 + TIE):
            return True
        least = self._floors.memory(group, variant)
        if least < self._smallest.get(family, (float("inf"),))[0]:
            self._smallest[family] = (least, group, variant)
        if least > self.question.room:
            return False
        alike = (*group._replace(micro_batch=0, accumulation=min(group.accumulation, 2 * group.pp)), *variant)
        if not self._exhaustive and group.micro_batch >= self._too_much.get(alike, group.micro_batch + 1):
            return False
        fits = self._predict(family, make_plan(self._base, group, variant))
        if not fits:
            self._too_much[alike] = min(group.micro_batch, self._too_much.get(alike, group.micro_batch))
        return fits

    def _predict(self, family: str, plan: Plan) -> bool:
        question, shape = self.question, self.question.model.for_plan(plan)
        memory = predict_memory(shape, plan, optimizer=question.optimizer, context=question.context)
        if memory.total > question.room or memory.host > question.host_room:
            return False
        refusal = refused_by_rule(question, plan)
        if refusal:
            self._refused.setdefault(family, refusal)
            return False
        time = self._time.predict(shape, plan)
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
        memory = predict_memory(
            self.question.model.for_plan(plan), plan, optimizer=self.question.optimizer, context=self.question.context
        )
        fits = memory.total <= self.question.room
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
    lean = [(group, variant._replace(fused_loss=fuses)) for group in search.leanest() for variant in variants(group)]
    for offload in (False, True):
        for group, variant in lean:
            for form in leaner(group, variant, offload=True) if offload else (variant,):
                if search.fits(group, form):
                    return _family_of(group, form)
    return None


def choose(candidates: Sequence[Candidate]) -> Candidate | None:
    """Return the quickest candidate, or of those that the model cannot tell from it the simplest; None of none."""
    families: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        families.setdefault(candidate.family, []).append(candidate)
    best = [_simplest(found, TIE) for found in families.values()]
    whole = [candidate for candidate in best if not cuts_model(candidate.plan)]
    cut = [candidate for candidate in best if cuts_model(candidate.plan)]
    if whole and cut:
        least = min(candidate.time.seconds for candidate in cut) * (1 + STRUCTURE_TIE)
        cut = [] if min(candidate.time.seconds for candidate in whole) <= least else cut
    kept = cut or whole
    return _simplest(kept, FAMILY_TIE) if kept else None


def _simplest(candidates: Sequence[Candidate], tie: float) -> Candidate:
    limit = min(candidate.time.seconds for candidate in candidates) * (1 + tie)
    equal = [candidate for candidate in candidates if candidate.time.seconds <= limit]
    return min(equal, key=lambda candidate: simplicity(candidate.plan))


def _family_of(group: ChoiceGroup, variant: PlanVariant) -> str:
    """Return the family of a plan that is not made yet; as `family_of`."""
    if variant.offload != ("none", "none"):
        return "offload"
    if group.cp > 1:
        return "cp"
    if group.pp > 1:
        return "3d" if group.tp > 1 else "pp"
    if group.tp > 1:
        return "tp"
    if variant.shard == 1:
        return "ddp"
    return "hsdp" if variant.shard < group.dp else f"zero{variant.zero}"
