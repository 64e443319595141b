"""Reading the recorded calls of a rank that runs, hangs or has ended, and comparing the last ones of all ranks."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from shardwise.runs import calls
from shardwise.runs.calls import MAIN_THREAD, GroupKey, Operation, call_words, describe_difference, differ
from shardwise.runs.console import name_ranks, short
from shardwise.runs.recorder import Stack, parse_fatal_stack, parse_traceback, user_frame

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from shardwise.runs import RunDirectory


_MARGIN = 16
"""Calls at the end of the ring that may be overwritten while they are read."""
_MOST_OPEN = 256
"""Calls that nobody waits for are followed until so many others have been issued."""
_NUMBER, _PLACE = (1 << calls.NUMBER_BITS) - 1, (1 << calls.PLACE_BITS) - 1
UNKNOWN = Operation("a call", "", "", "")
"""In place of one that did not fit into the table."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of one rank; times are seconds since the epoch, 0 for not yet."""

    group: GroupKey
    sequence: int
    """Counts the calls of its channel in its group, from 1."""
    what: Operation
    site: str
    """Source line, as FILE:LINE; empty where unknown."""
    entered: float
    waited: float
    """Since when somebody waits for it."""
    left: float
    backward: bool
    """Made while gradients were computed."""

    @property
    def channel(self) -> tuple[GroupKey, str]:
        """Where it is counted."""
        return self.group, self.what.channel

    @property
    def is_waited_for(self) -> bool:
        """Whether somebody is inside now."""
        return bool(self.waited) and not self.left


@dataclass(frozen=True, slots=True)
class Flight:
    """How far the collectives of a group are, counted by torch, those that C++ issued included."""

    group: GroupKey
    enqueued: int
    completed: int
    pending: Call | None
    """The oldest that is not done, once it has been so for a second."""


