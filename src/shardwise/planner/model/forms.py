"""A model in every form in which plans train it: weights cast or gathered, sequences whole or cut, the loss fused."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from shardwise.planner.model.context import cut_context
from shardwise.planner.model.fused import fuse_loss
from shardwise.planner.model.shape import ModelShape  # noqa: TC001 - read at run time, where a file describes it

if TYPE_CHECKING:
    from shardwise.plans.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model whose weights autocast casts, and the same with weights as sharding gathers them."""

    plain: ModelShape
    gathered: ModelShape

    def for_plan(self, plan: Plan) -> ModelShape:
        """Return the form that a plan trains; made once for all plans that share it."""
        layout = plan.layout
        shape = self.sliced(layout.cp, layout.tp, gathered=plan.zero >= 2)
        if not plan.fused_loss or shape.head is None:
            return shape
        key = ("fused", id(shape), plan.micro_batch, layout.tp)
        if key not in self._forms:
            self._forms[key] = fuse_loss(shape, plan.micro_batch, layout.tp)
        return self._forms[key]

    def sliced(self, cp: int, tp: int, *, gathered: bool) -> ModelShape:
        """Return the form on one of `cp` slices of the tokens, where matrices are cut by `tp`; made once."""
        shape = self.gathered if gathered else self.plain
        if cp == 1:
            return shape
        key = ("sliced", id(shape), cp, tp)
        if key not in self._forms:
            self._forms[key] = cut_context(shape, cp, tp)
        return self._forms[key]

    @cached_property
    def _forms(self) -> dict[tuple[str, int, int, int], ModelShape]:
        """All that were made: costs are kept by the identity of parts, which must live as long."""
        return {}
