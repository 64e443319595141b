"""Reads the recorded collectives of ranks that run, hang or have exited, and compares the last calls of all ranks."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from shardwise.runs import calls
from shardwise.runs.calls import (
    LEFT_WORLD,
    MAIN_THREAD,
    GroupKey,
    Operation,
    describe_call,
    describe_difference,
    differ,
)
from shardwise.runs.console import name_ranks, short
from shardwise.runs.recorder import Stack, parse_fatal_stack, parse_traceback, user_frame

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from shardwise.runs import RunDirectory


_MARGIN = 16
"""Number of oldest calls that are skipped, because the rank may overwrite them during the read."""
_MOST_OPEN = 256
"""Number of later calls after which an incomplete call without a waiting thread is no longer tracked."""
_NUMBER, _PLACE = (1 << calls.NUMBER_BITS) - 1, (1 << calls.PLACE_BITS) - 1
UNKNOWN = Operation("a call", "", "", "")
"""The operation of a call that did not fit into the table."""


@dataclass(frozen=True, slots=True)
class Call:
    """A recorded collective or point-to-point call of a rank. Times are seconds since the epoch; 0 means not yet."""

    group: GroupKey
    sequence: int
    """Sequence number of the call in its group and channel, starting at 1."""
    what: Operation
    site: str
    """Source line as FILE:LINE; empty if unknown."""
    entered: float
    waited: float
    """Time at which a thread started to wait for the call."""
    left: float
    backward: bool
    """Whether the call was issued during backward."""

    @property
    def channel(self) -> tuple[GroupKey, str]:
        """The process group and channel in which this call is numbered."""
        return self.group, self.what.channel

    @property
    def is_waited_for(self) -> bool:
        """Whether a thread is waiting for the call."""
        return bool(self.waited) and not self.left


@dataclass(frozen=True, slots=True)
class Flight:
    """Progress of a process group's collectives, including those issued by C++, from torch's flight recorder."""

    group: GroupKey
    enqueued: int
    completed: int
    pending: Call | None
    """The oldest incomplete collective, if it was issued at least a second ago."""


class CallReader:
    """Reads new calls from the ring file at `path`, which may not exist yet and is replaced by a restarted rank."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = 0
        self._reset()

    def _reset(self) -> None:
        self._map: mmap.mmap | None = None
        self._words = memoryview(b"").cast("Q")
        self._seen = 0
        self._values: dict[int, Any] = {}
        self._kinds: dict[int, tuple[GroupKey | None, Operation, str]] = {}
        self._open: dict[int, Call] = {}
        self.last: dict[tuple[GroupKey, str], Call] = {}
        """The newest call by channel."""

    def refresh(self) -> list[Call]:
        """Read the ring again and return the new calls, oldest first; overwritten calls are omitted."""
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
    def has_ring(self) -> bool:
        """Whether the ring file exists."""
        return self._map is not None

    @property
    def waits(self) -> tuple[Call, ...]:
        """The calls for which a thread was waiting at the last refresh."""
        return tuple(call for call in self._open.values() if call.is_waited_for)

    @property
    def pending(self) -> tuple[Call, ...]:
        """The incomplete calls at the last refresh, with or without a waiting thread."""
        return tuple(self._open.values())

    @property
    def newest(self) -> Call | None:
        """The last call that was issued; None before the first."""
        return max(self.last.values(), key=lambda call: call.entered, default=None)

    def header(self, place: int) -> int:
        """Return a field of the ring's header; 0 if the ring does not exist."""
        return self._words[place] if self._map is not None else 0

    def flights(self) -> tuple[Flight, ...]:
        """Return the progress of each process group that torch's flight recorder tracks."""
        flights = (self._flight(slot) for slot in range(calls.FLIGHTS))
        return tuple(flight for flight in flights if flight is not None)

    def arrivals(self) -> list[Call]:
        """Return the last collectives in torch's flight recorder, without source lines."""
        found: list[Call] = []
        if self._map is None:
            return found
        for index in range(calls.ARRIVALS):
            place = calls.AT_ARRIVALS + index * calls.ARRIVAL_WORDS
            sequence, what, at = self._words[place : place + 3].tolist()
            group, operation, _ = self._unpack(what)
            if sequence and group is not None:
                found.append(Call(group, sequence, operation, "", at / 1e9, 0.0, at / 1e9, backward=False))
        return found

    def _attach(self) -> bool:
        """Map the ring file if it is new; return False if the file is not a valid ring."""
        try:
            inode = self._path.stat().st_ino
            if inode != self._inode or self._map is None:
                with self._path.open("rb") as file:
                    found = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                self._reset()
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
        """Return the group, operation and source line that `what` packs."""
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
        """Return the value at a position of the table; None if the position is empty or the value is incomplete."""
        if not place or self._map is None:
            return None
        if place not in self._values:
            at = calls.AT_TABLE * 8 + place
            length = int.from_bytes(self._map[at : at + 4], "little")
            try:
                self._values[place] = msgspec.json.decode(self._map[at + 4 : at + 4 + length], type=kind)
            except msgspec.MsgspecError:
                return None  # half written, or a value of another type
        return self._values[place]


