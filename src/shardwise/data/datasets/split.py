"""The two splits that every source knows."""

from __future__ import annotations

from shardwise.errors import DataError, nearest

SPLITS = ("train", "test")


def check_split(split: str) -> None:
    """Refuse a split that is neither "train" nor "test"."""
    if split not in SPLITS:
        raise DataError(f"there is no split {split!r}", code="data.unknown-split", fix=nearest(str(split), SPLITS))
