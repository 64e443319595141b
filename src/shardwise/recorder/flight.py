"""torch's flight recorder: collectives that C++ issues by itself, such as those of DDP's gradient buckets."""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
from typing import TYPE_CHECKING, Any

from shardwise.recorder.operations import Sites
from shardwise.runs.calls import ARRIVALS, FLIGHTS, Operation, pack
from shardwise.torch_private.distributed import flight_records
from shardwise.torch_private.runtime import is_inductor_imported

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardwise.runs.calls import CallRing

_LOOK_S = 0.5
_FIRST_DUMP_S, _LONGEST_S = 5.0, 300.0
"""A dump takes 30 ms for the 2000 entries that torch keeps: arrivals are looked at ever more rarely."""
_DTYPES = {"Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64"}


class FlightThread:
    """A thread that reads the counters of C++ twice a second, in 5 us, and copies what is stuck into the ring.

    The flight recorder is private to torch: whatever it does not understand ends the thread, and nothing else.
    """

    def __init__(self, ring: CallRing, group_by_name: Callable[[str], int]) -> None:
        self._ring = ring
        self._group_by_name = group_by_name
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._slots: dict[str, tuple[int, int]] = {}
        """By torch's number of a group: our slot, and the group's place in the table."""
        self._before: dict[str, tuple[int, int]] = {}
        self._reported: dict[str, int] = {}
        self._searched: dict[str, int] = {}
        """Of a group without a slot, how many collectives it had done when it was looked for."""

    def start(self) -> None:
        """Start looking, once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="shardwise record", daemon=True)
            self._thread.start()
            atexit.register(self._end)

    def _end(self) -> None:
        """Be gone before the interpreter is: a thread that comes back from C++ after it would abort the process."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(1.0)
        with contextlib.suppress(Exception):
            if getattr(sys, "last_value", None) is not None:  # an exception that nobody caught ends this process
                self._copy_last()
            else:
                self._clear_pending()

    def _clear_pending(self) -> None:
        """Clear what was stuck at the last reading: there is no other, and a process may take seconds to end."""
        for number, now in self._before.items():
            self._write(number, now, (0, 0, 0, 0))

    def _copy_last(self) -> None:
        """Write down the last collective of each group: one that failed counts as done, and is where its rank ended."""
        # torch imports its compiler to name lines, which breaks the same import under way in the script's own thread.
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
            while not self._stop.wait(_LOOK_S):
                self._ring.pulse()
                self._look()
                waited += _LOOK_S
                if waited >= next_dump:
                    self._copy_arrivals(_dump(stacks=False))
                    interval = min(interval * 2, _LONGEST_S)
                    next_dump = waited + interval

    def _look(self) -> None:
        status: dict[str, dict[str, int]] = _status()
        if self._is_worth_learning(status):
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

    def _is_worth_learning(self, status: dict[str, dict[str, int]]) -> bool:
        """Whether a group without a slot has done something, and twice as much as when it was last looked for.

        Reading all entries takes 10,000 times as long as the counters, and some groups are not recorded.
        """
        found = False
        for number, facts in status.items():
            done = facts["last_enqueued_collective"]
            if number not in self._slots and done > 0 and done >= 2 * self._searched.get(number, 0):
                self._searched[number] = done
                found = True
        return found

    def _learn(self, entries: list[dict[str, Any]]) -> None:
        for entry in entries:
            number = str(entry["pg_id"])
            if number not in self._slots and len(self._slots) < FLIGHTS:
                place = self._group_by_name(entry["process_group"][0])
                if place:
                    self._slots[number] = len(self._slots), place

    def _copy_stuck(self, stuck: dict[str, tuple[int, int]]) -> None:
        """Write down the oldest collective of each group that is not done."""
        entries = _dump(stacks=is_inductor_imported())
        for number, now in stuck.items():
            mine = [entry for entry in entries if str(entry["pg_id"]) == number and not entry["retired"]]
            oldest = min(mine, key=lambda entry: entry["collective_seq_id"], default=None)
            # None where all are done after all: gloo's threads end out of order, and the last to report is counted.
            self._write(number, now, self._pending(oldest) if oldest is not None else (0, 0, 0, 0))
            self._reported[number] = now[1]

    def _pending(self, entry: dict[str, Any]) -> tuple[int, int, int, int]:
        shapes = [
            f"{_DTYPES.get(dtype, dtype.lower())}[{'x'.join(map(str, shape))}]"
            for shape, dtype in zip(entry["input_sizes"], entry["input_dtypes"], strict=False)
        ]
        frames = entry.get("frames", ())
        is_backward = any(frame["name"] == "_engine_run_backward" for frame in frames)
        text = ", ".join([*(["gradients, in backward"] if is_backward else []), *shapes[:4]])
        operation = Operation(_name(entry), "", " ".join(shapes), text)
        return (
            self._ring.intern(operation),
            self._ring.intern(_site(frames)),
            entry["collective_seq_id"],
            entry["time_created_ns"],
        )

    def _copy_arrivals(self, entries: list[dict[str, Any]]) -> None:
        """Write down when the last collectives were issued."""
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
    """Return how far each group is, by torch's number of it, those of NCCL set apart."""
    found = flight_records(entries=False, stacks=False)
    return {f"{kind}{number}": facts for kind, read in found.items() for number, facts in read["pg_status"].items()}


def _dump(*, stacks: bool) -> list[dict[str, Any]]:
    """Return all entries, oldest first; `pg_id` is numbered as in `_status`."""
    found = flight_records(entries=True, stacks=stacks)
    return [{**entry, "pg_id": f"{kind}{entry['pg_id']}"} for kind, read in found.items() for entry in read["entries"]]


def _site(frames: list[dict[str, Any]]) -> str:
    """Return the innermost line outside torch, innermost frames coming first."""
    import torch

    sites = Sites(torch.__path__[0], len)
    lines = [(sites.kind_of(frame["filename"]), f"{frame['filename']}:{frame['line']}") for frame in frames]
    return next((line for kind, line in lines if kind == 2), next((line for kind, line in lines if kind == 1), ""))
