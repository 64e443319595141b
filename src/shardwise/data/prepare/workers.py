"""Ordered parallel map: processes compute results of tasks, and the parent receives them in the order of the tasks.

Each worker has its own pipe, and at most two tasks per worker are computed ahead of the next result, so memory does not
grow with the number of tasks. Workers are forked: they inherit the function, and exit when the parent has ended, even
by SIGKILL. An error of a task is raised when its turn comes, so the same error is raised at any number of processes.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import signal
from typing import TYPE_CHECKING, Any, TypeVar

from shardwise.environment import adopt, variables
from shardwise.errors import RankFailedError, ShardwiseError
from shardwise.runs.console import describe_exit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection
    from multiprocessing.context import ForkProcess

TASKS_AHEAD = 2
"""Tasks per worker that may be computed before the next result in order is there."""

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
    idle = list(workers)
    numbered = enumerate(tasks)
    is_exhausted = False
    while True:
        while idle and not is_exhausted and len(started) < TASKS_AHEAD * len(workers):
            entry = next(numbered, None)
            if entry is None:
                is_exhausted = True
                break
            number, started[entry[0]] = entry
            idle.pop().start(number, started[number])
        if not started:
            return
        if next_number not in finished:
            for worker in _wait(workers):
                number, result = worker.receive()
                finished[number] = result
                idle.append(worker)
            continue
        result = finished.pop(next_number)
        if isinstance(result, ShardwiseError):
            raise result
        yield started.pop(next_number), result
        next_number += 1


def _wait(workers: list[_Worker]) -> list[_Worker]:
    """Wait for results, and return the workers that have one."""
    by_connection = {worker.connection: worker for worker in workers if worker.is_busy}
    ready = multiprocessing.connection.wait(list(by_connection))
    return [by_connection[each] for each in ready]  # type: ignore[index]


class _Worker:
    """A forked process that computes one task at a time."""

    def __init__(self, compute: Callable[[Any], Any]) -> None:
        context = multiprocessing.get_context("fork")
        self.connection, theirs = context.Pipe()
        self.is_busy = False
        self._process: ForkProcess = context.Process(target=_work, args=(compute, theirs, self.connection), daemon=True)
        self._process.start()
        theirs.close()

    def start(self, number: int, task: Any) -> None:
        """Send a task."""
        self.is_busy = True
        with contextlib.suppress(BrokenPipeError):  # the process has ended: `receive` reports it
            self.connection.send((number, task))

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
        self.is_busy = False
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
