"""Work under way in MPI: who tests it until it is done, how often, and what a wait beyond its limit says."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Work

from shardwise.engines.mpi.calls import MpiCall

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

    from torch import Tensor

_SPIN_S = 100e-6
"""How long a wait only yields its core: a small collective takes some 10 us, a sleep at least 60."""
_SHORTEST_S, _LONGEST_S = 20e-6, 1e-3
_GROWTH = 50
"""A pause is this part of what was waited so far: little is lost, and a long wait costs nothing."""
_yield_core = getattr(os, "sched_yield", lambda: time.sleep(0))
"""macOS has the first only in some builds of Python."""
_STOP_S = 1.0
"""What a callback on the thread gets to return, before the end of the process."""


class MpiProgress:
    """The one place that calls MPI: whose turn it is, what is under way, and the thread that carries it on.

    MPI moves data only inside its own calls. Whoever waits makes these calls himself; while nobody does, the thread
    makes them, so that data moves while the rank computes. All calls take turns: MPI need not grant more threads than
    one at a time, and libraries that do are no quicker at it.
    """

    def __init__(self, mpi: Any) -> None:
        self.mpi = mpi
        self.turn = threading.Lock()
        self._open: dict[int, MpiWork] = {}
        self._lost: list[MpiCall] = []
        self._posted = threading.Event()
        self._thread: threading.Thread | None = None
        self._changed_at = 0.0
        self._stopped = False
        self.is_broken = False
        """Whether a rank failed: nothing that all must do together is begun any more."""

    def add(self, work: MpiWork) -> None:
        """Keep `work` and its buffers until MPI is done with them."""
        self._open[id(work)] = work

    def carry(self) -> None:
        """Have the thread carry on what is under way: for works whose caller does not wait at once."""
        self._changed_at = time.monotonic()
        with self.turn:
            if self._thread is None:
                self._thread = threading.Thread(target=self._carry, name="shardwise-mpi", daemon=True)
                self._thread.start()
        self._posted.set()

    def forget(self, work: MpiWork) -> None:
        """Let go of `work`, with which MPI is done."""
        self._open.pop(id(work), None)
        self._changed_at = time.monotonic()

    def keep(self, call: MpiCall) -> None:
        """Keep the buffers of `call` for ever: it failed in MPI, which may still use some of them."""
        self._lost.append(call)

    def stop(self) -> bool:
        """End the thread, which MPI must not have when it is finalized; return False if a callback holds it up."""
        self._stopped = True
        self._posted.set()
        if self._thread is not None:
            self._thread.join(_STOP_S)
        return self._thread is None or not self._thread.is_alive()

    def stand_in(self) -> None:
        """Carry on all that is under way where the thread itself waits: callbacks of futures run on it, and may."""
        if threading.current_thread() is not self._thread:
            return
        if self._stopped:
            raise dist.DistBackendError("the process ended while a callback of a future waited for other ranks")
        self._advance_all()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way."""
        return not self._open

    def _carry(self) -> None:
        while not self._stopped:
            if not self._open:
                self._posted.clear()
                # What was added or stopped since the look above set the event before it was cleared, or will set it.
                if not (self._open or self._stopped):
                    self._posted.wait()
            time.sleep(_pause_s(time.monotonic() - self._changed_at))
            self._advance_all()

    def _advance_all(self) -> None:
        for work in list(self._open.values()):
            if not work.advance():
                work.check_limit()


