"""Fine-tuning by low-rank adapters, as planning sees it: frozen weights, two small trained ones beside every matrix."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardwise.planner.model.shape import Weight

if TYPE_CHECKING:
    from collections.abc import Sequence


def adapted(weights: Sequence[Weight], rank: int, *, adapts: bool) -> tuple[Weight, ...]:
    """Return a part's weights frozen, with adapters of `rank` beside its matrices where the part `adapts`."""
    frozen = tuple(replace(weight, trained=False) for weight in weights)
    return frozen + tuple(adapter for weight in weights if adapts for adapter in _adapters(weight, rank))


def _adapters(weight: Weight, rank: int) -> tuple[Weight, ...]:
    """Return the two factors beside a matrix; nothing beside vectors and tables, which no product reads."""
    columns = weight.numel // max(1, weight.rows)
    if columns <= 1 or not weight.cast:
        return ()
    return (
        Weight(name=f"{weight.name}.lora_a", rows=rank, numel=rank * columns),
        Weight(name=f"{weight.name}.lora_b", rows=weight.rows, numel=rank * weight.rows, cut=weight.cut),
    )
