"""The record of calls: the last collectives of one rank in a memory-mapped ring, readable while it hangs or is dead."""

from __future__ import annotations

import itertools
import mmap
import os
import threading
from time import time_ns
from typing import TYPE_CHECKING

import msgspec

from shardwise.runs.console import name_ranks, short

if TYPE_CHECKING:
    from pathlib import Path

    from shardwise.runs.call_reader import Call


CAPACITY = 2048
"""Calls that a ring holds: some seconds of a busy training, in 128 KiB."""
FLIGHTS = 16
"""Groups of which collectives that C++ issued are followed."""
ARRIVALS = 256
"""Of these collectives, how many last ones are kept with the time they were issued."""
TABLE_BYTES = 1 << 18
"""For names, shapes and source lines; when it is full, what is new goes without."""
MAGIC = int.from_bytes(b"SWCALL01", "little")

# Words of eight bytes: first the header, then flights, arrivals, calls, and the table of what they refer to.
_HEADER, FLIGHT_WORDS, ARRIVAL_WORDS, CALL_WORDS = 16, 8, 4, 8
AT_FLIGHTS = _HEADER
AT_ARRIVALS = AT_FLIGHTS + FLIGHTS * FLIGHT_WORDS
AT_CALLS = AT_ARRIVALS + ARRIVALS * ARRIVAL_WORDS
AT_TABLE = AT_CALLS + CAPACITY * CALL_WORDS
WORDS = AT_TABLE + TABLE_BYTES // 8
IS_MAGIC, PID, STARTED, MAIN_THREAD, STACKS_SIGNAL, COUNT, TABLE_END, DATA_SINCE, DATA_TOTAL, BATCHES, PULSE = range(11)
SEPARATE_STEPS = 11
"""Places in the header; times are nanoseconds since the epoch, and 0 where there is none."""
NUMBERS, WHAT, ENTERED, WAITED, LEFT = range(5)
"""Places in a call. What it is are four numbers in one: places of group, operation and source line in the table, and
whether gradients were being computed. Times that are before ENTERED are of an earlier call and mean nothing, so that a
new call need not clear them: a word that is not written costs nothing where a step has left nothing in the caches."""
RELEASED = 1
"""In WAITED: a call that continues by itself, with no thread inside."""
ENOUGH_SEPARATE_STEPS = 20
"""Optimizer steps without a process group are counted up to so many: more than a script makes to warm up."""
PLACE_BITS = 20
BACKWARD_BIT = 1 << 3 * PLACE_BITS
NUMBER_BITS = 24
"""The number of a call counts all calls, from 1; its lower bits stand below its number in the channel."""
MEETINGS = "start of the world"
"""Name of the group by which calls are counted that make groups."""


class GroupKey(msgspec.Struct, frozen=True, array_like=True):
    """A process group: the same value on every member."""

    name: str
    life: int
    """Which group of that name this is: names begin anew after destroy_process_group."""
    members: tuple[int, ...]
    """Ranks, in the order of the group."""


class Operation(msgspec.Struct, frozen=True, array_like=True):
    """What was called, with which arguments."""

    name: str
    channel: str
    """Calls are counted by channel: empty for a collective, "functional" for one of torch's functional collectives, and
    for a message who sends to whom, and the tag: "0>1:0"."""
    match: str
    """What must be equal on all members: reduce operation, root, dtypes, numbers of elements."""
    text: str
    """The arguments in words."""
    peer: int = -1
    """The rank at the other end of a send or a receive; -1 for a collective, or if anybody may send."""

    @property
    def is_message(self) -> bool:
        """Whether this is a send or a receive."""
        return ">" in self.channel


def pack(group: int, what: int, site: int) -> int:
    """Return places in the table of a group, an operation and a source line as one number."""
    return group << 2 * PLACE_BITS | what << PLACE_BITS | site


