"""Which checkpoints stay: by count, by age, the best by a metric; a decision, nothing is removed here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwise.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


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


@dataclass(frozen=True, kw_only=True)
class Keep:
    """What to keep: a checkpoint stays if any of the rules wants it; without any rule all stay."""

    last: int | None = None
    """The newest so many."""
    age_s: float | None = None
    """Those younger than so many seconds."""
    best: int = 0
    """So many with the best value of `metric`."""
    metric: str = ""
    highest: bool = False
    """Whether the best value is the highest; else the lowest."""

    def __post_init__(self) -> None:
        if self.last is not None and self.last < 1:
            raise InputError(f"keep.last is {self.last}", fix="keep at least 1, or leave it out to keep all")
        if self.age_s is not None and self.age_s < 0:
            raise InputError(f"keep.age_s is {self.age_s}", fix="use seconds, at least 0")
        if self.best < 0 or bool(self.best) != bool(self.metric):
            raise InputError(f"keep.best is {self.best} of metric {self.metric!r}", fix="give both or neither")


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