# Comparison of the last collectives of ranks that have ended.
#
# gloo aborts the process that receives more bytes than its buffer holds, so the rank that fails first is not the
# rank that made the wrong call. The records outlive the processes: if one rank is inside a collective that a
# member of its group never issued, or issued with different arguments, that pair of calls is the cause. Collectives
# that C++ issues, as DDP does in backward, are not among the recorded calls; the Python stack at the abort or in the
# traceback has their source line, and torch's flight recorder their size if the rank had time to copy it.


_STACK_BYTES = 1 << 16
_MOST_CALLS = 16
"""Maximum number of calls in each field of LastCalls, which nodes send to each other."""
_BACKWARD = "_engine_run_backward"


@dataclass(frozen=True, kw_only=True)
class LastCalls:
    """The last calls of one rank before it exited."""

    inside: tuple[Call, ...] = ()
    """Incomplete calls; calls with a waiting thread come first."""
    last: tuple[Call, ...] = ()
    """The newest call of each channel."""
    issued: tuple[Call, ...] = ()
    """The last collective that C++ issued in each group, if torch's flight recorder could be read."""
    line: str = ""
    """FILE:LINE of the user's innermost frame, from the traceback or the stack at the abort; empty if unknown."""
    in_backward: bool = False
    """Whether the rank was inside autograd's backward."""
    left_at: float = 0.0
    """Time at which the rank destroyed its default process group, in seconds since the epoch; 0 if it did not."""

    def find(self, call: Call) -> Call | None:
        """Return this rank's call with the same channel and sequence number."""
        for own in (*self.inside, *self.last):
            if own.channel == call.channel and own.sequence == call.sequence:
                return own
        return None

    def has_issued(self, call: Call) -> bool:
        """Return whether this rank has issued `call`, or a later call of the same channel."""
        return any(own.channel == call.channel and own.sequence >= call.sequence for own in self.last)


def read_last_calls(run: RunDirectory, rank: int, traceback: str | None) -> LastCalls | None:
    """Return the last recorded calls of a rank that has exited; None if the rank has no record.

    `traceback` is the traceback of the rank's exception; None if a fatal signal ended the rank.
    """
    reader = CallReader(run.calls(rank))
    reader.refresh()
    if not reader.has_ring:
        return None
    stack = _last_stack(run, rank, reader.header(MAIN_THREAD), traceback)
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
        left_at=reader.header(LEFT_WORLD) / 1e9,
    )


def _last_stack(run: RunDirectory, rank: int, thread: int, traceback: str | None) -> Stack:
    if traceback is not None:
        return parse_traceback(traceback)
    try:
        text = run.stack_samples(rank).read_bytes()[-_STACK_BYTES:].decode(errors="replace")
    except OSError:
        return ()
    return parse_fatal_stack(text, thread)


def describe_mismatch(ends: Mapping[int, LastCalls]) -> str:
    """Return a description of mismatched collectives with ranks and source lines; empty if all calls match."""
    inside = [call for calls in ends.values() for call in calls.inside]
    for call in sorted(inside, key=lambda call: call.entered):
        found = _describe_other_arguments(ends, call) or _describe_missing(ends, call)
        if found:
            return found
    return ""


def _describe_other_arguments(ends: Mapping[int, LastCalls], call: Call) -> str:
    """Return the difference if ranks issued `call` with different arguments; empty if all arguments match."""
    found = {}
    for rank, end in ends.items():
        same = end.find(call)
        if same is not None:
            found[rank] = same
    if any(differ(call, same) for same in found.values()):
        return describe_difference(found)
    return ""


def _describe_missing(ends: Mapping[int, LastCalls], call: Call) -> str:
    """Return which group members never issued `call`, with their last positions; empty if all members issued it."""
    if call.what.is_message:
        return ""
    members = [rank for rank in call.group.members if rank in ends]
    missing = [rank for rank in members if not ends[rank].has_issued(call)]
    if not missing:
        return ""
    made = [rank for rank in members if rank not in missing]
    positions: dict[str, list[int]] = {}
    for rank in missing:
        positions.setdefault(_position(ends[rank]), []).append(rank)
    instead = "; ".join(f"{name_ranks(ranks)} {_verb(position, ranks)}" for position, ranks in positions.items())
    if len(missing) <= len(made):
        fact = f"{name_ranks(missing)} did not call {describe_call(call)}, which {name_ranks(made)} called"
    else:
        fact = f"{name_ranks(made)} called {describe_call(call)}, which {name_ranks(missing)} did not call"
    return f"{fact}: {instead}; every rank must call the same collectives in the same order"


def _verb(position: str, ranks: list[int]) -> str:
    if position.startswith("was ") and len(ranks) > 1:
        return position.replace("was ", "were ", 1)
    return position


def _position(calls: LastCalls) -> str:
    """Return the last known position of a rank that did not issue a collective, as text."""
    if calls.inside:
        return f"was in {describe_call(calls.inside[0])}"
    newest = max(calls.last, key=lambda call: call.entered, default=None)
    since = newest.entered if newest is not None else 0.0
    issued = max(calls.issued, key=lambda call: call.entered, default=None)
    where = f" at {short(calls.line)}" if calls.line else ""
    if issued is not None and issued.entered > since:
        return f"was in {issued.what.name} ({issued.what.text}){where or f' at {short(issued.site)}'}"
    if calls.in_backward:
        return f"was in backward{where}, in which gradients are reduced"
    if where:
        return f"was{where}"
    if newest is None:
        return "had made no call"
    return f"had left {describe_call(newest)}"