class CallReader:
    """Follows the ring at `path`, which may not be there yet, and which a restarted rank replaces."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = 0
        self._forget()

    def _forget(self) -> None:
        self._map: mmap.mmap | None = None
        self._words = memoryview(b"").cast("Q")
        self._seen = 0
        self._values: dict[int, Any] = {}
        self._kinds: dict[int, tuple[GroupKey | None, Operation, str]] = {}
        self._open: dict[int, Call] = {}
        self.last: dict[tuple[GroupKey, str], Call] = {}
        """The newest call by channel."""

    def refresh(self) -> list[Call]:
        """Look again; returns the calls that are new, oldest first. Those that were overwritten are left out."""
        if not self._attach():
            return []
        count = self._words[calls.COUNT]
        new = []
        for number in range(max(self._seen, count - calls.CAPACITY + _MARGIN) + 1, count + 1):
            call = self._call(number)
            if call is not None:
                new.append(call)
                self.last[call.channel] = call
                if not call.left:
                    self._open[number] = call
        self._seen = count
        for number in list(self._open):
            again = self._call(number)
            if again is None or again.left or (number < count - _MOST_OPEN and not again.waited):
                del self._open[number]
            else:
                self._open[number] = again
        return new

    @property
    def is_there(self) -> bool:
        """Whether there is a ring."""
        return self._map is not None

    @property
    def waits(self) -> tuple[Call, ...]:
        """The calls that somebody was waiting for at the last look."""
        return tuple(call for call in self._open.values() if call.is_waited_for)

    @property
    def pending(self) -> tuple[Call, ...]:
        """The calls that were issued and not done at the last look, waited for or not."""
        return tuple(self._open.values())

    @property
    def newest(self) -> Call | None:
        """The last call that was issued, None before the first."""
        return max(self.last.values(), key=lambda call: call.entered, default=None)

    def header(self, place: int) -> int:
        """Return a field of the header, 0 without a ring."""
        return self._words[place] if self._map is not None else 0

    def flights(self) -> tuple[Flight, ...]:
        """Return how far the groups are that torch's flight recorder follows."""
        return tuple(flight for slot in range(calls.FLIGHTS) if (flight := self._flight(slot)) is not None)

    def arrivals(self) -> list[Call]:
        """Return the last collectives that torch counts, without their source lines; looked at ever more rarely."""
        found = []
        for index in range(calls.ARRIVALS if self._map is not None else 0):
            place = calls.AT_ARRIVALS + index * calls.ARRIVAL_WORDS
            sequence, what, at = self._words[place : place + 3].tolist()
            group, operation, _ = self._unpack(what)
            if sequence and group is not None:
                found.append(Call(group, sequence, operation, "", at / 1e9, 0.0, at / 1e9, backward=False))
        return found

    def _attach(self) -> bool:
        """Map the file if it is new; False where there is none."""
        try:
            inode = self._path.stat().st_ino
            if inode != self._inode or self._map is None:
                with self._path.open("rb") as file:
                    found = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                self._forget()
                self._inode, self._map, self._words = inode, found, memoryview(found).cast("Q")
        except (OSError, ValueError, TypeError):
            return False
        return len(self._words) == calls.WORDS and self._words[calls.IS_MAGIC] == calls.MAGIC

    def _call(self, number: int) -> Call | None:
        place = calls.AT_CALLS + (number & calls.CAPACITY - 1) * calls.CALL_WORDS
        numbers, what, entered, waited, left = self._words[place : place + 5].tolist()
        known = self._kinds.get(what)
        if known is None:
            known = self._kinds[what] = self._unpack(what)
        group, operation, site = known
        sequence = numbers >> calls.NUMBER_BITS
        if (numbers ^ number) & _NUMBER or not sequence or group is None:
            return None
        if waited < entered and waited != calls.RELEASED:
            waited = entered
        return Call(
            group,
            sequence,
            operation,
            site,
            entered / 1e9,
            0.0 if waited == calls.RELEASED else waited / 1e9,
            left / 1e9 if left >= entered else 0.0,
            backward=bool(what & calls.BACKWARD_BIT),
        )

    def _unpack(self, what: int) -> tuple[GroupKey | None, Operation, str]:
        """Return group, operation and source line."""
        group = self._value(what >> 2 * calls.PLACE_BITS & _PLACE, GroupKey)
        operation = self._value(what >> calls.PLACE_BITS & _PLACE, Operation)
        return group, operation or UNKNOWN, self._value(what & _PLACE, str) or ""

    def _flight(self, slot: int) -> Flight | None:
        place = calls.AT_FLIGHTS + slot * calls.FLIGHT_WORDS
        if self._map is None:
            return None
        group, enqueued, completed, what, sequence, entered = self._words[place : place + 6]
        key = self._value(group, GroupKey)
        if not isinstance(key, GroupKey):
            return None
        pending = None
        if entered:
            _, operation, site = self._unpack(what)
            at = entered / 1e9
            pending = Call(key, sequence, operation, site, at, at, 0.0, backward="backward" in operation.text)
        return Flight(key, enqueued, completed, pending)

    def _value(self, place: int, kind: type) -> Any:
        """Return what is at a place of the table, None where nothing is."""
        if not place or self._map is None:
            return None
        if place not in self._values:
            at = calls.AT_TABLE * 8 + place
            length = int.from_bytes(self._map[at : at + 4], "little")
            try:
                self._values[place] = msgspec.json.decode(self._map[at + 4 : at + 4 + length], type=kind)
            except msgspec.MsgspecError:
                return None  # torn, or not what was expected
        return self._values[place]


# The last collectives of ranks that have ended, compared: which of them did not match.
#
# gloo aborts the process that receives more bytes than its buffer holds, so the rank that fails first is not the
# rank that made the wrong call. The records outlive the processes: where one rank is inside a collective that a
# member of its group never issued, or issued with other arguments, that pair of calls is the cause. Collectives
# that C++ issues by itself, as DDP does in backward, are not among the recorded calls; the Python stack at the
# abort or in the traceback names their line, and torch's flight recorder their size if the rank still had the time
# to copy it.


_STACK_BYTES = 1 << 16
_MOST_CALLS = 16
"""Calls of one kind that are kept of each rank: they travel between nodes."""
_BACKWARD = "_engine_run_backward"


@dataclass(frozen=True, kw_only=True)
class LastCalls:
    """Where one rank was when it ended."""

    inside: tuple[Call, ...] = ()
    """Issued and not done, those that somebody waited for first."""
    last: tuple[Call, ...] = ()
    """The newest of each channel."""
    issued: tuple[Call, ...] = ()
    """The last collective of each group that C++ issued, as far as torch's flight recorder could be read."""
    line: str = ""
    """FILE:LINE of the user's innermost frame, from the traceback or the stack at the abort; empty if unknown."""
    in_backward: bool = False
    """That frame was inside autograd's backward."""

    def find(self, call: Call) -> Call | None:
        """Return this rank's call of the same number in the same channel."""
        same = [mine for mine in (*self.inside, *self.last) if mine.channel == call.channel]
        return next((mine for mine in same if mine.sequence == call.sequence), None)

    def has_issued(self, call: Call) -> bool:
        """Whether this rank has made that call, or a later one of its channel."""
        return any(mine.channel == call.channel and mine.sequence >= call.sequence for mine in self.last)


