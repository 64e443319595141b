"""The start-up timeline: what a rank did between its start and its first step."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from pathlib import Path


class Phase(msgspec.Struct, frozen=True):
    """One part of the start."""

    name: str
    seconds: float


class Timeline:
    """Collects phases; each ends where the next begins."""

    def __init__(self, started_at: float | None = None) -> None:
        """`started_at`: seconds since the epoch when the launcher began; None means now."""
        self._last = time.time() if started_at is None else started_at
        self.phases: list[Phase] = []

    def mark(self, name: str) -> None:
        """End the phase `name` here."""
        now = time.time()
        self.phases.append(Phase(name, now - self._last))
        self._last = now

    def write(self, path: Path) -> None:
        """Write the phases as JSON."""
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self.phases), indent=1))