class MpiWork(Work):
    """A collective or message under way: torch's Work over requests of MPI."""

    def __init__(
        self,
        progress: MpiProgress,
        call: MpiCall,
        post: Callable[[MpiCall], list[Any]],
        *,
        said: Callable[[], str],
        limit_s: float,
    ) -> None:
        super().__init__()
        self._progress = progress
        self._call = call
        """Holds the buffers that MPI reads and writes until the work is done."""
        self._post = post
        self._outputs = call.outputs
        self._said = said
        """Puts the operation, its group and this rank into words, for errors."""
        self._limit_s = limit_s
        self._inference = torch.is_inference_mode_enabled() or any(output.is_inference() for output in call.outputs)
        """Whether tensors are changed in this mode, which every thread has for itself."""
        self._began = time.monotonic()
        self._requests = post(call)
        self._statuses = [progress.mpi.Status() for _ in self._requests]
        self._claimed = False
        self._done = False
        self._error: BaseException | None = None
        self._future: torch.futures.Future[Any] | None = None
        self._guard = threading.Lock()

    def advance(self) -> bool:
        """Let MPI go on; return whether this work is done."""
        if self._done:
            return True
        error: BaseException | None = None
        with self._progress.turn:
            if self._claimed:  # another thread is about to complete it
                return False
            try:
                self._claimed = found = self._progress.mpi.Request.Testall(self._requests, self._statuses)
            except self._progress.mpi.Exception as failed:
                self._claimed = found = True
                error = dist.DistBackendError(f"{self._said()} failed in MPI: {self._words(failed)}")
                self._progress.keep(self._call)
        if found:
            self._go_on(error)
        return self._done

    def _go_on(self, error: BaseException | None) -> None:
        """Do what is left to do now that MPI is done: a second call, or the end."""
        try:
            with torch.inference_mode() if self._inference else contextlib.nullcontext():
                second = self._call.take_following() if error is None else None
                if second is not None:
                    self._requests, self._call = self._post(second), second
                    self._statuses = [self._progress.mpi.Status() for _ in self._requests]
                    self._claimed = False
                    return
                for step in self._call.after if error is None else ():
                    step()
        except Exception as failed:  # noqa: BLE001 - told to whoever waits, in whichever thread
            error = failed
        self._end(error)
        self._call = MpiCall(self._call.said)  # lets go of the buffers
        self._progress.forget(self)

    def _words(self, failed: Any) -> str:
        """Put an error of MPI into words: of many requests it says only that a status has the reason."""
        mpi = self._progress.mpi
        codes = [status.Get_error() for status in self._statuses]
        codes = [code for code in codes if code not in (mpi.SUCCESS, mpi.ERR_PENDING)]
        in_status = failed.Get_error_class() == mpi.ERR_IN_STATUS and codes
        return str(mpi.Get_error_string(codes[0])) if in_status else str(failed)

    def _end(self, error: BaseException | None) -> None:
        """Be done, once: who comes second, after the time was over, changes nothing."""
        with self._guard:
            if self._done:
                return
            self._error = error
            self._done = True
            future = self._future
        if future is not None:
            self._tell(future)

    def _tell(self, future: torch.futures.Future[Any]) -> None:
        if self._error is None:
            future.set_result(self._outputs)
        else:
            future.set_exception(self._error)

    def check_limit(self) -> None:
        """Fail this work once its time is over: for those who hold its future and never call wait."""
        if time.monotonic() - self._began > self._limit_s:
            self._end(self._late(self._limit_s))

    def _late(self, limit_s: float) -> BaseException:
        return dist.DistBackendError(
            f"{self._said()} waited {limit_s:g} s for the other ranks, its timeout: see what they were doing"
        )

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return True when the work is done; raise what went wrong, or that the time is over."""
        asked_s = timeout.total_seconds() if timeout is not None else 0.0
        limit_s = asked_s if asked_s > 0 else self._limit_s
        start = time.monotonic()
        while not self.advance():
            waited_s = time.monotonic() - start
            if waited_s > limit_s:
                raise self._late(limit_s)
            self._progress.stand_in()
            if waited_s < _SPIN_S:
                _yield_core()
            else:
                time.sleep(_pause_s(waited_s))
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Return whether the work is done, letting it go on if not."""
        return self.advance()

    def is_success(self) -> bool:
        """Return whether the work is done and nothing went wrong."""
        return self.advance() and self._error is None

    def exception(self) -> BaseException | None:
        """Return what went wrong."""
        return self._error

    def synchronize(self) -> None:
        """Return when the work is done."""
        self.wait()

    def result(self) -> list[Tensor]:
        """Return the tensors that the work wrote."""
        return self._outputs

    def source_rank(self) -> int:
        """Return who sent what was received, as a rank of the group."""
        return int(self._statuses[0].Get_source())

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the tensors that the work writes, completed by the thread unless somebody waits."""
        with self._guard:
            if self._future is not None:
                return self._future
            self._future = future = _Future(self)
            done = self._done
        if done:
            self._tell(future)
        else:
            self._progress.carry()
        return future


class _Future(torch.futures.Future[Any]):
    """A future whose waits carry its work on, so that they may be made on the thread that else would."""

    def __init__(self, work: MpiWork) -> None:
        super().__init__()
        self._work = work

    def wait(self) -> Any:
        """Return the tensors when the work is done; raise what went wrong."""
        self._work.wait()
        return super().wait()


def _pause_s(waited_s: float) -> float:
    """Return how long to sleep after `waited_s` without news."""
    return min(_LONGEST_S, max(_SHORTEST_S, waited_s / _GROWTH))
