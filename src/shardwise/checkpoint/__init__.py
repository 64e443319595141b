"""Checkpoints: directories of safetensors shards with a JSON manifest, saved atomically and loadable on any layout.

Names are imported at first use, so that the Specs of the `checkpoint` command (`checkpoint.spec`) do not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.checkpoint.async_save import AsyncSaver, StallReport
    from shardwise.checkpoint.directory import CheckpointDirectory, CheckpointEntry, load_newest, to_remove
    from shardwise.checkpoint.disk import CheckpointError, DamagedError, MismatchError, check_storage
    from shardwise.checkpoint.manifest import Manifest, Piece, TensorEntry, read_manifest
    from shardwise.checkpoint.read import Forecast, LoadReport, RankComparison, load
    from shardwise.checkpoint.shard import Damage, find_damage
    from shardwise.checkpoint.write import SaveReport, save

__all__ = [
    "AsyncSaver",
    "CheckpointDirectory",
    "CheckpointEntry",
    "CheckpointError",
    "Damage",
    "DamagedError",
    "Forecast",
    "LoadReport",
    "Manifest",
    "MismatchError",
    "Piece",
    "RankComparison",
    "SaveReport",
    "StallReport",
    "TensorEntry",
    "check_storage",
    "find_damage",
    "load",
    "load_newest",
    "read_manifest",
    "save",
    "to_remove",
]
_MODULES = ("async_save", "disk", "directory", "manifest", "read", "shard", "write")


def __getattr__(name: str) -> Any:
    if name in __all__:
        for module_name in _MODULES:
            module = importlib.import_module(f"{__name__}.{module_name}")
            value = getattr(module, name, None)
            if getattr(value, "__module__", None) == module.__name__:
                return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
