"""Whether the engine that a plan names can be had here; asked before any process starts, so no torch here."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from shardwise.errors import InputError

if TYPE_CHECKING:
    from shardwise.plans import Plan

OLDEST_MLX = (0, 32, 4)
"""Written against this one. Ranks share the folder of the kernels that MLX compiles for a CPU: measured, up to 0.32.3 a
library stands there unfinished for 10 to 40 ms, and a rank that comes by then dies of it."""
_PIP = "pip install 'shardwise[mlx]'"


def require_engine(plan: Plan) -> None:
    """Refuse a plan whose engine is not installed or too old, naming what to type."""
    if plan.engine == "deepspeed":
        from shardwise.engines.deepspeed.library import require_deepspeed

        require_deepspeed()
    if plan.engine == "mlx":
        require_mlx()


def require_mlx() -> None:
    """Refuse to continue without an MLX that can be used."""
    try:
        found = version("mlx")
    except PackageNotFoundError:
        raise InputError("engine mlx needs MLX, which is not installed", code="extra.mlx-missing", fix=_PIP) from None
    if tuple(int(part) for part in found.split("+")[0].split(".")[:3]) < OLDEST_MLX:
        oldest = ".".join(map(str, OLDEST_MLX))
        raise InputError(
            f"engine mlx needs MLX {oldest} or newer, {found} is installed", code="engine.mlx-too-old", fix=_PIP
        )


def preload_engine(plan: Plan) -> None:
    """Import a plan's engine once, before a fork, instead of on every rank."""
    if plan.engine == "deepspeed":
        from shardwise.engines.deepspeed.library import preload_deepspeed

        preload_deepspeed()
