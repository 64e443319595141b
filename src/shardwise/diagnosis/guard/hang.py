"""The hang verdict: which ranks wait in which collective, and where the missing ranks are; pure functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwise.diagnosis.guard.stacks import DATA, Activity
from shardwise.runs.call_reader import Call  # noqa: TC001 - read at run time by msgspec
from shardwise.runs.calls import STARTUP_GROUP, GroupKey, describe_call
from shardwise.runs.console import name_ranks, short

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

BUSY_FACTOR = 30
"""Factor on the hang limit for a rank that uses the CPU or does I/O: five minutes at the default limit. A long
evaluation cannot be distinguished from an endless loop, and stopping a healthy run costs more than stopping a stuck run
late. In either case, a note names the rank after the hang limit."""
KNOWN_S = 300.0
"""Minimum limit for a rank in a known long activity: the time of a compilation does not depend on the hang limit."""
_MIN_CORES = 0.1
"""Number of CPU cores in use above which a rank counts as computing; a sleeping rank uses hundredths of a core."""
_MIN_BYTES_PER_S = 1 << 14
"""Bytes per second above which a rank counts as doing I/O; a progress bar or a log prints less."""
_PHASES = {"save": "saves a checkpoint", "evaluate": "evaluates", "start": "starts", "end": "ends"}


@dataclass(frozen=True, kw_only=True)
class Wait:
    """A call that a rank is waiting in."""

    call: Call
    for_s: float
    by_torch: bool = False
    """Whether the call was issued from C++ and counted by torch's flight recorder instead of our recorder."""


@dataclass(frozen=True, kw_only=True)
class RankProgress:
    """The sequence number of the last call that a rank has issued on one channel."""

    group: GroupKey
    channel: str
    sequence: int
    by_torch: bool = False


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """The state of one rank at one moment. Clocks of machines differ, so it contains durations instead of times."""

    rank: int
    state: str = "running"
    """`running`, `stopped` or `gone`."""
    waits: tuple[Wait, ...] = ()
    progress: tuple[RankProgress, ...] = ()
    newest: Call | None = None
    quiet_s: float = 0.0
    """Seconds since the last sign of progress: a call issued or completed, or a batch received."""
    first_batch: bool = False
    """Whether the rank is loading its first batch."""
    loads: bool = False
    """Whether the rank is inside a data loader."""
    phase: str = ""
    """Training phase, if the script records phases."""
    activity: Activity | None = None
    holds_interpreter: bool = False
    """Whether C code blocks all Python threads of the rank."""
    host: str = ""
    """Host of the rank; empty in a run on one node."""

    def has_entered(self, wait: Wait) -> bool:
        """Return whether this rank has issued the call of `wait`, or a later one on the same channel."""
        for issued in self.progress:
            is_same_channel = issued.by_torch == wait.by_torch and (issued.group, issued.channel) == wait.call.channel
            if is_same_channel and issued.sequence >= wait.call.sequence:
                return True
        return False

    def wait_limit_s(self, limit_s: float) -> float:
        """Return the seconds that other ranks may wait for this rank before it counts as hanging."""
        doing = self.activity
        if self.state != "running" or self.waits:
            return limit_s
        is_known = self.phase in _PHASES or self.first_batch or (doing is not None and doing.kind not in {"", DATA})
        if is_known:
            return max(BUSY_FACTOR * limit_s, KNOWN_S)
        if doing is not None and _is_busy(doing):
            return BUSY_FACTOR * limit_s
        return limit_s


def _is_busy(doing: Activity) -> bool:
    """Return whether a rank makes progress. Polling a data loader's workers changes the stack without progress."""
    if doing.cores >= _MIN_CORES or doing.bytes_per_s >= _MIN_BYTES_PER_S:
        return True
    return doing.is_moving and doing.kind != DATA


@dataclass(frozen=True, kw_only=True)
class Stall:
    """Ranks that wait in a call for ranks that have not entered it."""

    waiting: tuple[tuple[int, Wait], ...]
    missing: tuple[RankStatus, ...]
    """Members of the group that have not entered the call, the cause first."""
    is_verdict: bool
    """Whether the wait limit of the missing ranks has passed; otherwise the stall is only a note."""
    network: str = ""
    """The pair of nodes that cannot reach each other, if that is the cause; `missing` is empty then."""

    @property
    def key(self) -> tuple[object, ...]:
        """Identity of the call that the ranks wait in."""
        call = self.waiting[0][1].call
        return call.group, call.what.channel, call.sequence, self.waiting[0][1].by_torch

    @property
    def text(self) -> str:
        """The verdict in one line: which ranks wait in which collective, and which ranks are missing."""
        parts = [*_describe_waiting(self.waiting), *map(_describe_missing, self.missing)]
        if self.network:
            parts.append(self.network)
        return "; ".join(parts)


def waiting_ranks(ranks: Mapping[int, RankStatus], limit_s: float) -> list[tuple[int, Wait]]:
    """Return the ranks that have been in a call for at least `limit_s`, the longest wait first."""
    found = [item for item in _all_waits(ranks) if item[1].for_s >= limit_s]
    return sorted(found, key=lambda item: -item[1].for_s)


def _all_waits(ranks: Mapping[int, RankStatus]) -> list[tuple[int, Wait]]:
    return [(rank, wait) for rank, status in ranks.items() for wait in status.waits]


