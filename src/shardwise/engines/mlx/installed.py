"""Whether MLX is there and new enough; asked before any process starts, so it is not imported here."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from shardwise.errors import InputError

OLDEST = (0, 32, 4)
"""Written against this one. Ranks share the folder of the kernels that MLX compiles for a CPU: measured, up to 0.32.3 a
library stands there unfinished for 10 to 40 ms, and a rank that comes by then dies of it."""
PIP = "pip install 'shardwise[mlx]'"


def require_mlx() -> None:
    """Refuse to go on without an MLX that can be used."""
    try:
        found = version("mlx")
    except PackageNotFoundError:
        raise InputError("engine mlx needs MLX, which is not installed", code="extra.mlx-missing", fix=PIP) from None
    if tuple(int(part) for part in found.split("+")[0].split(".")[:3]) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise InputError(
            f"engine mlx needs MLX {oldest} or newer, {found} is installed", code="engine.mlx-too-old", fix=PIP
        )
