"""What the things in a checkpoint folder are called."""

from __future__ import annotations

import re

LATEST = "latest"
"""A small file that names the checkpoint saved last."""

_NAME = re.compile(r"step-(\d{8,18})(?:~(\d{1,9}))?")


def name_of(step: int, attempt: int = 1) -> str:
    """Return the folder name of a step; a step that is saved again gets "~2", so that the old one stays until then."""
    return f"step-{step:08d}" + (f"~{attempt}" if attempt > 1 else "")


def parse_name(name: str) -> tuple[int, int] | None:
    """Return step and attempt of a folder name, None for any other name."""
    match = _NAME.fullmatch(name)
    return (int(match[1]), int(match[2] or 1)) if match else None


def shard_name(rank: int) -> str:
    """Return the name of one rank's shard file."""
    return f"rank-{rank:05d}.safetensors"
