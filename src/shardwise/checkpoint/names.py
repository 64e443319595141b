"""Names of checkpoints and of the files in them, on disk and on object storage; imports no torch."""

from __future__ import annotations

import re

MANIFEST = "manifest.json"
LATEST = "latest"
"""Name of the file that contains the name of the newest checkpoint."""
BEST = "best"
"""Name of the file that contains the name of the best checkpoint by the metric of --keep."""

_NAME = re.compile(r"step-(\d{8,18})(?:~(\d{1,9}))?")


def name_of(step: int, attempt: int = 1) -> str:
    """Return the directory name of a step. The second save of the same step is named "step-NNNNNNNN~2"."""
    name = f"step-{step:08d}"
    return name if attempt == 1 else f"{name}~{attempt}"


def parse_name(name: str) -> tuple[int, int] | None:
    """Return the step and attempt in the name of a checkpoint directory, or None if the name has a different format."""
    match = _NAME.fullmatch(name)
    return None if match is None else (int(match[1]), int(match[2] or 1))


def shard_name(rank: int) -> str:
    """Return the name of the shard file of a rank."""
    return f"rank-{rank:05d}.safetensors"
