"""Checkpoints: a folder of safetensors shards and a JSON manifest, written whole or not at all, read by any layout."""

from shardwise.checkpoint.async_save import AsyncSaver, StallReport
from shardwise.checkpoint.check import Damage, find_damage
from shardwise.checkpoint.errors import CheckpointError, DamagedError, MismatchError
from shardwise.checkpoint.fill import Forecast
from shardwise.checkpoint.folder import CheckpointFolder, load_newest
from shardwise.checkpoint.keep import Entry, to_remove
from shardwise.checkpoint.load import Comparison, LoadReport, load
from shardwise.checkpoint.manifest import Manifest, Piece, TensorEntry, read_manifest
from shardwise.checkpoint.save import SaveReport, save
from shardwise.checkpoint.storage import check_storage

__all__ = [
    "AsyncSaver",
    "CheckpointError",
    "CheckpointFolder",
    "Comparison",
    "Damage",
    "DamagedError",
    "Entry",
    "Forecast",
    "LoadReport",
    "Manifest",
    "MismatchError",
    "Piece",
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
