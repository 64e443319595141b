"""Reading torch's flight recorder for collectives that C++ issues, such as those of DDP's gradient buckets."""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
from typing import TYPE_CHECKING, Any

from shardwise.recorder.operations import LIBRARY, SHARDWISE, USER, Sites, with_library
from shardwise.runs.calls import ARRIVALS, FLIGHTS, Operation, pack
from shardwise.torch_private.distributed import flight_records, is_inductor_imported

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardwise.runs.calls import CallRing

_INTERVAL_S = 0.5
_FIRST_DUMP_S, _LONGEST_S = 5.0, 300.0
"""A dump of the 2000 entries that torch keeps takes 30 ms, so the interval doubles after each dump of arrivals."""
_DTYPES = {"Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64"}


class FlightThread:
    """A thread that reads torch's collective counters twice a second (5 us) and copies stuck collectives to the ring.

    The flight recorder is private to torch: an unexpected format stops this thread, but not the training.
    """

    def __init__(self, ring: CallRing, group_by_name: Callable[[str], int]) -> None:
        self._ring = ring
        self._group_by_name = group_by_name
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._slots: dict[str, tuple[int, int]] = {}
        """Torch's number of a group -> its slot in the ring and the position of its key in the table."""
        self._before: dict[str, tuple[int, int]] = {}
        self._reported: dict[str, int] = {}
        self._searched: dict[str, int] = {}
        """Group without a slot -> its number of collectives at the last search for it."""

    def start(self) -> None:
        """Start the thread; later calls do nothing."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="shardwise record", daemon=True)
            self._thread.start()
            atexit.register(self._end)

    def _end(self) -> None:
        """Stop the thread before the interpreter exits: a thread that returned from C++ later would abort Python."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(1.0)
        with contextlib.suppress(Exception):
            if getattr(sys, "last_value", None) is not None:  # an uncaught exception ends this process
                self._copy_last()
            else:
                self._clear_pending()

    def _clear_pending(self) -> None:
        """Clear collectives that were stuck at the last read: no later read clears them, and the exit may be slow."""
        for number, now in self._before.items():
            self._write(number, now, (0, 0, 0, 0))

    def _copy_last(self) -> None:
        """Record the last collective of each group as pending: torch counts a failed collective as completed."""
        # torch imports its compiler to resolve source lines, which breaks the same import in the script's own thread.
        entries = _dump(stacks=is_inductor_imported())
        self._learn(entries)
        status = _status()
        newest = {str(entry["pg_id"]): entry for entry in entries if not entry["is_p2p"]}
        for number, entry in newest.items():
            if number in self._slots:
                facts = status[number]
                now = facts["last_enqueued_collective"], facts["last_completed_collective"]
                self._write(number, now, self._pending(entry))

    def _run(self) -> None:
        next_dump = interval = _FIRST_DUMP_S
        waited = 0.0
        with contextlib.suppress(Exception):
            while not self._stop.wait(_INTERVAL_S):
                self._ring.pulse()
                self._read_counters()
                waited += _INTERVAL_S
                if waited >= next_dump:
                    self._copy_arrivals(_dump(stacks=False))
                    interval = min(interval * 2, _LONGEST_S)
                    next_dump = waited + interval

    def _read_counters(self) -> None:
        status: dict[str, dict[str, int]] = _status()
        if self._has_new_groups(status):
            self._learn(_dump(stacks=False))
        stuck = {}
        for number, facts in status.items():
            now = facts["last_enqueued_collective"], facts["last_completed_collective"]
            if number not in self._slots:
                continue
            if now[0] > now[1] and self._before.get(number) == now:
                stuck[number] = now
            else:
                self._write(number, now, (0, 0, 0, 0))
                self._reported.pop(number, None)
            self._before[number] = now
        if any(self._reported.get(number) != now[1] for number, now in stuck.items()):
            self._copy_stuck(stuck)

    def _has_new_groups(self, status: dict[str, dict[str, int]]) -> bool:
        """Whether a group without a slot has issued at least twice as many collectives as at the last search for it.

        Reading all entries takes 10,000 times as long as reading the counters, and some groups are not recorded.
        """
        found = False
        for number, facts in status.items():
            done = facts["last_enqueued_collective"]
            if number not in self._slots and done > 0 and done >= 2 * self._searched.get(number, 0):
                self._searched[number] = done
                found = True
        return found

    def _learn(self, entries: list[dict[str, Any]]) -> None:
        """Give the newest group of each name a slot.

        Torch also has entries of destroyed groups, and of groups of the process from which this one was forked.
        """
        newest = {entry["process_group"][0]: str(entry["pg_id"]) for entry in entries}  # entries are in their order
        for name, number in newest.items():
            place = self._group_by_name(name)
            if not place or number in self._slots:
                continue
            older = [each for each, (_, known) in self._slots.items() if known == place]
            if older:
                self._before.pop(older[0], None)
                self._slots[number] = self._slots.pop(older[0])
            elif len(self._slots) < FLIGHTS:
                self._slots[number] = len(self._slots), place

    def _copy_stuck(self, stuck: dict[str, tuple[int, int]]) -> None:
        """Record the oldest incomplete collective of each stuck group."""
        entries = _dump(stacks=is_inductor_imported())
        for number, now in stuck.items():
            open_entries = [entry for entry in entries if str(entry["pg_id"]) == number and not entry["retired"]]
            pending = (0, 0, 0, 0)
            # All may be complete: gloo's threads finish out of order, and torch counts the last collective to report.
            if open_entries:
                pending = self._pending(min(open_entries, key=lambda entry: entry["collective_seq_id"]))
            self._write(number, now, pending)
            self._reported[number] = now[1]

    def _pending(self, entry: dict[str, Any]) -> tuple[int, int, int, int]:
        shapes = [
            f"{_DTYPES.get(dtype, dtype.lower())}[{'x'.join(map(str, shape))}]"
            for shape, dtype in zip(entry["input_sizes"], entry["input_dtypes"], strict=False)
        ]
        frames = entry.get("frames", ())
        shown = shapes[:4]
        if any(frame["name"] == "_engine_run_backward" for frame in frames):
            shown.insert(0, "gradients, in backward")
        operation = Operation(_name(entry), "", " ".join(shapes), ", ".join(shown))
        return (
            self._ring.intern(operation),
            self._ring.intern(_site(frames)),
            entry["collective_seq_id"],
            entry["time_created_ns"],
        )

    def _copy_arrivals(self, entries: list[dict[str, Any]]) -> None:
        """Record the times at which the last collectives were issued."""
        for index, entry in enumerate(entries[-ARRIVALS:]):
            slot = self._slots.get(str(entry["pg_id"]))
            if slot is not None and not entry["is_p2p"]:
                what = pack(slot[1], self._ring.intern(Operation(_name(entry), "", "", "")), 0)
                self._ring.arrive(index, entry["collective_seq_id"], what, entry["time_created_ns"])

    def _write(self, number: str, now: tuple[int, int], pending: tuple[int, int, int, int]) -> None:
        slot, place = self._slots[number]
        self._ring.fly(slot, place, max(0, now[0]), max(0, now[1]), pending)


