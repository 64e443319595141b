"""Fine-tuning by low-rank adapters, as planning sees it: frozen weights, small trained ones beside every matrix."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from shardwise.errors import PlanError
from shardwise.plan.model.shape import Footprint, Model, Weight

if TYPE_CHECKING:
    from shardwise.plan.model.shape import ModelShape, Part


def with_lora(model: Model, rank: int) -> Model:
    """Return the model with all its weights frozen, and adapters of `rank` on every matrix of its blocks."""
    if rank < 1:
        raise PlanError(f"LoRA rank {rank} adapts nothing", fix="use 1 or more, such as 16")
    return Model(plain=_adapted(model.plain, rank), gathered=_adapted(model.gathered, rank))


def _adapted(shape: ModelShape, rank: int) -> ModelShape:
    parts = tuple(_adapt(part, rank) for part in shape.parts)
    return dataclasses.replace(shape, name=f"{shape.name} + LoRA {rank}", parts=parts)


def _adapt(part: Part, rank: int) -> Part:
    frozen = tuple(dataclasses.replace(weight, trained=False) for weight in part.weights)
    adapters = tuple(adapter for weight in part.weights for adapter in _adapters(weight, rank, part.kind))
    products = tuple(
        product
        for matmul in part.work.matmuls
        if part.kind == "block"
        for product in (
            dataclasses.replace(matmul, columns=rank, cut="inner" if matmul.cut == "inner" else "none"),
            dataclasses.replace(matmul, inner=rank, cut="columns" if matmul.cut == "columns" else "none"),
        )
    )
    share = sum(weight.numel for weight in adapters) / max(1, part.numel)
    work = part.work
    return dataclasses.replace(
        part,
        weights=frozen + adapters,
        # Two small products and a sum beside every large product.
        work=dataclasses.replace(
            work,
            matmuls=work.matmuls + products,
            kernels=work.kernels + 2 * len(products),
            kernels_backward=work.kernels_backward + 4 * len(products),
        ),
        footprints={policy: _scaled(footprint, share) for policy, footprint in part.footprints.items()},
    )


def _adapters(weight: Weight, rank: int, kind: str) -> tuple[Weight, ...]:
    """Return the two factors beside a matrix of a block; nothing beside vectors."""
    columns = weight.numel // max(1, weight.rows)
    if kind != "block" or columns <= 1:
        return ()
    return (
        Weight(name=f"{weight.name}.lora_a", rows=rank, numel=rank * columns),
        Weight(name=f"{weight.name}.lora_b", rows=weight.rows, numel=rank * weight.rows, cut=weight.cut),
    )


def _scaled(footprint: Footprint, share: float) -> Footprint:
    """Frozen weights make no gradients; adapters make theirs at the same moments."""
    moments = tuple(dataclasses.replace(moment, gradients=moment.gradients * share) for moment in footprint.backward)
    return dataclasses.replace(footprint, backward=moments)
