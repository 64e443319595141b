"""Many ranks in few rows: those that do the same are one, and what is unlike the others stands first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.monitor.status import RankStatus


@dataclass(frozen=True)
class Alike:
    """Ranks that share state, phase and step."""

    ranks: tuple[int, ...]
    worst: RankStatus
    """The one that is furthest behind."""
    host: str
    device: str
    memory_bytes: float | None
    """Of the one that needs most."""
    words: str = ""
    """In place of ranks, for rows that did not fit."""


def fold_ranks(ranks: Sequence[RankStatus], room: int) -> list[Alike]:
    """Return at most `room` rows: one a rank in their order if they fit, else those alike together, the worst first."""
    if len(ranks) <= room:
        return [_together([rank]) for rank in ranks]
    groups: dict[tuple[object, ...], list[RankStatus]] = {}
    for rank in ranks:
        groups.setdefault((rank.state, rank.words, rank.phase, rank.step), []).append(rank)
    rows = sorted((_together(group) for group in groups.values()), key=_badness, reverse=True)
    if len(rows) <= room:
        return rows
    rest = rows[room - 1 :]
    left_out = sum(len(row.ranks) for row in rest)
    return [*rows[: room - 1], Alike((), rest[0].worst, "", "", None, words=f"{left_out} more")]


def _badness(row: Alike) -> tuple[bool, int, float, int]:
    """Ends before lags, lags by steps and then by time; of equal ones the smaller group."""
    worst = row.worst
    has_failed = worst.state in {"failed", "gone"}
    return has_failed, worst.lag_steps or 0, worst.lag_s or 0.0, -len(row.ranks)


def _together(group: Sequence[RankStatus]) -> Alike:
    hosts = sorted({rank.host for rank in group})
    devices = sorted({rank.device for rank in group})
    memory = [rank.memory_bytes for rank in group if rank.memory_bytes is not None]
    return Alike(
        ranks=tuple(rank.rank for rank in group),
        worst=max(group, key=lambda rank: (rank.lag_steps or 0, rank.lag_s or 0.0, -rank.rank)),
        host=hosts[0] if len(hosts) == 1 else f"{len(hosts)} hosts",
        device=devices[0] if len(devices) == 1 else f"{len(group)} devices",
        memory_bytes=max(memory, default=None),
    )
