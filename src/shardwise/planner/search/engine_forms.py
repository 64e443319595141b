"""The plans of another engine, such as the ZeRO stages of DeepSpeed, and the choice among them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwise.planner.search.search import FAMILY_TIE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.planner.cost.memory import Memory
    from shardwise.planner.search.search import Candidate


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


def choose_form(forms: Sequence[EngineForm]) -> EngineForm | None:
    """Return the fastest form of an engine, or the simplest of those within model error; None if none fits.

    A form that offloads is returned only if no other fits, as among the native plans.
    """
    fits = {form.name: form.best for form in forms if form.best is not None}
    usable = [form for form in forms if form.name in fits]
    kept = [form for form in usable if not form.offloads] or usable
    if not kept:
        return None
    limit = min(fits[form.name].time.seconds for form in kept) * (1 + FAMILY_TIE)
    return next(form for form in kept if fits[form.name].time.seconds <= limit)
