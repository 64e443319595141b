"""Ranks in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def name_ranks(ranks: Iterable[int]) -> str:
    """Return "rank 3", "ranks 0-2" or "ranks 0-2, 5"."""
    members = set(ranks)
    return f"{'rank' if len(members) == 1 else 'ranks'} {rank_spans(members)}"


def rank_spans(ranks: Iterable[int]) -> str:
    """Return ranks as ranges: 0-12, 14-63."""
    members = set(ranks)
    starts = sorted(rank for rank in members if rank - 1 not in members)
    ends = sorted(rank for rank in members if rank + 1 not in members)
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in zip(starts, ends, strict=True))
