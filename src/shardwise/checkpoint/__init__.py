"""Checkpoints: a folder of safetensors shards and a JSON manifest, written whole or not at all, read by any layout.

Names are imported at first use: what `checkpoint` is asked (`checkpoint.spec`) costs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.checkpoint.async_save import AsyncSaver, StallReport
    from shardwise.checkpoint.disk import check_storage
    from shardwise.checkpoint.errors import CheckpointError, DamagedError, MismatchError
    from shardwise.checkpoint.folder import CheckpointEntry, CheckpointFolder, load_newest, to_remove
    from shardwise.checkpoint.manifest import Manifest, Piece, TensorEntry, read_manifest
    from shardwise.checkpoint.read import Forecast, LoadReport, RankComparison, load
    from shardwise.checkpoint.shard import Damage, find_damage
    from shardwise.checkpoint.write import SaveReport, save

__all__ = [
    "AsyncSaver",
    "CheckpointEntry",
    "CheckpointError",
    "CheckpointFolder",
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
_MODULES = ("async_save", "disk", "errors", "folder", "manifest", "read", "shard", "write")


def __getattr__(name: str) -> Any:
    if name in __all__:
        for module_name in _MODULES:
            module = importlib.import_module(f"{__name__}.{module_name}")
            value = getattr(module, name, None)
            if getattr(value, "__module__", None) == module.__name__:
                return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
