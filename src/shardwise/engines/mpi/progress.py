"""Progress of pending MPI operations: which thread tests them, how often, and their timeouts.

MPI moves data only inside its own calls, so pending requests must be tested again and again. A thread that waits for a
Work object tests its requests; while no thread waits, a background thread tests all requests, so that communication
overlaps with computation. One lock serializes all calls: MPI need not support concurrent threads, and libraries that
do are not faster with them.
"""

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
"""Time for which a wait yields its core without sleeping: a small collective takes about 10 us, a sleep at least 60."""
_SHORTEST_S, _LONGEST_S = 20e-6, 1e-3
_GROWTH = 50
"""A sleep lasts 1/50 of the time waited so far: it adds at most 2 % to a wait, and long waits use little CPU."""
_yield_core = getattr(os, "sched_yield", lambda: time.sleep(0))
"""Some builds of Python for macOS lack sched_yield."""
_STOP_S = 1.0
"""Timeout for a callback on the background thread when the process exits."""


class MpiProgress:
    """Serializes all MPI calls of a process and owns its pending Work objects and the background thread."""

    def __init__(self, mpi: Any) -> None:
        self.mpi = mpi
        self.lock = threading.Lock()
        self._open: dict[int, MpiWork] = {}
        self._lost: list[MpiCall] = []
        self._posted = threading.Event()
        self._thread: threading.Thread | None = None
        self._changed_at = 0.0
        self._stopped = False
        self.is_broken = False
        """Whether this rank failed: no further collective is started."""

    def add(self, work: MpiWork) -> None:
        """Keep a reference to `work` and its buffers until it is complete."""
        self._open[id(work)] = work

    def run_in_background(self) -> None:
        """Make the background thread test pending operations, for callers that do not wait at once."""
        self._changed_at = time.monotonic()
        with self.lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._test_pending, name="shardwise-mpi", daemon=True)
                self._thread.start()
        self._posted.set()

    def remove(self, work: MpiWork) -> None:
        """Drop the reference to a complete `work`."""
        self._open.pop(id(work), None)
        self._changed_at = time.monotonic()

    def keep_buffers(self, call: MpiCall) -> None:
        """Keep the buffers of a failed `call` until the process exits: MPI may still use them."""
        self._lost.append(call)

    def stop(self) -> bool:
        """End the background thread, as MPI requires before it is finalized; return False if a callback blocks it."""
        self._stopped = True
        self._posted.set()
        if self._thread is not None:
            self._thread.join(_STOP_S)
        return self._thread is None or not self._thread.is_alive()

    def advance_on_thread(self) -> None:
        """On the background thread, advance all pending operations: callbacks of futures run there and may wait."""
        if threading.current_thread() is not self._thread:
            return
        if self._stopped:
            raise dist.DistBackendError("the process ended while a callback of a future waited for other ranks")
        self._advance_all()

    @property
    def is_idle(self) -> bool:
        """Whether no work is pending."""
        return not self._open

    def _test_pending(self) -> None:
        while not self._stopped:
            if not self._open:
                self._posted.clear()
                # An add or stop since the check above may have set the event before it was cleared: check again.
                if not (self._open or self._stopped):
                    self._posted.wait()
            time.sleep(_pause_s(time.monotonic() - self._changed_at))
            self._advance_all()

    def _advance_all(self) -> None:
        for work in list(self._open.values()):
            if not work.advance():
                work.check_limit()


