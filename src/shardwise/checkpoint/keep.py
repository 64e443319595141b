"""Which checkpoints may go, by a run's rules: a decision, nothing is removed here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from shardwise.runs.keep import Keep


@dataclass(frozen=True)
class Entry:
    """One checkpoint in a folder, as its manifest tells."""

    path: Path
    step: int
    saved_at: float
    """Seconds since 1970."""
    num_bytes: int
    metrics: dict[str, float]
    """What `facts["metrics"]` holds, as far as it is numbers."""


def to_remove(entries: Sequence[Entry], keep: Keep, *, now: float) -> list[Entry]:
    """Return the entries, given oldest first, that no rule of `keep` wants at time `now`; never the newest."""
    if keep.last is None and keep.age_s is None and not keep.best:
        return []
    staying = {entry.path for entry in entries[-(keep.last or 1) :]}
    if keep.age_s is not None:
        staying |= {entry.path for entry in entries if now - entry.saved_at < keep.age_s}
    measured = [entry for entry in entries if math.isfinite(entry.metrics.get(keep.metric, math.nan))]
    sign = -1 if keep.highest else 1
    ranked = sorted(measured, key=lambda entry: (sign * entry.metrics[keep.metric], -entry.saved_at))
    staying |= {entry.path for entry in ranked[: keep.best]}
    return [entry for entry in entries if entry.path not in staying]
