"""Whether the engine that a plan names can be had here; asked before any process starts, so no torch here."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwise.plans import Plan


def require_engine(plan: Plan) -> None:
    """Refuse a plan whose engine is not installed or too old, naming what to type."""
    if plan.engine == "deepspeed":
        from shardwise.engines.deepspeed.library import require_deepspeed

        require_deepspeed()
    if plan.engine == "mlx":
        from shardwise.engines.mlx.installed import require_mlx

        require_mlx()


def preload_engine(plan: Plan) -> None:
    """Import a plan's engine once, before a fork, instead of on every rank."""
    if plan.engine == "deepspeed":
        from shardwise.engines.deepspeed.library import preload_deepspeed

        preload_deepspeed()
