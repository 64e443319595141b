"""Exporting: the trained weights as one plain file, from any strategy."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from shardwise.checkpoint.agreement import nothing_more, together
from shardwise.parallel.apply import stages_of
from shardwise.parallel.gather import full_state_dict

if TYPE_CHECKING:
    from torch import Tensor, nn


def export(model: nn.Module, path: Path | str) -> None:
    """Write the model's whole state dict to `path` on rank 0; called on every rank, communicates over the world.

    `torch.load(path, weights_only=True)` reads it without shardwise. The file appears whole or not at all, replacing
    one that is there; if it cannot be written, every rank raises the same CheckpointError.
    """
    path = Path(path)
    weights = full_state_dict(model)
    for alias, name in _tied(model).items():
        if alias in weights:
            weights[alias] = weights[name]  # one memory, so one copy in the file
    group = dist.group.WORLD if dist.is_initialized() else None
    together(group, f"exporting {path}", lambda: _write(weights, path) if weights else None, nothing_more)


def _tied(model: nn.Module) -> dict[str, str]:
    """Return the names under which this rank's model has a weight that an earlier name has too."""
    tied = {}
    for stage in stages_of(model):
        first: dict[int, str] = {}
        for name, value in stage.state_dict(keep_vars=True).items():
            original = first.setdefault(id(value), name)
            if original != name:
                tied[name] = original
    return tied


def _write(weights: dict[str, Tensor], path: Path) -> None:
    draft = path.with_name(f".exporting-{path.name}-{secrets.token_hex(4)}")
    try:
        with draft.open("xb") as file:
            torch.save(weights, file)
            file.flush()
            os.fsync(file.fileno())
        draft.rename(path)
    finally:
        draft.unlink(missing_ok=True)
