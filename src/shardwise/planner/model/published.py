"""Published models by name as planning sees them, in closed form and without torch."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from shardwise.errors import PlanError, nearest
from shardwise.planner.model.decoder_parts import decoder_shape
from shardwise.planner.model.resnet_parts import resnet_shape
from shardwise.planner.model.t5_parts import t5_shape
from shardwise.plans.catalogue import BYT5_COMMON, BYT5_SIZES, RESNETS, SIZES, T5_COMMON, T5_SIZES

if TYPE_CHECKING:
    from shardwise.planner.model.shape import ModelShape, Part
    from shardwise.plans.plan import DType

PUBLISHED: tuple[str, ...] = (*RESNETS, *SIZES, *T5_SIZES, *BYT5_SIZES)
"""Names of the models that `published` knows."""

IMAGE_SIDE = 224
T5_LENGTH, BYT5_LENGTH = 512, 1024


def published(name: str, *, compute: DType, gathered: bool, length: int | None = None, lora: int = 0) -> ModelShape:
    """Describe a published model trained in `compute`; `gathered` when sharding hands weights over in that dtype.

    `length` is tokens per sample (None: the model's context; T5's labels are a quarter as long), or an image's side
    in pixels; `lora` is the rank of adapters on every matrix of the blocks, with all else frozen and, where that is
    half precision, held in `compute`, as a checkpoint to be fine-tuned is loaded.
    """
    is_narrow = lora > 0 and compute in {"bf16", "fp16"}
    shape = _published(name, length, {"compute": compute, "gathered": gathered or is_narrow, "lora": lora})
    if is_narrow:
        parts = tuple(_hold_frozen_narrow(part) for part in shape.parts)
        return dataclasses.replace(shape, name=f"{name} in {compute} + LoRA {lora}", parts=parts)
    return dataclasses.replace(shape, name=f"{name} + LoRA {lora}") if lora else shape


def _hold_frozen_narrow(part: Part) -> Part:
    """Return a part whose frozen weights are held in the compute dtype, so that nothing casts them."""
    weights = [
        weight if weight.trained else dataclasses.replace(weight, narrow=True, cast=False) for weight in part.weights
    ]
    return dataclasses.replace(part, weights=tuple(weights))


def _published(name: str, length: int | None, options: dict[str, Any]) -> ModelShape:
    if length is not None and length < 1:
        raise PlanError(
            f"samples have length {length}", code="plan.sample-length-invalid", fix="use a whole number of at least 1"
        )
    if name in SIZES:
        config = SIZES[name]
        length = config.context if length is None else length
        if config.family == "gpt2" and length > config.context:
            raise PlanError(
                f"{name} has {config.context} positions, samples have {length} tokens",
                code="model.context-exceeded",
                fix="shorten them",
            )
        return decoder_shape(name, config, length, **options)
    if name in RESNETS:
        if options.pop("lora"):
            raise PlanError(
                f"adapters go beside linear modules, and {name} has convolutions",
                code="model.no-linear-modules",
                fix="leave out --lora, or name a decoder",
            )
        bottleneck, num_blocks = RESNETS[name]
        side = length or IMAGE_SIDE
        return resnet_shape(name, num_blocks, side, bottleneck=bottleneck, **options)
    if name in T5_SIZES:
        settings = T5_COMMON | T5_SIZES[name]
        return t5_shape(name, settings, length or T5_LENGTH, **options)
    if name in BYT5_SIZES:
        settings = BYT5_COMMON | BYT5_SIZES[name]
        return t5_shape(name, settings, length or BYT5_LENGTH, **options)
    raise PlanError(f"there is no published model {name!r}", code="model.unknown-name", fix=nearest(name, PUBLISHED))