def _name(entry: dict[str, Any]) -> str:
    return str(entry["profiling_name"]).rpartition(":")[2]


def _status() -> dict[str, dict[str, int]]:
    """Return the status of each group, keyed by recorder (NCCL or other backends) and torch's number of the group."""
    status = {}
    for kind, records in flight_records(entries=False, stacks=False).items():
        for number, facts in records["pg_status"].items():
            status[f"{kind}{number}"] = facts
    return status


def _dump(*, stacks: bool) -> list[dict[str, Any]]:
    """Return all entries of the flight recorders, oldest first, with a `pg_id` that is a key of `_status`."""
    dump = []
    for kind, records in flight_records(entries=True, stacks=stacks).items():
        dump += [{**entry, "pg_id": f"{kind}{entry['pg_id']}"} for entry in records["entries"]]
    return dump


def _site(frames: list[dict[str, Any]]) -> str:
    """Return the source line of a call as `Sites.find` does; `frames` has the innermost frame first."""
    import torch

    sites = Sites(torch.__path__[0], len)
    own = library = ""
    for frame in frames:
        kind = sites.kind_of(frame["filename"])
        line = f"{frame['filename']}:{frame['line']}"
        if kind == USER:
            return with_library(line, library)
        if kind == LIBRARY:
            library = library or line
        elif kind == SHARDWISE:
            own = own or line
    return library or own
