"""ReadAhead: a few threads that download what a source will need next."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from typing import TYPE_CHECKING, Any

from shardwise.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable

_NUM_THREADS = 4
"""Requests at the same time, so that the latency of one does not delay the others."""


class ReadAhead:
    """Runs tasks in daemon threads that start with the first task; a forked or unpickled copy has threads of its own.

    A task that fails is left out: whoever needs its result downloads it again and gets the error.
    """

    def __init__(self) -> None:
        self._tasks: tuple[int, queue.SimpleQueue[Callable[[], Any]]] | None = None
        """The process of the threads, and their tasks."""

    def __reduce__(self) -> tuple[Any, ...]:
        return ReadAhead, ()

    def submit(self, task: Callable[[], Any]) -> None:
        """Run a task soon."""
        if self._tasks is None or self._tasks[0] != os.getpid():
            self._tasks = (os.getpid(), queue.SimpleQueue())
            for _ in range(_NUM_THREADS):
                threading.Thread(target=_run, args=(self._tasks[1],), daemon=True, name="read-ahead").start()
        self._tasks[1].put(task)


def _run(tasks: queue.SimpleQueue[Callable[[], Any]]) -> None:
    while True:
        task = tasks.get()
        with contextlib.suppress(DataError):
            task()
