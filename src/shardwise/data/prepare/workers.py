"""Ordered parallel map: processes compute results of tasks, and the parent receives them in the order of the tasks.

Each worker has its own pipe with a second task in it, so that it does not wait for the parent between tasks. The number
of tasks between the next result in order and the last task that was sent is bounded, so memory does not grow with the
number of tasks. Workers are forked: they inherit the function, and exit when the parent has ended, even by SIGKILL. An
error of a task is raised when its turn comes, so the same error is raised at any number of processes.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import signal
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, TypeVar

from shardwise.environment import adopt, variables
from shardwise.errors import RankFailedError, ShardwiseError
from shardwise.runs.console import describe_exit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection
    from multiprocessing.context import ForkProcess

TASKS_AHEAD = 8
"""Tasks per worker that may be computed before the next result in order is there."""
_QUEUED = 2
"""Tasks of a worker: the one that it computes, and one in its pipe."""
_PIPE_BYTES = 16_384
"""Size up to which a task fits into a pipe whose worker is busy. A larger one waits for an idle worker: if the parent
waited for a worker to receive, and the worker for the parent to receive its result, both would wait forever."""

TaskT = TypeVar("TaskT")
ResultT = TypeVar("ResultT")


def map_in_order(
    compute: Callable[[TaskT], ResultT], tasks: Iterator[TaskT], *, processes: int
) -> Iterator[tuple[TaskT, ResultT]]:
    """Yield each task with its result, in the order of the tasks; tasks and results are pickled."""
    workers = [_Worker(compute) for _ in range(processes)]
    try:
        yield from _schedule(workers, tasks)
    finally:
        for worker in workers:
            worker.stop()


def _schedule(workers: list[_Worker], tasks: Iterator[Any]) -> Iterator[tuple[Any, Any]]:
    started: dict[int, Any] = {}
    finished: dict[int, Any] = {}
    next_number = 0
    numbered = enumerate(tasks)
    waiting = next(numbered, None)
    while waiting is not None or started:
        while waiting is not None and len(started) < TASKS_AHEAD * len(workers):
            if not min(workers, key=lambda worker: worker.num_tasks).start(*waiting):
                break
            started[waiting[0]] = waiting[1]
            waiting = next(numbered, None)
        # Results are received even if the next one is there: a worker that cannot send its result cannot continue.
        for worker in _ready(workers, timeout_s=0 if next_number in finished else None):
            number, result = worker.receive()
            finished[number] = result
        if next_number in finished:
            result = finished.pop(next_number)
            if isinstance(result, ShardwiseError):
                raise result
            yield started.pop(next_number), result
            next_number += 1


def _ready(workers: list[_Worker], *, timeout_s: float | None) -> list[_Worker]:
    """Wait for results, and return the workers that have one."""
    by_connection = {worker.connection: worker for worker in workers if worker.num_tasks}
    ready = multiprocessing.connection.wait(list(by_connection), timeout_s)
    return [by_connection[each] for each in ready]  # type: ignore[index]


class _Worker:
    """A forked process that computes one task at a time."""

    def __init__(self, compute: Callable[[Any], Any]) -> None:
        context = multiprocessing.get_context("fork")
        self.connection, theirs = context.Pipe()
        self.num_tasks = 0
        self._process: ForkProcess = context.Process(target=_work, args=(compute, theirs, self.connection), daemon=True)
        self._process.start()
        theirs.close()

    def start(self, number: int, task: Any) -> bool:
        """Send a task, and return whether that was possible without waiting for the worker."""
        if self.num_tasks >= _QUEUED:
            return False
        payload = ForkingPickler.dumps((number, task))
        if self.num_tasks and len(payload) > _PIPE_BYTES:
            return False
        self.num_tasks += 1
        with contextlib.suppress(BrokenPipeError):  # the process has ended: `receive` reports it
            self.connection.send_bytes(payload)
        return True

    def receive(self) -> tuple[int, Any]:
        """Return the number and the result of the task; raises RankFailedError if the process has ended."""
        try:
            number, result = self.connection.recv()
        except (EOFError, ConnectionResetError):
            self._process.join()
            raise RankFailedError(
                f"a worker process ended with {describe_exit(self._process.exitcode or 0)}",
                code="data.worker-died",
                fix="run the command again, which continues after the last complete shard, or use fewer --processes",
            ) from None
        self.num_tasks -= 1
        return number, result

    def stop(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()
        self.connection.close()


def _work(compute: Callable[[Any], Any], connection: Connection, other_end: Connection) -> None:
    """Compute tasks until the parent ends."""
    other_end.close()  # else this process would keep its own pipe open after the parent has ended
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the parent stops workers
    adopt({**variables(""), "TOKENIZERS_PARALLELISM": "false"})  # one thread per process, as --processes requests
    parent = multiprocessing.parent_process()
    assert parent is not None  # noqa: S101 - this process was forked
    while True:
        if parent.sentinel in multiprocessing.connection.wait([connection, parent.sentinel]):
            return
        try:
            number, task = connection.recv()
        except EOFError:
            return
        result: Any
        try:
            result = compute(task)
        except ShardwiseError as error:
            result = error
        try:
            connection.send((number, result))
        except BrokenPipeError:
            return
