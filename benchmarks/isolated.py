"""Runs each configuration of a benchmark in a process of its own, within a budget of seconds; a failure is a result.

No configuration inherits the memory of another, and one that raises, crashes or hangs does not end the others. The
processes are forked from a server that has imported torch once, without CUDA, so that each starts in a fraction of a
second.
"""

from __future__ import annotations

import logging
import multiprocessing
import threading
import time
import traceback
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_PRELOADED = ["torch", "shardwise.testing", "shardwise.training.build", "shardwise.planner.trace.trace"]
_PROCESSES = multiprocessing.get_context("forkserver")
_STARTING = threading.Lock()


@dataclass(frozen=True)
class Failed:
    """Why a configuration has no result."""

    reason: str


@dataclass(frozen=True)
class Budget:
    """The time at which no further configuration starts, and at which running ones are ended; inf for no limit."""

    deadline: float

    @classmethod
    def of(cls, seconds: float | None) -> Budget:
        """Return a budget that begins now."""
        return cls(float("inf") if seconds is None else time.monotonic() + seconds)

    @property
    def left(self) -> float:
        """Seconds until the deadline, not negative."""
        return max(0.0, self.deadline - time.monotonic())


def run_alone(function: Callable[..., Any], *arguments: Any, limit_s: float = float("inf")) -> Any:
    """Return `function(*arguments)` from a process of its own, or Failed."""
    _PROCESSES.set_forkserver_preload(_PRELOADED)
    receiver, sender = _PROCESSES.Pipe(duplex=False)
    process = _PROCESSES.Process(target=_answer, args=(sender, function, arguments))
    with _STARTING:  # the first start also starts the server
        process.start()
    sender.close()
    try:
        if receiver.poll(None if limit_s == float("inf") else limit_s):
            return receiver.recv()
        process.kill()
        return Failed(f"no result in {limit_s:.0f} s")
    except EOFError:
        process.join()
        return Failed(f"the process ended with exit code {process.exitcode}")
    finally:
        receiver.close()
        process.join(timeout=30)
        process.kill()


def run_each(
    function: Callable[..., Any], items: Sequence[Any], *, jobs: int, budget: Budget, limit_s: float = 120.0
) -> Iterator[Any]:
    """Yield the result of every item in order, `jobs` of them at once; Failed for those beyond the budget."""

    def run(item: Any) -> Any:
        left = min(limit_s, budget.left)
        return run_alone(function, item, limit_s=left) if left > 0 else Failed("not started: the budget is spent")

    with ThreadPoolExecutor(jobs) as threads:
        yield from threads.map(run, items)


def _answer(sender: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    try:
        result = function(*arguments)
    except Exception as error:  # noqa: BLE001 - the reason is printed beside the configuration
        last = traceback.extract_tb(error.__traceback__)[-1]
        first_line = (str(error).splitlines() or [""])[0][:160]
        result = Failed(f"{type(error).__name__}: {first_line} ({Path(last.filename).name}:{last.lineno})")
    sender.send(result)
    sender.close()
