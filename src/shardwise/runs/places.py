"""Source lines as messages show them."""

from __future__ import annotations

from pathlib import Path


def short(place: str) -> str:
    """Return FILE:LINE with the file relative to the current folder, if it is below it."""
    file, _, line = place.rpartition(":")
    try:
        return f"{Path(file).relative_to(Path.cwd())}:{line}"
    except (ValueError, OSError):
        return place