class MpiWork(Work):
    """A pending collective or message: torch's Work over MPI requests."""

    def __init__(
        self,
        progress: MpiProgress,
        call: MpiCall,
        post: Callable[[MpiCall], list[Any]],
        *,
        describe: Callable[[], str],
        limit_s: float,
    ) -> None:
        super().__init__()
        self._progress = progress
        self._call = call
        """Keeps the buffers that MPI reads and writes alive until the work is complete."""
        self._post = post
        self._outputs = call.outputs
        self._describe = describe
        """Returns the operation, its group and this rank, for errors."""
        self._limit_s = limit_s
        self._inference = torch.is_inference_mode_enabled() or any(output.is_inference() for output in call.outputs)
        """Whether tensors are written in inference mode, which is set per thread."""
        self._began = time.monotonic()
        self._requests = post(call)
        self._statuses = [progress.mpi.Status() for _ in self._requests]
        self._claimed = False
        self._done = False
        self._error: BaseException | None = None
        self._future: torch.futures.Future[Any] | None = None
        self._guard = threading.Lock()

    def advance(self) -> bool:
        """Test the requests once; return whether this work is complete."""
        if self._done:
            return True
        error: BaseException | None = None
        with self._progress.lock:
            if self._claimed:  # another thread is completing it
                return False
            try:
                self._claimed = found = self._progress.mpi.Request.Testall(self._requests, self._statuses)
            except self._progress.mpi.Exception as failed:
                self._claimed = found = True
                error = dist.DistBackendError(f"{self._describe()} failed in MPI: {self._error_text(failed)}")
                self._progress.keep_buffers(self._call)
        if found:
            self._finish_call(error)
        return self._done

    def _finish_call(self, error: BaseException | None) -> None:
        """Post the second call if there is one; otherwise write the outputs and complete the work."""
        try:
            with torch.inference_mode() if self._inference else contextlib.nullcontext():
                second = self._call.second_call() if error is None else None
                if second is not None:
                    self._requests, self._call = self._post(second), second
                    self._statuses = [self._progress.mpi.Status() for _ in self._requests]
                    self._claimed = False
                    return
                for step in self._call.after if error is None else ():
                    step()
        except Exception as failed:  # noqa: BLE001 - raised in the thread that waits
            error = failed
        self._complete(error)
        self._call = MpiCall(self._call.name)  # releases the buffers
        self._progress.remove(self)

    def _error_text(self, failed: Any) -> str:
        """Return the text of an MPI error; for several requests, the text of the first failed status."""
        mpi = self._progress.mpi
        codes = [status.Get_error() for status in self._statuses]
        codes = [code for code in codes if code not in (mpi.SUCCESS, mpi.ERR_PENDING)]
        in_status = failed.Get_error_class() == mpi.ERR_IN_STATUS and codes
        return str(mpi.Get_error_string(codes[0])) if in_status else str(failed)

    def _complete(self, error: BaseException | None) -> None:
        """Set the result once; later calls, such as a completion after the timeout, have no effect."""
        with self._guard:
            if self._done:
                return
            self._error = error
            self._done = True
            future = self._future
        if future is not None:
            self._resolve(future)

    def _resolve(self, future: torch.futures.Future[Any]) -> None:
        if self._error is None:
            future.set_result(self._outputs)
        else:
            future.set_exception(self._error)

    def check_limit(self) -> None:
        """Fail this work after its timeout, for callers that use its future and never call wait."""
        if time.monotonic() - self._began > self._limit_s:
            self._complete(self._timeout_error(self._limit_s))

    def _timeout_error(self, limit_s: float) -> BaseException:
        return dist.DistBackendError(
            f"{self._describe()} waited {limit_s:g} s for the other ranks and timed out: check their logs"
        )

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return True when the work is complete; raise its error or a timeout."""
        timeout_s = timeout.total_seconds() if timeout is not None else 0.0
        limit_s = timeout_s if timeout_s > 0 else self._limit_s
        start = time.monotonic()
        while not self.advance():
            waited_s = time.monotonic() - start
            if waited_s > limit_s:
                raise self._timeout_error(limit_s)
            self._progress.advance_on_thread()
            if waited_s < _SPIN_S:
                _yield_core()
            else:
                time.sleep(_pause_s(waited_s))
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Test the requests once and return whether the work is complete."""
        return self.advance()

    def is_success(self) -> bool:
        """Return whether the work is complete without an error."""
        return self.advance() and self._error is None

    def exception(self) -> BaseException | None:
        """Return the work's error; None if the work has not failed."""
        return self._error

    def synchronize(self) -> None:
        """Wait until the work is complete."""
        self.wait()

    def result(self) -> list[Tensor]:
        """Return the output tensors."""
        return self._outputs

    def source_rank(self) -> int:
        """Return the sender of a received message, as a rank of the group."""
        return int(self._statuses[0].Get_source())

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the output tensors, resolved by the background thread or by a thread that waits."""
        with self._guard:
            if self._future is not None:
                return self._future
            self._future = future = _Future(self)
            done = self._done
        if done:
            self._resolve(future)
        else:
            self._progress.run_in_background()
        return future


class _Future(torch.futures.Future[Any]):
    """A future whose wait advances its work, so that callbacks on the background thread may wait for it."""

    def __init__(self, work: MpiWork) -> None:
        super().__init__()
        self._work = work

    def wait(self) -> Any:
        """Wait and return the output tensors; raise the work's error."""
        self._work.wait()
        return super().wait()


def _pause_s(waited_s: float) -> float:
    """Return how long to sleep after `waited_s` without progress."""
    return min(_LONGEST_S, max(_SHORTEST_S, waited_s / _GROWTH))
