"""The hang verdict: who waits for whom, in which collective, and what the missing ranks do instead; pure decisions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwise.diagnosis.guard.stacks import DATA, Activity
from shardwise.runs.call_reader import Call  # noqa: TC001 - read at run time by msgspec
from shardwise.runs.calls import MEETINGS, GroupKey, call_words
from shardwise.runs.console import name_ranks, short

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

BUSY = 30
"""How many times the limit is waited for a rank that is seen to be busy: at the default limit five minutes. Nothing
tells an evaluation that computes in one place from a loop without an end, and to stop a healthy run costs more than to
stop a stuck one late; a note names the rank after the limit in any case."""
KNOWN_S = 300.0
"""What a rank gets at least that is busy with something known: how long one compiles is not a matter of the limit."""
_CORES = 0.1
"""Processors from which on a rank counts as computing: one that sleeps uses hundredths, and machines are shared."""
_BYTES_PER_S = 1 << 14
"""Bytes from which on a rank counts as reading or writing: more than a progress bar or a log prints."""
_PHASES = {"save": "saves a checkpoint", "evaluate": "evaluates", "start": "starts", "end": "ends"}


@dataclass(frozen=True, kw_only=True)
class Wait:
    """A rank inside a call."""

    call: Call
    for_s: float
    by_torch: bool = False
    """Issued by C++: counted by torch's flight recorder, not by us."""


@dataclass(frozen=True, kw_only=True)
class RankProgress:
    """How many calls of a channel a rank has issued."""

    group: GroupKey
    channel: str
    sequence: int
    by_torch: bool = False


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """One rank at one moment; durations instead of times, since clocks of machines differ."""

    rank: int
    state: str = "running"
    """Or "stopped", or "gone"."""
    waits: tuple[Wait, ...] = ()
    progress: tuple[RankProgress, ...] = ()
    newest: Call | None = None
    quiet_s: float = 0.0
    """Since the last sign: a call issued or left, a batch that came."""
    first_batch: bool = False
    """It loads, and has had no batch yet."""
    loads: bool = False
    """It is inside a data loader."""
    phase: str = ""
    """Of a training that marks its phases."""
    activity: Activity | None = None
    holds_interpreter: bool = False
    """C code has kept all its Python threads from running."""

    def has_entered(self, wait: Wait) -> bool:
        """Whether this rank has issued that call, or a later one."""
        call = wait.call
        return any(
            mine.sequence >= call.sequence
            for mine in self.progress
            if mine.by_torch == wait.by_torch and (mine.group, mine.channel) == call.channel
        )

    def patience_s(self, limit_s: float) -> float:
        """Return the seconds that others should wait for this rank."""
        doing = self.activity
        if self.state != "running" or self.waits:
            return limit_s
        is_known = self.phase in _PHASES or self.first_batch or (doing is not None and doing.kind not in {"", DATA})
        if is_known:
            return max(BUSY * limit_s, KNOWN_S)
        return BUSY * limit_s if doing is not None and _gets_on(doing) else limit_s


def _gets_on(doing: Activity) -> bool:
    """Whether a rank is seen to do something; a data loader that polls its workers moves, and does nothing."""
    if doing.cores >= _CORES or doing.bytes_per_s >= _BYTES_PER_S:
        return True
    return doing.is_moving and doing.kind != DATA


@dataclass(frozen=True, kw_only=True)
class Stall:
    """Ranks that wait for others."""

    waiting: tuple[tuple[int, Wait], ...]
    missing: tuple[RankStatus, ...]
    """Members that have not come; those that are to blame first."""
    is_verdict: bool
    """Nobody should wait for them any longer; else it is only worth a note."""
    network: str = ""
    """Which nodes have lost each other, if that is why; nobody is missing then."""

    @property
    def key(self) -> tuple[object, ...]:
        """The same while nothing changes."""
        call = self.waiting[0][1].call
        return call.group, call.what.channel, call.sequence, self.waiting[0][1].by_torch

    @property
    def text(self) -> str:
        """The verdict in one line: which ranks wait in which collective, and which ranks are missing."""
        parts = [*_waiting_words(self.waiting), *(_missing_words(status) for status in self.missing)]
        return "; ".join([*parts, *([self.network] if self.network else [])])


def waiting_ranks(ranks: Mapping[int, RankStatus], limit_s: float) -> list[tuple[int, Wait]]:
    """Return who is inside a call for longer than the limit, the longest first."""
    found = [(rank, wait) for rank, wait in _every_wait(ranks) if wait.for_s >= limit_s]
    return sorted(found, key=lambda item: -item[1].for_s)


def _every_wait(ranks: Mapping[int, RankStatus]) -> list[tuple[int, Wait]]:
    return [(rank, wait) for rank, status in ranks.items() for wait in status.waits]