def missing_ranks(ranks: Mapping[int, RankStatus], rank: int, wait: Wait) -> list[RankStatus]:
    """Return the group members that `rank` waits for. Members without an entry in `ranks` are ignored."""
    what, members = wait.call.what, wait.call.group.members
    if what.is_message or what.peer >= 0:
        members = (what.peer,)  # negative if any rank may send
    missing = []
    for member in members:
        status = ranks.get(member)
        if status is None or member == rank:
            continue
        if not status.has_entered(wait) or status.state == "stopped":
            missing.append(status)
    return missing


def decide(ranks: Mapping[int, RankStatus], limit_s: float, network: str = "") -> Stall | None:
    """Return the stall that causes all other stalls; None if no rank waits longer than `limit_s` for another rank.

    `network` names nodes that cannot reach each other; if set, it is the cause of every wait.
    """
    waiting = waiting_ranks(ranks, limit_s)
    if waiting and network:
        return Stall(waiting=_in_same_call(ranks, *waiting[0]), missing=(), is_verdict=True, network=network)
    found: list[tuple[bool, float, Stall]] = []
    for rank, wait in waiting:
        missing = missing_ranks(ranks, rank, wait)
        # Missing ranks that wait elsewhere count too: training may continue while a thread writes a checkpoint.
        quiet_s = min([wait.for_s, *(status.quiet_s for status in missing)])
        if not missing or quiet_s < limit_s:
            continue
        causes: list[RankStatus] = []
        others: list[RankStatus] = []
        for status in missing:
            is_cause = not status.waits or status.state == "stopped"
            (causes if is_cause else others).append(status)
        wait_limit_s = min((status.wait_limit_s(limit_s) for status in causes), default=limit_s)
        stall = Stall(
            waiting=_in_same_call(ranks, rank, wait),
            missing=(*causes, *others),
            is_verdict=quiet_s >= wait_limit_s,
        )
        found.append((bool(causes), wait.for_s, stall))
    if not found:
        return None
    # A rank that waits for a rank that does not wait explains all ranks that wait for waiting ranks.
    return max(found, key=lambda item: item[:2])[2]


def _in_same_call(ranks: Mapping[int, RankStatus], rank: int, wait: Wait) -> tuple[tuple[int, Wait], ...]:
    """Return all ranks that wait in the same collective; for a point-to-point call, only the rank that waits."""
    call = wait.call
    if call.what.is_message:
        return ((rank, wait),)
    waits = sorted(_all_waits(ranks), key=lambda item: item[0])
    same = []
    for other, theirs in waits:
        if (theirs.call.channel, theirs.call.sequence, theirs.by_torch) == (call.channel, call.sequence, wait.by_torch):
            same.append((other, theirs))
    return tuple(same)


def _describe_waiting(waiting: Sequence[tuple[int, Wait]]) -> list[str]:
    """Return one clause for each source line at which ranks wait."""
    by_site: dict[tuple[str, str], dict[int, Wait]] = {}
    for rank, wait in waiting:
        by_site.setdefault((wait.call.what.name, wait.call.site), {})[rank] = wait
    clauses = []
    for waits in by_site.values():
        longest = max(waits.values(), key=lambda wait: wait.for_s)
        verb = "waits" if len(waits) == 1 else "wait"
        clauses.append(f"{name_ranks(list(waits))} {verb} in {describe_call(longest.call)} for {longest.for_s:.0f} s")
    return clauses


def describe_ends(ranks: Sequence[RankStatus]) -> str:
    """Return the last recorded collective of each rank that ended; empty if no rank recorded one."""
    parts = []
    for status in ranks:
        inside = max((wait.call for wait in status.waits), key=lambda call: call.entered, default=None)
        if inside is not None:
            parts.append(f"rank {status.rank} was in {describe_call(inside)}")
        elif status.newest is not None and status.newest.group.name != STARTUP_GROUP:
            parts.append(f"rank {status.rank} had left {describe_call(status.newest)}, the last that was recorded")
    return "; ".join(parts)


def _describe_missing(status: RankStatus) -> str:
    name = f"rank {status.rank} on {status.host}" if status.host else f"rank {status.rank}"
    for_s = f" for {status.quiet_s:.0f} s"
    last_call = ""
    if status.newest is not None:
        last_call = f", its last call was {describe_call(status.newest)}"
    if status.state == "gone":
        return f"{name} has ended{last_call}"
    if status.state == "stopped":
        return f"{name} is stopped by a signal (kill -CONT continues it)"
    if status.waits:
        wait = max(status.waits, key=lambda wait: wait.for_s)
        return f"{name} waits in {describe_call(wait.call)} for {wait.for_s:.0f} s"
    kind = _describe_kind(status)
    doing = status.activity
    if doing is None:
        return f"{name} {kind or 'has not arrived'}{for_s}{last_call}"
    where = "" if doing.function == "<module>" else f"in {doing.function} "
    if doing.inside and not kind:
        where = f"in {doing.inside}, called {where}"
    in_c = ", in C code that holds the interpreter," if status.holds_interpreter else ""
    return f"{name} {kind or 'is'} {where}at {short(doing.place)}{in_c}{for_s}"


def _describe_kind(status: RankStatus) -> str:
    """Return the phase or activity of a rank as a verb; empty if unknown."""
    if status.phase in _PHASES:
        return _PHASES[status.phase]
    if status.activity is not None and status.activity.kind:
        return status.activity.kind
    return DATA if status.loads else ""
