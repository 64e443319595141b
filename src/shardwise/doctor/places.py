"""Ranks and source lines in words."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def ranks_words(ranks: Sequence[int]) -> str:
    """Return "rank 3", "ranks 0-2" or "ranks 0-2, 5"."""
    ordered = sorted(set(ranks))
    spans: list[list[int]] = []
    for rank in ordered:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    words = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return f"{'rank' if len(ordered) == 1 else 'ranks'} {words}"


def short(place: str) -> str:
    """Return FILE:LINE with the file relative to the current folder, if it is below it."""
    file, _, line = place.rpartition(":")
    try:
        return f"{Path(file).relative_to(Path.cwd())}:{line}"
    except (ValueError, OSError):
        return place