def missing_ranks(ranks: Mapping[int, RankStatus], rank: int, wait: Wait) -> list[RankStatus]:
    """Return the members that rank `rank` waits for; of members that are not in `ranks` nothing is known."""
    what, members = wait.call.what, wait.call.group.members
    if what.is_message or what.peer >= 0:
        members = (what.peer,)  # below 0 where anybody may send
    known = [ranks[member] for member in members if member in ranks and member != rank]
    return [status for status in known if not status.has_entered(wait) or status.state == "stopped"]


def decide(ranks: Mapping[int, RankStatus], limit_s: float, network: str = "") -> Stall | None:
    """Return the stall that explains the others, None where everybody gets on or waits for nobody in particular.

    `network` names nodes that get no answer from each other: whoever waits then waits for that.
    """
    waiting = waiting_ranks(ranks, limit_s)
    if waiting and network:
        return Stall(waiting=_same(ranks, *waiting[0]), missing=(), is_verdict=True, network=network)
    found: list[tuple[bool, float, Stall]] = []
    for rank, wait in waiting:
        missing = missing_ranks(ranks, rank, wait)
        if not missing:
            continue
        blamed = [status for status in missing if not status.waits or status.state == "stopped"]
        # Those that wait are asked too: a checkpoint that a thread writes may be waited for while training goes on.
        quiet_s = min([wait.for_s, *(status.quiet_s for status in missing)])
        if quiet_s < limit_s:
            continue
        patience_s = min((status.patience_s(limit_s) for status in blamed), default=limit_s)
        stall = Stall(
            waiting=_same(ranks, rank, wait),
            missing=(*blamed, *(status for status in missing if status not in blamed)),
            is_verdict=quiet_s >= patience_s,
        )
        found.append((bool(blamed), wait.for_s, stall))
    # One that waits for somebody who waits for nobody explains those who wait for waiting ranks.
    return max(found, key=lambda item: item[:2])[2] if found else None


def _same(ranks: Mapping[int, RankStatus], rank: int, wait: Wait) -> tuple[tuple[int, Wait], ...]:
    """Return all who wait in the same call; at the two ends of a message, the one that waits."""
    call = wait.call
    if call.what.is_message:
        return ((rank, wait),)
    waits = sorted(_every_wait(ranks), key=lambda item: item[0])
    wanted = (call.channel, call.sequence, wait.by_torch)
    return tuple(
        (other, theirs)
        for other, theirs in waits
        if (theirs.call.channel, theirs.call.sequence, theirs.by_torch) == wanted
    )


def _waiting_words(waiting: Sequence[tuple[int, Wait]]) -> list[str]:
    """One clause for each place in which ranks wait."""
    places: dict[tuple[str, str], list[tuple[int, Wait]]] = {}
    for rank, wait in waiting:
        places.setdefault((wait.call.what.name, wait.call.site), []).append((rank, wait))
    return [
        f"{name_ranks([rank for rank, _ in here])} {'waits' if len(here) == 1 else 'wait'} in"
        f" {call_words(here[0][1].call)} for {max(wait.for_s for _, wait in here):.0f} s"
        for here in places.values()
    ]


def describe_ends(ranks: Sequence[RankStatus]) -> str:
    """Return where ranks were when they ended; empty if none has made a call."""
    parts = []
    for status in ranks:
        inside = max((wait.call for wait in status.waits), key=lambda call: call.entered, default=None)
        if inside is not None:
            parts.append(f"rank {status.rank} was in {call_words(inside)}")
        elif status.newest is not None and status.newest.group.name != MEETINGS:
            parts.append(f"rank {status.rank} had left {call_words(status.newest)}")
    return "; ".join(parts)


def _missing_words(status: RankStatus) -> str:
    name, for_s = f"rank {status.rank}", f" for {status.quiet_s:.0f} s"
    if status.state == "gone":
        return f"{name} has ended" + (f", its last call was {call_words(status.newest)}" if status.newest else "")
    if status.state == "stopped":
        return f"{name} is stopped by a signal (kill -CONT continues it)"
    if status.waits:
        wait = max(status.waits, key=lambda wait: wait.for_s)
        return f"{name} waits in {call_words(wait.call)} for {wait.for_s:.0f} s"
    doing = status.activity
    kind = _PHASES.get(status.phase) or (doing.kind if doing else "") or (DATA if status.loads else "")
    if doing is None:
        last = f", its last call was {call_words(status.newest)}" if status.newest else ""
        return f"{name} {kind or 'has not come'}{for_s}{last}"
    function = "" if doing.function == "<module>" else f"in {doing.function} "
    where = f"in {doing.inside}, called {function}" if doing.inside and not kind else function
    in_c = ", in C code that holds the interpreter," if status.holds_interpreter else ""
    return f"{name} {kind or 'is'} {where}at {short(doing.place)}{in_c}{for_s}"
