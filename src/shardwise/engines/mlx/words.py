"""MLX in the words of a start report: its version, and what it computes on."""

from __future__ import annotations

from importlib.metadata import version

import mlx.core as mx


def engine_words() -> str:
    """Say which MLX computes where, such as "mlx 0.32.4 on the CPU"."""
    shared = "the GPU, in one memory with the CPU: more processes would share both"
    return f"mlx {version('mlx')} on {'the CPU' if mx.default_device() == mx.cpu else shared}"
