"""Named plans as pure arithmetic: which degrees, and what the shard axis cuts."""

from __future__ import annotations

import re
from typing import Literal

from shardwise.errors import LayoutError, PlanError, nearest
from shardwise.layout import AXES, Layout, parse_layout

Zero = Literal[0, 1, 2, 3]

PRESETS = ("ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp", "tp", "pp", "cp")

_ZERO: dict[str, Zero] = {"zero1": 1, "zero2": 2, "zero3": 3, "fsdp": 3}


def preset_degrees(name: str, world_size: int) -> tuple[Layout, Zero]:
    """Return layout and zero stage of a preset or a product such as pp2.shard2.tp2, for this many ranks."""
    if world_size < 1:
        raise LayoutError(f"a world of {world_size} ranks", code="layout.empty-world", fix="use at least 1")
    if name == "ddp" or (world_size == 1 and name in PRESETS):
        return Layout(replicate=world_size), 0
    if name in _ZERO:
        return Layout(shard=world_size), _ZERO[name]
    if name == "hsdp":
        return _hybrid(world_size), 3
    if name in {"tp", "pp", "cp"}:
        return Layout(**{name: world_size}), 0
    is_product = re.fullmatch(r"[a-z]+[0-9]+(\.[a-z]+[0-9]+)*|one", name) is not None
    is_typo = "." not in name and name.rstrip("0123456789") not in {"one", "ep", *AXES}  # such as zero5
    if not is_product or is_typo:
        raise PlanError(
            f"plan {name!r} is not a preset, a product or a .toml file",
            code="plan.unknown-preset",
            fix=nearest(name, ["auto", *PRESETS]),
        )
    return _product(name, world_size)


def _hybrid(world_size: int) -> Layout:
    """Two replicas, each sharded over half of the ranks."""
    if world_size < 4 or world_size % 2:
        raise PlanError(
            f"hsdp needs an even number of at least 4 ranks, not {world_size}",
            code="plan.hsdp-world-size",
            fix="use fsdp",
        )
    return Layout(replicate=2, shard=world_size // 2)


def _product(name: str, world_size: int) -> tuple[Layout, Zero]:
    layout = parse_layout(name)
    if layout.world_size != world_size:
        rest, over = divmod(world_size, layout.world_size // layout.replicate)
        fix = (
            f"use {layout.world_size} ranks" if over or rest < 1 else f"set replicate{rest}, or use {layout.world_size}"
        )
        raise LayoutError(
            f"layout {layout} needs {layout.world_size} ranks, the world has {world_size}",
            code="layout.world-size-mismatch",
            fix=fix,
        )
    return layout, 3 if layout.shard > 1 else 0
