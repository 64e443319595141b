"""Looking at the ranks of this machine from outside: their records, their processes, and samples of their stacks."""

from __future__ import annotations

import os
import time
from collections import deque
from typing import TYPE_CHECKING

from shardwise.diagnosis.guard.hang import RankProgress, RankStatus, Wait
from shardwise.diagnosis.guard.stacks import (
    Sample,
    cpu_seconds,
    describe_activity,
    io_bytes,
    process_state,
    request_stacks,
)
from shardwise.runs import calls
from shardwise.runs.call_reader import Call, CallReader
from shardwise.runs.recorder import last_mark, parse_stack

if TYPE_CHECKING:
    from shardwise.runs import RunDirectory

_SAMPLES = 16
_MOST_BYTES = 1 << 22
"""Bytes on disk of stacks that no verdict needs."""
_PULSE_S = 1.8
"""A thread of each rank writes twice a second that it gets its turn."""
_SETTLED_S = 1.0
"""What torch's flight recorder shows is up to half a second old: it counts once nothing else has changed for longer."""


class RankView:
    """One rank of this machine, as its files and /proc show it."""

    def __init__(self, run: RunDirectory, rank: int) -> None:
        self.rank = rank
        self._run = run
        self._reader = CallReader(run.calls(rank))
        self._signs: tuple[object, ...] = ()
        self._changed_at = time.time()
        self._samples: deque[Sample] = deque(maxlen=_SAMPLES)
        self._arrived_at = 0.0
        self._asked_at = -1
        """Where the stacks file ended when stacks were last asked for; -1 when none are awaited."""
        self._reader.refresh()
        self._past = self.pid if self.is_gone else 0
        """A process of an earlier attempt, whose record is still there."""

    @property
    def pid(self) -> int:
        """Of the rank; 0 before it has begun its record."""
        return self._reader.header(calls.PID)

    @property
    def is_gone(self) -> bool:
        """Whether its process has ended."""
        return bool(self.pid) and process_state(self.pid) == "gone"

    @property
    def data_s(self) -> float:
        """Seconds that the rank has spent waiting for batches so far."""
        return self._reader.header(calls.DATA_TOTAL) / 1e9

    @property
    def separate_steps(self) -> int:
        """Optimizer steps that the rank has made without communicating with anybody, as far as they are counted."""
        return self._reader.header(calls.SEPARATE_STEPS) if self.pid != self._past else 0

    def arrivals(self) -> list[Call]:
        """Return the collectives that torch counts and that were not returned before."""
        found = [call for call in self._reader.arrivals() if call.entered > self._arrived_at]
        self._arrived_at = max([call.entered for call in found], default=self._arrived_at)
        return found

    def refresh(self) -> list[Call]:
        """Look again; returns the calls that are new."""
        pid = self.pid
        new = self._reader.refresh()
        if self.pid != pid:
            self._samples.clear()
            self._asked_at = -1
        reader = self._reader
        header = tuple(reader.header(place) for place in (calls.PID, calls.COUNT, calls.BATCHES, calls.DATA_SINCE))
        flown = tuple((flight.enqueued, flight.completed) for flight in reader.flights())
        signs = (header, flown, tuple(call.waited for call in reader.waits))
        if signs != self._signs:
            self._signs, self._changed_at = signs, time.time()
            self._samples.clear()
        return new if self.pid != self._past else []

    def status(self) -> RankStatus:
        """Return what there is to decide upon."""
        reader, now = self._reader, time.time()
        flights = reader.flights()
        waits = [Wait(call=call, for_s=now - call.waited) for call in reader.waits]
        # What Python waits for is seen of C++ too, and clearer in Python's own calls.
        if not waits and now - self._changed_at > _SETTLED_S and not self.is_gone:
            waits = [
                Wait(call=flight.pending, for_s=now - flight.pending.entered, by_torch=True)
                for flight in flights
                if flight.pending is not None
            ]
        progress = [
            RankProgress(group=group, channel=channel, sequence=call.sequence)
            for (group, channel), call in reader.last.items()
        ]
        progress += [
            RankProgress(group=flight.group, channel="", sequence=flight.enqueued, by_torch=True) for flight in flights
        ]
        loads = bool(reader.header(calls.DATA_SINCE))
        mark = last_mark(self._run.recorder(self.rank))
        return RankStatus(
            rank=self.rank,
            state=process_state(self.pid) if self.pid else "running",
            waits=tuple(waits),
            progress=tuple(progress),
            newest=reader.newest,
            quiet_s=now - self._changed_at,
            loads=loads,
            first_batch=loads and not reader.header(calls.BATCHES),
            phase=mark.phase if mark is not None else "",
            activity=describe_activity(self._samples),
            holds_interpreter=0 < reader.header(calls.PULSE) / 1e9 < now - _PULSE_S,
        )

    def ask(self) -> bool:
        """Ask for the stacks of all threads, which are there shortly after; False if the rank cannot write them."""
        if self._asked_at >= 0:
            return True
        path = self._run.stack_samples(self.rank)
        size = path.stat().st_size if path.exists() else -1
        if size > _MOST_BYTES:
            os.truncate(path, 0)
            size = 0
        if size < 0 or not request_stacks(self.pid, self._reader.header(calls.STACKS_SIGNAL)):
            return False
        self._asked_at = size
        return True

    def take_sample(self) -> str:
        """Take in the stacks that were asked for, if they have been written, and return them."""
        if self._asked_at < 0:
            return ""
        with self._run.stack_samples(self.rank).open(errors="replace") as file:
            file.seek(self._asked_at)
            text = file.read()
        stack = parse_stack(text, self._reader.header(calls.MAIN_THREAD))
        if stack:
            self._samples.append(Sample(stack, cpu_seconds(self.pid), time.time(), io_bytes(self.pid)))
        self._asked_at = -1
        return text

    def keep_stacks(self) -> None:
        """Keep the stacks that were asked for with the verdict."""
        path = self._run.stacks(self.rank)
        path.parent.mkdir(exist_ok=True)
        path.write_text(self.take_sample())
