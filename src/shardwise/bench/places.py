"""Where the ranks of a measurement compute: with gloo, several may share one GPU."""

from __future__ import annotations

import torch

from shardwise.environment import identify


def rank_device(asked: str | None, backend: str | None) -> str | None:
    """Return what to ask a world for: as asked, but gloo's ranks beyond the GPUs share them in turn."""
    if backend != "gloo" or asked not in (None, "cuda") or not torch.cuda.is_available():
        return asked
    return f"cuda:{identify().local_rank % torch.cuda.device_count()}"
