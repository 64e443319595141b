"""A memory-mapped ring of the last collectives of one rank, readable while the rank hangs or after it has exited."""

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
"""Number of calls in a ring: several seconds of training with frequent collectives, in 128 KiB."""
FLIGHTS = 16
"""Maximum number of process groups whose C++ collectives are tracked."""
ARRIVALS = 256
"""Number of recent C++ collectives that are stored with the time at which they were issued."""
TABLE_BYTES = 1 << 18
"""Size of the table of names, shapes and source lines; calls are recorded without them once the table is full."""
MAGIC = int.from_bytes(b"SWCALL01", "little")

# The file consists of 64-bit words: the header, flights, arrivals, calls, and the table of values that they refer to.
_HEADER, FLIGHT_WORDS, ARRIVAL_WORDS, CALL_WORDS = 16, 8, 4, 8
AT_FLIGHTS = _HEADER
AT_ARRIVALS = AT_FLIGHTS + FLIGHTS * FLIGHT_WORDS
AT_CALLS = AT_ARRIVALS + ARRIVALS * ARRIVAL_WORDS
AT_TABLE = AT_CALLS + CAPACITY * CALL_WORDS
WORDS = AT_TABLE + TABLE_BYTES // 8
IS_MAGIC, PID, STARTED, MAIN_THREAD, STACKS_SIGNAL, COUNT, TABLE_END, DATA_SINCE, DATA_TOTAL, BATCHES, PULSE = range(11)
SEPARATE_STEPS, LEFT_WORLD = 11, 12
"""Fields of the header; times are nanoseconds since the epoch, and 0 means none."""
NUMBERS, WHAT, ENTERED, WAITED, LEFT = range(5)
"""Fields of a call. WHAT packs four numbers: the table positions of group, operation and source line, and whether
backward was running. Times earlier than the value of ENTERED belong to an earlier call and are ignored, so that a new
call need not clear them: every word that is written costs a cache miss after a training step."""
RELEASED = 1
"""Value of WAITED for a call that runs asynchronously, with no thread waiting for it."""
ENOUGH_SEPARATE_STEPS = 20
"""Number of optimizer steps without a process group after which counting stops; more than a script's warm-up steps."""
PLACE_BITS = 20
BACKWARD_BIT = 1 << 3 * PLACE_BITS
NUMBER_BITS = 24
"""Calls are numbered from 1 across all channels; the low bits of this number are stored below the sequence number."""
STARTUP_GROUP = "start of the world"
"""Name of the group in which the calls that create process groups are numbered."""


class GroupKey(msgspec.Struct, frozen=True, array_like=True):
    """Identifies a process group; all members of the group have an equal key."""

    name: str
    life: int
    """Counts groups of the same name: torch reuses names after destroy_process_group."""
    members: tuple[int, ...]
    """Global ranks of the members, in group order."""


class Operation(msgspec.Struct, frozen=True, array_like=True):
    """The function that was called, and its arguments."""

    name: str
    channel: str
    """Channel in which the call is numbered: empty for a collective, "functional" for torch's functional collectives;
    for point-to-point messages the sender, the receiver and the tag: "0>1:0"."""
    match: str
    """The arguments that must be equal on all members: reduce operation, root, dtypes, numbers of elements."""
    text: str
    """The arguments as text."""
    peer: int = -1
    """The other rank of a send or a receive; -1 for a collective, or for a receive from any rank."""

    @property
    def is_message(self) -> bool:
        """Whether this is a send or a receive."""
        return ">" in self.channel


def pack(group: int, what: int, site: int) -> int:
    """Return the table positions of a group, an operation and a source line packed into one number."""
    return group << 2 * PLACE_BITS | what << PLACE_BITS | site