class CallRing:
    """Writes the calls of one rank into a new ring at `path`; any thread may write.

    A call costs four visits (issued, released, waited for, left) of about 1 us in all. The pages belong to the kernel:
    whatever ends or stops the process, what was written is in the file.
    """

    def __init__(self, path: Path, *, stacks_signal: int = 0) -> None:
        """Begin a ring; `stacks_signal` has this process write its stacks down, 0 if none does."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        with partial.open("w+b") as file:
            file.write(bytes(WORDS * 8))  # written, not only sized: a page without a block would end us by SIGBUS
            file.flush()
            self._map: mmap.mmap | bytearray = mmap.mmap(file.fileno(), 0)
        self._words = memoryview(self._map).cast("Q")
        self._table = memoryview(self._map)[AT_TABLE * 8 :]
        self._numbers = itertools.count(1)
        self._known: dict[msgspec.Struct | str, int] = {}
        self._end = 8  # so that no entry is at 0, which stands for none
        self._lock = threading.Lock()
        words = self._words
        words[PID], words[STARTED], words[STACKS_SIGNAL] = os.getpid(), time_ns(), stacks_signal
        words[MAIN_THREAD] = threading.main_thread().ident or 0
        words[IS_MAGIC] = MAGIC
        partial.rename(path)  # a ring of an earlier process stays whole for whoever reads it now

    def intern(self, value: msgspec.Struct | str) -> int:
        """Return the place in the table of a value, 0 if the table is full."""
        place = self._known.get(value)
        if place is not None:
            return place
        with self._lock:
            if value in self._known:
                return self._known[value]
            data = msgspec.json.encode(value)
            end = self._end + 4 + len(data)
            if end > TABLE_BYTES:
                return 0
            place = self._known[value] = self._end
            self._table[place : place + 4] = len(data).to_bytes(4, "little")
            self._table[place + 4 : end] = data
            self._end = end
            self._words[TABLE_END] = end
            return place

    def issue(self, sequence: int, what: int) -> int:
        """Write down a call that begins now; returns its number. `what` is made by `pack`.

        Issuing may block: so somebody is inside until the call is released or left.
        """
        number = next(self._numbers)
        words, place = self._words, AT_CALLS + (number & CAPACITY - 1) * CALL_WORDS
        words[place + WHAT] = what
        words[place + ENTERED] = time_ns()
        words[place] = sequence << NUMBER_BITS | number & (1 << NUMBER_BITS) - 1
        words[COUNT] = number
        return number

    def cancel(self, number: int) -> None:
        """Take a call back that was refused before it began."""
        self._words[AT_CALLS + (number & CAPACITY - 1) * CALL_WORDS] = 0

    def release(self, number: int) -> None:
        """Write down that a call that was just issued continues by itself."""
        self._words[AT_CALLS + (number & CAPACITY - 1) * CALL_WORDS + WAITED] = RELEASED

    def wait(self, number: int) -> None:
        """Write down that somebody waits for a call from now on."""
        self._stamp(number, WAITED)

    def leave(self, number: int) -> None:
        """Write down that a call is done."""
        self._stamp(number, LEFT)

    def _stamp(self, number: int, word: int) -> None:
        words, place = self._words, AT_CALLS + (number & CAPACITY - 1) * CALL_WORDS
        if (words[place] ^ number) & (1 << NUMBER_BITS) - 1 == 0:  # else it was overwritten meanwhile
            words[place + word] = time_ns()

    def begin_data(self) -> None:
        """Write down that the next batch is asked for."""
        self._words[DATA_SINCE] = time_ns()

    def end_data(self) -> None:
        """Write down that it is there."""
        words = self._words
        words[DATA_TOTAL] += time_ns() - words[DATA_SINCE]
        words[BATCHES] += 1
        words[DATA_SINCE] = 0

    def pulse(self) -> None:
        """Write down that a thread of this process still gets its turn."""
        self._words[PULSE] = time_ns()

    def set_separate_steps(self, count: int) -> None:
        """Write down how many optimizer steps this rank has made without communicating with anybody."""
        self._words[SEPARATE_STEPS] = count

    def fly(self, slot: int, group: int, enqueued: int, completed: int, pending: tuple[int, int, int, int]) -> None:
        """Write down how far a group's collectives are that C++ issued.

        `pending` is the oldest that is not done: its operation and site in the table, its number in the group, and
        when it was issued; zeros for none.
        """
        what, site, sequence, entered = pending
        words, place = self._words, AT_FLIGHTS + slot * FLIGHT_WORDS
        words[place + 5] = 0
        words[place] = group
        words[place + 1], words[place + 2] = enqueued, completed
        words[place + 3], words[place + 4] = pack(group, what, site), sequence
        words[place + 5] = entered

    def arrive(self, index: int, sequence: int, what: int, issued_ns: int) -> None:
        """Write down when a collective that torch counts was issued; `what` is made by `pack`."""
        words, place = self._words, AT_ARRIVALS + index % ARRIVALS * ARRIVAL_WORDS
        words[place] = 0
        words[place + 1], words[place + 2] = what, issued_ns
        words[place] = sequence

    def detach(self) -> None:
        """Write into nothing from now on: for a fork of the rank, which is another process."""
        self._map = bytearray(WORDS * 8)
        self._words = memoryview(self._map).cast("Q")
        self._table = memoryview(self._map)[AT_TABLE * 8 :]


# Recorded calls in words, and what differs between calls that ranks made together.


def call_words(call: Call) -> str:
    """Return an operation with its number, arguments and place."""
    arguments = f" ({call.what.text})" if call.what.text else ""
    group = "" if len(call.group.members) == 0 or call.group.name in {"0", MEETINGS} else _group(call.group)
    where = f" at {short(call.site)}" if call.site else ""
    return f"{call.what.name} #{call.sequence}{arguments}{group}{where}"


def _group(group: GroupKey) -> str:
    return f" of {name_ranks(list(group.members))}"


def differ(one: Call, other: Call) -> bool:
    """Whether two calls of the same number do not fit; a send fits a receive."""
    is_message = one.what.is_message
    return one.what.match != other.what.match or (one.what.name != other.what.name and not is_message)


def describe_difference(there: dict[int, Call]) -> str:
    """Say who differs from whom, the many before the few."""
    kinds: dict[tuple[str, str], list[int]] = {}
    for rank, call in sorted(there.items()):
        kinds.setdefault((call.what.name, call.what.match), []).append(rank)
    order = sorted(kinds.values(), key=lambda ranks: -len(ranks))
    parts = [f"{name_ranks(ranks)}: {call_words(there[ranks[0]])}" for ranks in order]
    what = _aspects([there[ranks[0]] for ranks in order])
    return f"ranks differ in {what} at the same call: {'; '.join(parts)}"


def _aspects(calls: list[Call]) -> str:
    """Name what differs."""
    names = {call.what.name for call in calls}
    if len(names) > 1 and not calls[0].what.is_message:
        return "the operation"
    heads, tails = set(), []
    for call in calls:
        words = call.what.match.split()
        heads.add(tuple(word for word in words if "*" not in word))
        tails.append([word.partition("*") for word in words if "*" in word])
    found = []
    if len(heads) > 1:
        if any("root" in head for head in heads) and len({head[:1] for head in heads}) == 1:
            found.append("the root")
        elif calls[0].what.name.startswith("all_to_all"):
            found.append("the dtype")
        else:
            found.append("the reduce operation")
    if len({tuple(dtype for dtype, _, _ in tail) for tail in tails}) > 1:
        found.append("the dtype")
    if len({tuple(count for _, _, count in tail) for tail in tails}) > 1:
        found.append("the shape")
    return " and ".join(found) or "the arguments"