def read_last_calls(run: RunDirectory, rank: int, traceback: str | None) -> LastCalls | None:
    """Return what the record of a rank that has ended holds; None without a record.

    `traceback` is that of its exception, None for a rank that a fatal signal ended.
    """
    reader = CallReader(run.calls(rank))
    reader.refresh()
    if not reader.is_there:
        return None
    stack = _fatal_stack(run, rank, reader.header(MAIN_THREAD)) if traceback is None else parse_traceback(traceback)
    user = user_frame(stack)
    inside = [*reader.waits, *(call for call in reader.pending if call not in reader.waits)]
    last = sorted(reader.last.values(), key=lambda call: -call.entered)
    issued = [flight.pending for flight in reader.flights() if flight.pending is not None]
    return LastCalls(
        inside=tuple(inside[:_MOST_CALLS]),
        last=tuple(last[:_MOST_CALLS]),
        issued=tuple(issued),
        line=f"{user.file}:{user.line}" if user is not None else "",
        in_backward=any(frame.function == _BACKWARD for frame in stack),
    )


def _fatal_stack(run: RunDirectory, rank: int, thread: int) -> Stack:
    try:
        text = run.stack_samples(rank).read_bytes()[-_STACK_BYTES:].decode(errors="replace")
    except OSError:
        return ()
    return parse_fatal_stack(text, thread)


def describe_mismatch(ends: Mapping[int, LastCalls]) -> str:
    """Name the calls that did not match, with ranks and lines; empty where the records show none."""
    inside = [call for calls in ends.values() for call in calls.inside]
    for call in sorted(inside, key=lambda call: call.entered):
        found = _describe_other_arguments(ends, call) or _describe_missing(ends, call)
        if found:
            return found
    return ""


def _describe_other_arguments(ends: Mapping[int, LastCalls], call: Call) -> str:
    """Name the ranks that made the call of this number otherwise."""
    there = {rank: mine for rank, calls in ends.items() if (mine := calls.find(call)) is not None}
    return describe_difference(there) if any(differ(call, mine) for mine in there.values()) else ""


def _describe_missing(ends: Mapping[int, LastCalls], call: Call) -> str:
    """Name the members that never made this collective, and what they did instead."""
    if call.what.is_message:
        return ""
    members = [rank for rank in call.group.members if rank in ends]
    missing = [rank for rank in members if not ends[rank].has_issued(call)]
    if not missing:
        return ""
    made = [rank for rank in members if rank not in missing]
    places: dict[str, list[int]] = {}
    for rank in missing:
        places.setdefault(_place(ends[rank]), []).append(rank)
    instead = "; ".join(f"{name_ranks(ranks)} {_verb(place, ranks)}" for place, ranks in places.items())
    if len(missing) <= len(made):
        fact = f"{name_ranks(missing)} did not make {call_words(call)}, which {name_ranks(made)} made"
    else:
        fact = f"{name_ranks(made)} made {call_words(call)}, which {name_ranks(missing)} did not make"
    return f"{fact}: {instead}; every rank must make the same collectives in the same order"


def _verb(place: str, ranks: list[int]) -> str:
    return place.replace("was ", "were ", 1) if place.startswith("was ") and len(ranks) > 1 else place


def _place(calls: LastCalls) -> str:
    """Say where a rank was that did not make the call of its peers."""
    if calls.inside:
        return f"was in {call_words(calls.inside[0])}"
    newest = max(calls.last, key=lambda call: call.entered, default=None)
    since = newest.entered if newest is not None else 0.0
    issued = max(calls.issued, key=lambda call: call.entered, default=None)
    where = f" at {short(calls.line)}" if calls.line else ""
    if issued is not None and issued.entered > since:
        return f"was in {issued.what.name} ({issued.what.text}){where or f' at {short(issued.site)}'}"
    if calls.in_backward:
        return f"was in backward{where}, where gradients are reduced"
    if where:
        return f"was{where}"
    return f"had left {call_words(newest)}" if newest is not None else "had made no call"
