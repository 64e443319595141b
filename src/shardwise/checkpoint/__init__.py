"""Checkpoints: a folder of safetensors shards and a JSON manifest, written whole or not at all, read by any layout."""

from shardwise.checkpoint.async_save import AsyncSaver, StallReport
from shardwise.checkpoint.check import Damage, find_damage
from shardwise.checkpoint.disk import check_storage
from shardwise.checkpoint.errors import CheckpointError, DamagedError, MismatchError
from shardwise.checkpoint.folder import CheckpointEntry, CheckpointFolder, load_newest, to_remove
from shardwise.checkpoint.load import Forecast, LoadReport, RankComparison, load
from shardwise.checkpoint.manifest import Manifest, Piece, TensorEntry, read_manifest
from shardwise.checkpoint.save import SaveReport, save

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
