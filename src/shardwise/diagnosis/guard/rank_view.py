"""The state of one rank of this machine, from its recorded calls, its process in /proc and samples of its stack."""

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
    send_stacks_signal,
)
from shardwise.runs import calls
from shardwise.runs.call_reader import Call, CallReader
from shardwise.runs.recorder import last_mark, parse_stack

if TYPE_CHECKING:
    from shardwise.runs import RunDirectory

_SAMPLES = 16
_MAX_BYTES = 1 << 22
"""Maximum size of the file of stack samples; it is truncated beyond that."""
_PULSE_S = 1.8
"""Age of a heartbeat above which the threads of a rank cannot run; a thread updates the heartbeat twice a second."""
_SETTLED_S = 1.0
"""Seconds without progress after which torch's flight recorder is read; its data is up to 0.5 s old."""


class RankView:
    """One rank of this machine, observed through its files and /proc."""

    def __init__(self, run: RunDirectory, rank: int) -> None:
        self.rank = rank
        self._run = run
        self._reader = CallReader(run.calls(rank))
        self._signs: tuple[object, ...] = ()
        self._changed_at = time.time()
        self._samples: deque[Sample] = deque(maxlen=_SAMPLES)
        self._arrived_at = 0.0
        self._requested_at = -1
        """Size of the stacks file at the last request; -1 if no stacks are requested."""
        self._reader.refresh()
        self._old_pid = self.pid if self.is_gone else 0
        """Process of an earlier attempt whose record still exists."""

    @property
    def pid(self) -> int:
        """The process id of the rank; 0 before it has written its record."""
        return self._reader.header(calls.PID)

    @property
    def is_gone(self) -> bool:
        """Whether the process has ended."""
        return bool(self.pid) and process_state(self.pid) == "gone"

    @property
    def data_s(self) -> float:
        """Total seconds that the rank has waited for batches."""
        return self._reader.header(calls.DATA_TOTAL) / 1e9

    @property
    def separate_steps(self) -> int:
        """Number of optimizer steps without a process group."""
        return self._reader.header(calls.SEPARATE_STEPS) if self.pid != self._old_pid else 0

    def arrivals(self) -> list[Call]:
        """Return the new collectives of torch's flight recorder since the previous call."""
        found = [call for call in self._reader.arrivals() if call.entered > self._arrived_at]
        self._arrived_at = max((call.entered for call in found), default=self._arrived_at)
        return found

    def refresh(self) -> list[Call]:
        """Read the record again and return the new calls."""
        pid = self.pid
        new = self._reader.refresh()
        if self.pid != pid:
            self._samples.clear()
            self._requested_at = -1
        reader = self._reader
        header = tuple(map(reader.header, (calls.PID, calls.COUNT, calls.BATCHES, calls.DATA_SINCE)))
        flown = tuple((flight.enqueued, flight.completed) for flight in reader.flights())
        signs = (header, flown, tuple(call.waited for call in reader.waits))
        if signs != self._signs:
            self._signs, self._changed_at = signs, time.time()
            self._samples.clear()
        return new if self.pid != self._old_pid else []

    def status(self) -> RankStatus:
        """Return the current status of the rank: its waits, progress, phase and activity."""
        reader, now = self._reader, time.time()
        waits = [Wait(call=call, for_s=now - call.waited) for call in reader.waits]
        progress = []
        for (group, channel), call in reader.last.items():
            progress.append(RankProgress(group=group, channel=channel, sequence=call.sequence))
        # A call from Python appears in the flight recorder too; the Python record is more precise.
        reads_flights = not waits and now - self._changed_at > _SETTLED_S and not self.is_gone
        for flight in reader.flights():
            progress.append(RankProgress(group=flight.group, channel="", sequence=flight.enqueued, by_torch=True))
            if reads_flights and flight.pending is not None:
                waits.append(Wait(call=flight.pending, for_s=now - flight.pending.entered, by_torch=True))
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

    def request_stacks(self) -> bool:
        """Request the stacks of all threads, written shortly after; return False if the rank cannot write them."""
        if self._requested_at >= 0:
            return True
        path = self._run.stack_samples(self.rank)
        size = path.stat().st_size if path.exists() else -1
        if size > _MAX_BYTES:
            os.truncate(path, 0)
            size = 0
        if size < 0 or not send_stacks_signal(self.pid, self._reader.header(calls.STACKS_SIGNAL)):
            return False
        self._requested_at = size
        return True

    def take_sample(self) -> str:
        """Read the requested stacks if they have been written, and return them as text."""
        if self._requested_at < 0:
            return ""
        with self._run.stack_samples(self.rank).open(errors="replace") as file:
            file.seek(self._requested_at)
            text = file.read()
        stack = parse_stack(text, self._reader.header(calls.MAIN_THREAD))
        if stack:
            self._samples.append(Sample(stack, cpu_seconds(self.pid), time.time(), io_bytes(self.pid)))
        self._requested_at = -1
        return text

    def store_stacks(self) -> None:
        """Write the requested stacks to the run directory, next to the verdict."""
        path = self._run.stacks(self.rank)
        path.parent.mkdir(exist_ok=True)
        path.write_text(self.take_sample())