class CallRing:
    """Writes the calls of one rank into a new ring at `path`; any thread may write.

    A call is written up to four times (issue, release, wait, leave), about 1 us in total. The kernel owns the pages, so
    all data is in the file however the process ends.
    """

    def __init__(self, path: Path, *, stacks_signal: int = 0) -> None:
        """Create a ring; `stacks_signal` is the signal at which this process writes its stacks, 0 for none."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        with partial.open("w+b") as file:
            # Real data, not only a size: on a full disk, a page without a block would end the process by SIGBUS.
            file.write(bytes(WORDS * 8))
            file.flush()
            self._map: mmap.mmap | bytearray = mmap.mmap(file.fileno(), 0)
        self._words = memoryview(self._map).cast("Q")
        self._table = memoryview(self._map)[AT_TABLE * 8 :]
        self._numbers = itertools.count(1)
        self._known: dict[msgspec.Struct | str, int] = {}
        self._end = 8  # no value is stored at position 0, which means none
        self._lock = threading.Lock()
        words = self._words
        words[PID], words[STARTED], words[STACKS_SIGNAL] = os.getpid(), time_ns(), stacks_signal
        words[MAIN_THREAD] = threading.main_thread().ident or 0
        words[IS_MAGIC] = MAGIC
        partial.rename(path)  # processes that have mapped the ring of an earlier attempt can still read it

    def intern(self, value: msgspec.Struct | str) -> int:
        """Return the position of a value in the table, adding the value if it is new; 0 if the table is full."""
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
        """Record a call that starts now and return its number; `what` is a result of `pack`.

        Issuing may block, so the calling thread counts as waiting until the call is released or left.
        """
        number = next(self._numbers)
        words, place = self._words, AT_CALLS + (number & CAPACITY - 1) * CALL_WORDS
        words[place + WHAT] = what
        words[place + ENTERED] = time_ns()
        words[place] = sequence << NUMBER_BITS | number & (1 << NUMBER_BITS) - 1
        words[COUNT] = number
        return number

    def cancel(self, number: int) -> None:
        """Remove a call that raised before it started."""
        self._words[AT_CALLS + (number & CAPACITY - 1) * CALL_WORDS] = 0

    def release(self, number: int) -> None:
        """Record that a call continues asynchronously after it was issued."""
        self._words[AT_CALLS + (number & CAPACITY - 1) * CALL_WORDS + WAITED] = RELEASED

    def wait(self, number: int) -> None:
        """Record that a thread starts to wait for a call."""
        self._stamp(number, WAITED)

    def leave(self, number: int) -> None:
        """Record that a call has completed."""
        self._stamp(number, LEFT)

    def _stamp(self, number: int, word: int) -> None:
        words, place = self._words, AT_CALLS + (number & CAPACITY - 1) * CALL_WORDS
        if (words[place] ^ number) & (1 << NUMBER_BITS) - 1 == 0:  # otherwise a later call has overwritten it
            words[place + word] = time_ns()

    def begin_data(self) -> None:
        """Record that the next batch is requested."""
        self._words[DATA_SINCE] = time_ns()

    def end_data(self) -> None:
        """Record that the batch has arrived."""
        words = self._words
        words[DATA_TOTAL] += time_ns() - words[DATA_SINCE]
        words[BATCHES] += 1
        words[DATA_SINCE] = 0

    def pulse(self) -> None:
        """Record that the threads of this process are still scheduled."""
        self._words[PULSE] = time_ns()

    def set_separate_steps(self, count: int) -> None:
        """Record the number of optimizer steps that this rank has run without a process group."""
        self._words[SEPARATE_STEPS] = count

    def enter_world(self) -> None:
        """Record that this rank has a default process group, perhaps after it destroyed an earlier one."""
        self._words[LEFT_WORLD] = 0

    def leave_world(self) -> None:
        """Record that this rank destroys its default process group, which closes its connections."""
        self._words[LEFT_WORLD] = time_ns()

    def fly(self, slot: int, group: int, enqueued: int, completed: int, pending: tuple[int, int, int, int]) -> None:
        """Record the progress of a process group's collectives that C++ issued.

        `pending` is the oldest incomplete collective: the table positions of its operation and source line, its
        sequence number in the group, and the time at which it was issued; zeros for none.
        """
        what, site, sequence, entered = pending
        words, place = self._words, AT_FLIGHTS + slot * FLIGHT_WORDS
        words[place + 5] = 0
        words[place] = group
        words[place + 1], words[place + 2] = enqueued, completed
        words[place + 3], words[place + 4] = pack(group, what, site), sequence
        words[place + 5] = entered

    def arrive(self, index: int, sequence: int, what: int, issued_ns: int) -> None:
        """Record when a collective of torch's flight recorder was issued; `what` is a result of `pack`."""
        words, place = self._words, AT_ARRIVALS + index % ARRIVALS * ARRIVAL_WORDS
        words[place] = 0
        words[place + 1], words[place + 2] = what, issued_ns
        words[place] = sequence

    def detach(self) -> None:
        """Discard all later writes; call in a process that was forked from the rank."""
        self._map = bytearray(WORDS * 8)
        self._words = memoryview(self._map).cast("Q")
        self._table = memoryview(self._map)[AT_TABLE * 8 :]


# Recorded calls as text, and the differences between calls with the same sequence number on several ranks.


def describe_call(call: Call) -> str:
    """Return a call as text: operation, sequence number, arguments, ranks of the group and source line."""
    text = f"{call.what.name} #{call.sequence}"
    if call.what.text:
        text += f" ({call.what.text})"
    if call.group.members and call.group.name not in {"0", STARTUP_GROUP}:
        text += f" of {name_ranks(call.group.members)}"
    if call.site:
        text += f" at {short(call.site)}"
    return text


def differ(one: Call, other: Call) -> bool:
    """Return whether two calls with the same sequence number do not match; a send matches a receive."""
    is_message = one.what.is_message
    return one.what.match != other.what.match or (one.what.name != other.what.name and not is_message)


def describe_difference(calls: dict[int, Call]) -> str:
    """Return a description of mismatched calls with the same sequence number, the most common call first."""
    kinds: dict[tuple[str, str], list[int]] = {}
    for rank, call in sorted(calls.items()):
        kinds.setdefault((call.what.name, call.what.match), []).append(rank)
    order = sorted(kinds.values(), key=lambda ranks: -len(ranks))
    parts = [f"{name_ranks(ranks)}: {describe_call(calls[ranks[0]])}" for ranks in order]
    what = _aspects([calls[ranks[0]] for ranks in order])
    return f"ranks differ in {what} at the same call: {'; '.join(parts)}"


def _aspects(calls: list[Call]) -> str:
    """Return the names of the arguments that differ."""
    names = {call.what.name for call in calls}
    if len(names) > 1 and not calls[0].what.is_message:
        return "the operation"
    settings, dtypes, counts = set(), set(), set()
    for call in calls:
        # Such as "SUM root 0 float32*16": reduce operation and root, then DTYPE*COUNT for each tensor.
        fields = call.what.match.split()
        tensors = [field.partition("*") for field in fields if "*" in field]
        settings.add(tuple(field for field in fields if "*" not in field))
        dtypes.add(tuple(dtype for dtype, _, _ in tensors))
        counts.add(tuple(count for _, _, count in tensors))
    found = []
    if len(settings) > 1:
        if any("root" in fields for fields in settings) and len({fields[:1] for fields in settings}) == 1:
            found.append("the root")
        elif calls[0].what.name.startswith("all_to_all"):
            found.append("the dtype")
        else:
            found.append("the reduce operation")
    if len(dtypes) > 1:
        found.append("the dtype")
    if len(counts) > 1:
        found.append("the shape")
    return " and ".join(found) or "the arguments"
